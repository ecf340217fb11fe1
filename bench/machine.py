"""Facts about the machine that a reader needs beside every number."""

import os
import platform
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from bench.results import Machine

PACKAGES: Final = ("numpy", "msgspec", "pyzmq", "xxhash", "fastapi", "uvicorn", "httpx", "aiohttp")


def describe() -> Machine:
    """This machine, now."""
    return Machine(
        processor=_first_line("/proc/cpuinfo", "model name"),
        cores=os.cpu_count() or 1,
        memory_bytes=int(_first_line("/proc/meminfo", "MemTotal").split()[0]) * 1024,
        filesystem=filesystem_of(Path(tempfile.gettempdir())),
        kernel=platform.release(),
        python=platform.python_version(),
        load_before=round(os.getloadavg()[0], 2),
    )


def versions() -> dict[str, str]:
    """The packages whose speed is in the numbers."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def filesystem_of(folder: Path) -> str:
    """The type of the file system that holds ``folder``: of the longest mount point above it."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = [(mount, kind) for mount, kind in mounts if folder.resolve().is_relative_to(mount)]
    return max(above, key=lambda item: len(item[0]), default=("", "unknown"))[1]


def _first_line(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(key):
            return line.partition(":")[2].strip()
    return "0 unknown"
