"""Whole reads and writes over the partial ones of the operating system. Blocking."""

import errno
import os
from collections.abc import Sequence
from typing import Final

from sideband.payload.errors import PayloadTruncated, read_error
from sideband.payload.layout import Buffer

IOV_MAX: Final = 1024  # Linux; more buffers in one call are an error


def write_all(fd: int, buffers: Sequence[Buffer]) -> None:
    """Write the buffers one after the other, without joining them. Raises OSError."""
    pending = [view for view in map(_bytes_of, buffers) if len(view)]
    first = 0
    while first < len(pending):
        written = os.writev(fd, pending[first : first + IOV_MAX])
        if written == 0:  # neither progress nor an error: never loop on it
            raise OSError(errno.EIO, "nothing was written")
        while first < len(pending) and written >= len(pending[first]):
            written -= len(pending[first])
            first += 1
        if written:  # a partial write ends inside a buffer
            pending[first] = pending[first][written:]


def read_exactly(fd: int, buffers: Sequence[Buffer], offset: int, *, file: str) -> None:
    """Fill the buffers one after the other from ``offset``.

    Raises PayloadTruncated when the file ends before, StalePayload or ReadFailed from the
    operating system. What is in the buffers after an error is undefined.
    """
    pending = [view for view in map(_bytes_of, buffers) if len(view)]
    wanted = sum(len(view) for view in pending)
    done = 0
    first = 0
    while first < len(pending):
        try:
            count = os.preadv(fd, pending[first : first + IOV_MAX], offset + done)
        except OSError as exc:
            raise read_error(file, exc) from exc
        if count == 0:
            raise PayloadTruncated(file, expected_bytes=offset + wanted, actual_bytes=offset + done)
        done += count
        while first < len(pending) and count >= len(pending[first]):
            count -= len(pending[first])
            first += 1
        if count:
            pending[first] = pending[first][count:]


def _bytes_of(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
