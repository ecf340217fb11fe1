"""Whether a lock that one side took refuses the other. Blocking.

Locks of an open file conflict within one process too, and with those that SQLite takes, which are a
process's: so both sides may run in one process, and what is learned holds for the ledger.
"""

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# struct flock: type, whence, start, length, process. The process must be 0.
WHOLE_FILE: Final = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
IN_USE: Final = (errno.EAGAIN, errno.EACCES)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's write lock. Raises OSError, of it BlockingIOError where it is taken."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, WHOLE_FILE)
        except OSError as exc:
            if exc.errno in IN_USE:
                raise BlockingIOError(errno.EAGAIN, "the other side has it") from exc
            raise
        yield
    finally:
        os.close(fd)  # gives the lock up


def check_refused(path: Path) -> None:
    """Raises OSError unless somebody else's lock keeps this side out."""
    with contextlib.suppress(BlockingIOError), locked(path):
        raise OSError(errno.ENOLCK, "a lock of the other side is not seen")
