"""The fixed bytes of a payload file and its limits. Normative text: docs/payload-format.md."""

import struct
import sys
from typing import Final

import numpy as np
import xxhash

MAGIC: Final = b"SIDEBAND"
VERSION: Final = 1
FLAGS: Final = 0

PREFIX: Final = struct.Struct("<8sHHIQ")  # magic, version, flags, header bytes, file bytes
CHECKSUM: Final = struct.Struct("<Q")  # of the prefix, the header and the block index
PREFIX_BYTES: Final = PREFIX.size + CHECKSUM.size
BLOCK_ENTRY: Final = np.dtype(
    [("offset", "<u8"), ("size_bytes", "<u4"), ("rows", "<u4"), ("checksum", "<u8")]
)
SECTION_ALIGNMENT: Final = 64  # a cache line: decoded arrays may be mapped in place

BLOCK_BYTES_TARGET: Final = 256 * 1024  # an edge read wastes at most this; the index stays tiny
BLOCK_BYTES_MAX: Final = 256 * 1024 * 1024
HEADER_BYTES_MAX: Final = 1024 * 1024
BLOCKS_MAX: Final = 1 << 20
FILE_BYTES_MAX: Final = 1 << 48
ROWS_MAX: Final = 1 << 31
CHOICE_MAX: Final = ROWS_MAX

# The arrays on disk are little-endian and are read in place, without a swap.
assert sys.byteorder == "little", "Sideband runs on little-endian machines only"
assert (PREFIX_BYTES, BLOCK_ENTRY.itemsize) == (32, 24), "the byte table fixes both"
assert BLOCK_BYTES_TARGET <= BLOCK_BYTES_MAX < 1 << 32, "a block's size is stored in 32 bits"

Buffer = bytes | bytearray | memoryview


def aligned(offset: int) -> int:
    """The first section boundary at or after ``offset``."""
    return -(-offset // SECTION_ALIGNMENT) * SECTION_ALIGNMENT


def checksum(*buffers: Buffer) -> int:
    """xxh3-64, seed 0, of the buffers one after the other."""
    if len(buffers) == 1:
        return xxhash.xxh3_64_intdigest(buffers[0])
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()


block_checksum: Final = xxhash.xxh3_64_intdigest  # of one buffer, for a loop over blocks
