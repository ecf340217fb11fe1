"""What one side does to the filesystem and measures. Blocking."""

import errno
import os
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import xxhash

from sideband.doctor.meeting import publish
from sideband.doctor.messages import Side
from sideband.payload.layout import BLOCK_BYTES_TARGET

FSYNC_ROUNDS: Final = 20
FSYNC_BYTES: Final = 1 << 20  # about one short request's file
READ_THREADS: Final = 32  # as a rank
DIGEST_BYTES: Final = 8


def side_of(folder: Path, prefix: str) -> Side:
    """This side, with the times of ``FSYNC_ROUNDS`` publications. Raises OSError."""
    content = random.Random(prefix).randbytes(FSYNC_BYTES)
    times = []
    for serial in range(FSYNC_ROUNDS):
        begin = time.perf_counter()
        publish(folder, f"{prefix}-fsync-{serial}", content)
        times.append(time.perf_counter() - begin)
        (folder / f"{prefix}-fsync-{serial}").unlink()
    return Side(host=socket.gethostname(), boot_id=boot_id(), fsync_s=times)


def boot_id() -> str:
    """Names this running machine: two containers on it share a page cache, and this id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:  # not Linux: the name is the best there is
        return socket.gethostname()


def sealed(serial: int, size_bytes: int) -> bytes:
    """Contents that say by themselves whether they are whole."""
    body = random.Random(serial).randbytes(size_bytes - DIGEST_BYTES)
    return body + xxhash.xxh3_64_digest(body)


def is_whole(content: bytes) -> bool:
    """Whether ``content`` is something that ``sealed`` made."""
    body, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    return xxhash.xxh3_64_digest(body) == digest


class Watched:
    """Reads one name again and again while the other side renames over it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.reads = self.torn = self.missing = self.stale = 0

    def look(self) -> bool:
        """One reading: whether it was whole. Raises OSError for what is neither gone nor stale."""
        try:
            content = self._path.read_bytes()
        except OSError as exc:
            if exc.errno == errno.ESTALE:
                self.stale += 1
            elif exc.errno == errno.ENOENT:
                self.missing += bool(self.reads)  # before the first, it may still be on its way
            else:
                raise
            return False
        self.reads += 1
        whole = is_whole(content)
        self.torn += not whole
        return whole


def read_checked(path: Path, size_bytes: int, checksum: int) -> float:
    """Seconds to read the file in blocks by ``READ_THREADS`` threads.

    Raises OSError, also when the file is shorter, and when it is not what was written (EIO).
    """
    content = memoryview(bytearray(size_bytes))
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        begin = time.perf_counter()
        with ThreadPoolExecutor(READ_THREADS) as pool:
            counts = pool.map(
                lambda offset: os.preadv(fd, [content[offset:][:BLOCK_BYTES_TARGET]], offset),
                range(0, size_bytes, BLOCK_BYTES_TARGET),
            )
            done_bytes = sum(counts)
        seconds = time.perf_counter() - begin
    finally:
        os.close(fd)
    if done_bytes != size_bytes:
        raise OSError(errno.EIO, f"{done_bytes} of {size_bytes} bytes were there after fsync")
    if xxhash.xxh3_64_intdigest(content) != checksum:
        raise OSError(errno.EIO, "the bytes read are not those that were written")
    return seconds
