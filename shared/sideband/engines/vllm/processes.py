"""By what one start of a server is told from the next: a word that all its API processes share.

A server that was started anew has the weights of its start, and looks as before. So each answer
carries this word (``engine_process``), and ``/inference/v1/sideband`` tells it.
"""

import multiprocessing
from pathlib import Path
from typing import Final
from uuid import uuid4

ENGINE_PROCESS: Final = "engine_process"  # in answers, and in what an engine says of itself
_PROC: Final = Path("/proc")
_BOOT_ID: Final = Path("sys/kernel/random/boot_id")
_START_TICKS_AT: Final = 19  # of the fields behind the name, which may hold blanks


def server_process(*, api_processes: int, proc: Path = _PROC) -> str | None:
    """The word of this server; None where it may have several API processes that cannot agree on
    one.

    Alone, a process makes up its own. Several have one launcher, which dies with any of them: it
    is named by the machine's boot, its id and its start.
    """
    if api_processes == 1:
        return uuid4().hex
    launcher = multiprocessing.parent_process() if api_processes > 1 else None
    if launcher is None or launcher.pid is None:
        return None
    try:
        boot_id = (proc / _BOOT_ID).read_text("ascii").strip()
        status = (proc / str(launcher.pid) / "stat").read_text("utf-8", "replace")
    except OSError:
        return None
    fields = status.rpartition(")")[2].split()
    start_ticks = fields[_START_TICKS_AT] if len(fields) > _START_TICKS_AT else "0"
    if not boot_id or start_ticks == "0":  # a sandbox that does not know
        return None
    return f"{boot_id}.{launcher.pid}.{start_ticks}"
