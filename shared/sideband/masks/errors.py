"""What can be wrong with a block of kept sets.

InvalidInput
├── MalformedMaskBlock   bytes that no writer makes
└── TokenNotOfRow        the row's kept set is not that of the token
"""

from sideband.errors import InvalidInput


class MalformedMaskBlock(InvalidInput):
    """Bytes that no writer of this encoding makes."""

    def __init__(self, part: str, value: object, rule: str) -> None:
        super().__init__(f"mask block {part}", value, rule)


class TokenNotOfRow(InvalidInput):
    """The set at ``row`` of those that were asked for is not the one that the token came from."""

    def __init__(self, row: int, token_id: int) -> None:
        self.row, self.token_id = row, token_id
        super().__init__("sampled token", token_id, f"must be the one of kept set {row}")
