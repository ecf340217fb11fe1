"""How far the environment's process may go: a number in a file, which outlives whoever waits."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Final

POLL_S: Final = 0.02
PASS_TIMEOUT_S: Final = 180.0  # a busy machine with two cores, and what dies meanwhile


@dataclass(slots=True, kw_only=True, eq=False)
class Gate:
    """Lets through groups, counted from 0, one after the other; it never closes again."""

    path: Path
    groups: int
    let: int = 0

    def let_share(self, share: float) -> None:
        """Let through the groups up to this share of them: one at 0, and the last only at 1."""
        self._let(int(share * (self.groups - 1)) + 1)

    def let_another(self) -> None:
        """Let one more through, if there is one."""
        self._let(self.let + 1)

    def _let(self, groups: int) -> None:
        self.let = max(self.let, min(groups, self.groups))
        aside = self.path.with_suffix(".aside")
        aside.write_text(str(self.let))
        aside.replace(self.path)

    async def passed(self, group: int) -> None:
        """Wait until ``group`` is let through, by whatever process. Raises TimeoutError."""
        async with asyncio.timeout(PASS_TIMEOUT_S):
            while int(self.path.read_text()) <= group:  # noqa: ASYNC110 - another process
                await asyncio.sleep(POLL_S)
