"""Memory by the kernel's own accounting, each side in a process of its own.

``VmHWM`` of a fresh process is its own high-water mark (``ru_maxrss`` starts with the parent's),
and writing 5 to ``clear_refs`` sets it back to what is resident now. So "held" is what stays
resident for the data, and "peak" what the work adds on top at its worst moment.
"""

import ctypes
import gc
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

CHILD_TIMEOUT_S: Final = 900.0
_CLEAR_REFS: Final = Path("/proc/self/clear_refs")


class ChildFailed(RuntimeError):
    """A measuring process died; its last words are in the message."""

    def __init__(self, target: str, returncode: int, stderr: str) -> None:
        self.target, self.returncode = target, returncode
        super().__init__(f"{target} ended with {returncode}: {stderr[-2000:]}")


@dataclass(slots=True)
class Held:
    """Watches this process from ``settle`` on."""

    before_bytes: int
    held_bytes: int = 0

    @staticmethod
    def begin() -> "Held":
        """Remember what is resident before the data is made."""
        return Held(before_bytes=_settled())

    def settle(self) -> None:
        """The data is there: what it holds is known, and the peak starts from here."""
        self.held_bytes = _settled() - self.before_bytes
        _CLEAR_REFS.write_text("5")

    def peak_bytes(self) -> int:
        """What the work since ``settle`` added at its worst moment."""
        return resident("VmHWM") - self.before_bytes - self.held_bytes


def resident(key: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process in bytes."""
    return resident_of("self", key)


def resident_of(pid: int | str, key: str) -> int:
    """The same of a running process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def _settled() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for later is not held
    return resident("VmRSS")


def in_child(function: Callable[..., dict[str, Any]], **arguments: Any) -> dict[str, Any]:
    """Run a module-level function in a fresh process; arguments and result travel as JSON.

    Raises ChildFailed.
    """
    target = f"{function.__module__}:{function.__qualname__}"
    command = [sys.executable, "-m", "bench.memory", target, json.dumps(arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise ChildFailed(target, done.returncode, done.stderr)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _main(target: str, arguments: str) -> None:
    module, _, name = target.partition(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    _main(*sys.argv[1:])
