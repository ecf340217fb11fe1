"""Open payload files, kept for a while: descriptors and parsed headers, bounded and thread-safe."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from sideband.payload.errors import NoDescriptorFree
from sideband.payload.folders import close_read
from sideband.payload.header import PayloadHeader, Section
from sideband.payload.table import BlockTable, block_table


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenSection:
    """A section with its part of the block index."""

    section: Section
    index: NDArray[np.void]

    @cached_property
    def blocks(self) -> BlockTable:
        """Made when a segment is read: most readers of a file need one section of it."""
        return block_table(self.section, self.index)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenPayload:
    """A file whose header was read and checked. ``sections`` are keyed by their offset."""

    file: str
    fd: int
    header: PayloadHeader
    sections: dict[int, OpenSection]
    opening: object = field(default_factory=object)  # one for each time that a file is opened


@dataclass(slots=True, eq=False)
class _Entry:
    opening: threading.Lock = field(default_factory=threading.Lock)
    payload: OpenPayload | None = None
    users: int = 0
    is_dropped: bool = False  # closed by its last user


class OpenFiles:
    """At most ``files_max`` idle files stay open; files in use do not count.

    ``use`` opens a file once even when many threads ask at the same time, and never holds up
    those that ask for other files. A failed opening is not remembered. Where descriptors run out,
    idle files give theirs up.
    """

    def __init__(self, open_payload: Callable[[str], OpenPayload], *, files_max: int) -> None:
        self._open_payload = open_payload
        self._files_max = files_max
        self._start()
        _ALL.add(self)

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def use(self, file: str) -> "_Use":
        """For ``with``: the open file, which stays open until the block is left.

        Entering raises what opening raises.
        """
        return _Use(self, file)

    def forget(self, file: str) -> None:
        """Drop one file: the next use opens it anew. Running reads keep the old descriptor."""
        with self._lock:
            entry = self._entries.pop(file, None)
            if entry is not None:
                self._drop(entry)

    def close(self) -> None:
        """Drop all files. The object may be used again."""
        with self._lock:
            while self._entries:
                _, entry = self._entries.popitem()
                self._drop(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def _acquire(self, file: str) -> _Entry:
        with self._lock:
            entry = self._entries.get(file)
            if entry is None:
                entry = self._entries[file] = _Entry()
            else:
                self._entries.move_to_end(file)
            entry.users += 1
            return entry

    def _opened(self, entry: _Entry, file: str) -> OpenPayload:
        with entry.opening:
            if entry.payload is None:
                try:
                    entry.payload = self._open_payload(file)
                except NoDescriptorFree:
                    self._close_idle()
                    entry.payload = self._open_payload(file)
            return entry.payload

    def _release(self, file: str, entry: _Entry) -> None:
        with self._lock:
            entry.users -= 1
            if entry.users:
                return
            if entry.is_dropped:
                self._drop(entry)
            elif entry.payload is None:
                del self._entries[file]
            self._evict()

    def _close_idle(self) -> None:
        with self._lock:
            for file in [file for file, entry in self._entries.items() if not entry.users]:
                self._drop(self._entries.pop(file))

    def _evict(self) -> None:
        surplus = len(self._entries) - self._files_max
        if surplus <= 0:
            return
        idle = [file for file, entry in self._entries.items() if not entry.users]
        for file in idle[:surplus]:  # oldest first
            self._drop(self._entries.pop(file))

    def _drop(self, entry: _Entry) -> None:
        entry.is_dropped = True
        if entry.users == 0 and entry.payload is not None:
            close_read(entry.payload.fd)
            entry.payload = None


class _Use:
    """One use of a file. A class, since a generator costs more than the whole look-up."""

    __slots__ = ("_entry", "_file", "_files")

    def __init__(self, files: OpenFiles, file: str) -> None:
        self._files, self._file = files, file

    def __enter__(self) -> OpenPayload:
        self._entry = self._files._acquire(self._file)
        payload = self._entry.payload  # once set it stays while the entry has users
        return payload if payload is not None else self._open()

    def _open(self) -> OpenPayload:
        is_open = False
        try:
            payload = self._files._opened(self._entry, self._file)
            is_open = True
            return payload
        finally:
            if not is_open:
                self._files._release(self._file, self._entry)

    def __exit__(self, *_: object) -> None:
        self._files._release(self._file, self._entry)


_ALL: Final[WeakSet[OpenFiles]] = WeakSet()


def _start_anew_in_child() -> None:
    """A fork copies the locks that other threads held; nobody would ever release them there.

    The descriptors of the copied entries stay open: the forking thread may be using one.
    """
    for files in _ALL:
        files._start()


os.register_at_fork(after_in_child=_start_anew_in_child)
