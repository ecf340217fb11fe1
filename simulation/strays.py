"""Files that are left in a payload root."""

import asyncio
import os
from pathlib import Path
from typing import Final

POLL_S: Final = 0.05
EMPTY_TIMEOUT_S: Final = 15.0  # deletes end after the run, and lost attempts are looked for twice


def stray_files(root: Path) -> list[Path]:
    """Payload files and leftovers of writers below a root. Folders may go while it is walked."""
    return [
        Path(folder) / name
        for folder, _, names in os.walk(root)
        for name in names
        if name.endswith((".sbp", ".staging"))
    ]


async def emptied(root: Path) -> list[Path]:
    """What is left in a root that should become empty, after a bounded wait."""
    left: list[Path] = []
    for _ in range(int(EMPTY_TIMEOUT_S / POLL_S)):
        left = await asyncio.to_thread(stray_files, root)
        if not left:
            break
        await asyncio.sleep(POLL_S)
    return left
