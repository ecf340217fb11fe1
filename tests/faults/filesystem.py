"""A filesystem with faults: stands in for the calls of ``os`` on payload files of this process.

Reads: late (not visible yet), stale (the server forgot the handle), short, flip (one bit), eio.
Writes: torn (a part is written), enospc, eio on write, sync and rename, slow sync.
"""

import errno
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from sideband.payload.copying import COPY_BLOCKS
from tests.faults.seeds import Chance

SLOW_SYNC_S = 0.05


def is_payload(name: object) -> bool:
    """Payload files and their staging form."""
    return isinstance(name, str) and (name.endswith((".sbp", ".sbp.staging")))


@dataclass(eq=False)
class FaultyDisk:
    """Rates by kind, from 0 to 1; a kind that is left out never strikes."""

    chance: Chance
    rates: Mapping[str, float]
    names: dict[int, str] = field(default_factory=dict)  # of open descriptors
    lock: threading.Lock = field(default_factory=threading.Lock)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Until the patch is undone. A compiled loop would read past it."""
        patch.setattr(COPY_BLOCKS, "for_items", lambda count: None)
        self.real = {name: getattr(os, name) for name in CALLS}
        for name in CALLS:
            patch.setattr(os, name, getattr(self, name))

    def strikes(self, kind: str, fd: int | None = None) -> bool:
        """Only for payload files."""
        with self.lock:
            if fd is not None and fd not in self.names:
                return False
            return self.chance.strikes(kind, self.rates.get(kind, 0.0))

    def open(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
        if is_payload(path):
            if not flags & os.O_CREAT and self.strikes("late"):
                raise FileNotFoundError(errno.ENOENT, "not visible yet", path)
            if flags & os.O_CREAT and self.strikes("enospc"):
                raise OSError(errno.ENOSPC, "no space", path)
        fd: int = self.real["open"](path, flags, *args, **options)
        if is_payload(path):
            with self.lock:
                self.names[fd] = path
        return fd

    def close(self, fd: int) -> None:
        with self.lock:
            self.names.pop(fd, None)
        self.real["close"](fd)

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int, *args: Any) -> int:
        self._fail_read(fd)
        if self.strikes("short", fd):
            return int(self.real["preadv"](fd, [memoryview(buffers[0])[:1]], offset, *args))
        count = int(self.real["preadv"](fd, buffers, offset, *args))
        if count and self.strikes("flip", fd):
            view = memoryview(buffers[0]).cast("B")
            view[self.chance.rng.randrange(min(len(view), count))] ^= (
                1 << self.chance.rng.randrange(8)
            )
        return count

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        self._fail_read(fd)
        if self.strikes("short", fd):
            size = self.chance.rng.randrange(64)
        content: bytes = self.real["pread"](fd, size, offset)
        if content and self.strikes("flip", fd):
            place = self.chance.rng.randrange(len(content))
            flipped = bytes([content[place] ^ 1 << self.chance.rng.randrange(8)])
            content = content[:place] + flipped + content[place + 1 :]
        return content

    def _fail_read(self, fd: int) -> None:
        if self.strikes("stale", fd):
            raise OSError(errno.ESTALE, "stale file handle")
        if self.strikes("eio", fd):
            raise OSError(errno.EIO, "input/output error")

    def writev(self, fd: int, buffers: Sequence[Any]) -> int:
        self._fail_write(fd)
        if self.strikes("torn", fd):
            first = memoryview(buffers[0]).cast("B")
            return int(self.real["writev"](fd, [first[: max(1, len(first) // 3)]]))
        return int(self.real["writev"](fd, buffers))

    def _fail_write(self, fd: int) -> None:
        if self.strikes("enospc", fd):
            raise OSError(errno.ENOSPC, "no space left on device")
        if self.strikes("eio_write", fd):
            raise OSError(errno.EIO, "input/output error")

    def fsync(self, fd: int) -> None:
        if self.strikes("slow_sync", fd):
            threading.Event().wait(SLOW_SYNC_S)
        if self.strikes("eio_sync", fd):
            raise OSError(errno.EIO, "input/output error")
        self.real["fsync"](fd)

    def rename(self, source: Any, target: Any, **options: Any) -> None:
        if is_payload(target) and self.strikes("eio_rename"):
            raise OSError(errno.EIO, "input/output error")
        self.real["rename"](source, target, **options)


CALLS = ("open", "close", "preadv", "pread", "writev", "fsync", "rename")
