"""``torchrun`` as a child: started, watched, and never left behind."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from examples.train_tiny_moe.rank import RankSettings
from examples.train_tiny_moe.services import RunFailed

STOP_TIMEOUT_S: Final = 10.0
LOG_NAME: Final = "ranks.log"
LOG_SHOWN_CHARACTERS: Final = 4000


@asynccontextmanager
async def ranks(settings: RankSettings) -> AsyncIterator["asyncio.Task[None]"]:
    """All ranks of the grid. The task ends when they do, with RunFailed if one failed."""
    out = Path(settings.out)
    settings_path, log_path = out / "ranks.json", out / LOG_NAME
    settings_path.write_bytes(msgspec.json.encode(settings))
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *("env", "GLOO_SOCKET_IFNAME=lo"),  # this machine only, whatever its name resolves to
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(settings.dp_size * settings.cp_size)),
            *("-m", "examples.train_tiny_moe.rank", str(settings_path)),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    ended = asyncio.create_task(_ended(process, log_path))
    try:
        yield ended
    finally:
        await _stop(process)
        ended.cancel()
        with suppress(asyncio.CancelledError, RunFailed):
            await ended


async def _ended(process: asyncio.subprocess.Process, log_path: Path) -> None:
    code = await process.wait()
    if code != 0:
        log = await asyncio.to_thread(log_path.read_text, errors="replace")
        raise RunFailed(f"the ranks ended with {code}\n{log[-LOG_SHOWN_CHARACTERS:]}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Ask torchrun to end its ranks; after a deadline the whole session is killed."""
    if process.returncode is not None:
        return
    process.terminate()
    with suppress(TimeoutError):
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
