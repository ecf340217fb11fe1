"""Resident memory of a process, now and at its peak."""

import contextlib
from pathlib import Path

import psutil


def resident_bytes(pid: int) -> int:
    """Resident memory now; 0 for a process that is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def peak_bytes(pid: int) -> int:
    """Highest resident memory so far where the kernel tells (Linux), else resident memory now."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resident_bytes(pid)
