"""Settles the memory of a process that serves requests: what it keeps, and what it gives back."""

import ctypes
import gc
from typing import Final

# Of glibc's malloc.h. Blocks below the first size come from the heap and are used again; a heap's
# free end is given back only beyond the second. By default both are 128 kB at first: each larger
# body is mapped, zeroed page by page and unmapped, which costs more than all work on it.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
KEPT_BLOCK_BYTES_MAX: Final = 4 << 20
KEPT_FREE_BYTES_MAX: Final = 64 << 20

assert KEPT_BLOCK_BYTES_MAX <= 32 << 20, "glibc refuses more"


def settle() -> None:
    """Call it once, when everything that stays has been made."""
    # What a running service keeps needs no looking through at each collection, and what a request
    # makes is gone without one.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library has no such thing, and needs none
        mallopt(_M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES_MAX)
        mallopt(_M_TRIM_THRESHOLD, KEPT_FREE_BYTES_MAX)
