"""Ask the operating system to bring what was written to the disk, long before a sync waits for it.

Python has no call for that; the C library has one on Linux. Where there is none, syncs wait longer.
"""

import ctypes
from typing import Final

_BEGIN_ONLY: Final = 2  # SYNC_FILE_RANGE_WRITE: waits for nothing and takes no error from a sync
_SYNC_FILE_RANGE: Final = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _SYNC_FILE_RANGE is not None:
    _SYNC_FILE_RANGE.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def begin_writeback(fd: int, offset_bytes: int, size_bytes: int) -> None:
    """Begin to store a range of a file. A hint: what cannot be stored is told by the next fsync."""
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(fd, offset_bytes, size_bytes, _BEGIN_ONLY)
