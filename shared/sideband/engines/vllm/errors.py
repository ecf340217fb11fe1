"""What the plugin refuses.

SidebandError
├── AskRefused      the request asks for what it may not have, or not here: a 400
└── RowsUnfit       the engine's rows cannot belong to its own tokens: a 500, and no file
"""

from sideband.errors import SidebandError


class AskRefused(SidebandError):
    """A request by handle that cannot be served; ``field`` is the extra argument at fault."""

    def __init__(self, field: str, rule: str) -> None:
        self.field, self.rule = field, rule
        super().__init__(f"extra_args.{field}: {rule}")


class RowsUnfit(SidebandError):
    """Rows or masks that do not belong to the tokens of their choice."""

    def __init__(self, choice: int, reason: str) -> None:
        self.choice, self.reason = choice, reason
        super().__init__(f"choice {choice}: {reason}")
