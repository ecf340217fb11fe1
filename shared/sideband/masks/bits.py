"""Ids packed at a fixed width into a little-endian bit stream, by whole arrays.

Id i lies in bits [i·w, (i + 1)·w); bit 0 is the least significant of the first byte. Eight ids of
width w fill exactly w bytes, so they are handled as groups of eight: at most two shifts per id of a
group, each over all groups at once. Cost grows with the ids and nothing else.

Legend: M ids, G groups of eight.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

WIDTH_MAX: Final = 24  # the largest vocabulary has 2^24 ids
_GROUP: Final = 8
_WORD_BITS: Final = 64


def width_of(vocab_size: int) -> int:
    """Bits of one packed id: ceil(log2(vocab_size)), at least 1."""
    assert 1 <= vocab_size <= 1 << WIDTH_MAX, "the model shape bounds the vocabulary"
    return max(1, (vocab_size - 1).bit_length())


def packed_bytes(count: int, width: int) -> int:
    """Bytes of ``count`` ids at ``width`` bits, the last one filled up."""
    return -(-count * width // 8)


def pack_ids(ids_M: NDArray[np.int32], width: int) -> NDArray[np.uint8]:
    """The bit stream. Ids must lie in [0, 2^width): the caller has checked them."""
    assert 1 <= width <= WIDTH_MAX
    count = len(ids_M)
    groups = -(-count // _GROUP)
    ids = np.zeros((groups, _GROUP), np.uint64)
    ids.reshape(-1)[:count] = ids_M
    words = np.zeros((groups, _words(width)), np.uint64)
    for lane in range(_GROUP):
        word, shift = divmod(lane * width, _WORD_BITS)
        words[:, word] |= ids[:, lane] << np.uint64(shift)
        if shift + width > _WORD_BITS:  # the id straddles two words
            words[:, word + 1] |= ids[:, lane] >> np.uint64(_WORD_BITS - shift)
    octets = words.view(np.uint8).reshape(groups, _words(width) * 8)[:, :width]
    stream = np.ascontiguousarray(octets).reshape(-1)  # at width 1 reshape alone keeps the stride
    return stream[: packed_bytes(count, width)]


def unpack_ids(stream: NDArray[np.uint8], count: int, width: int) -> NDArray[np.int32]:
    """The first ``count`` ids of a stream of exactly ``packed_bytes(count, width)`` bytes."""
    assert 1 <= width <= WIDTH_MAX
    assert len(stream) == packed_bytes(count, width), "the caller sizes the stream"
    groups = -(-count // _GROUP)
    padded = np.zeros(groups * width, np.uint8)
    padded[: len(stream)] = stream
    words8 = np.zeros((groups, _words(width) * 8), np.uint8)
    words8[:, :width] = padded.reshape(groups, width)
    words = words8.view(np.uint64)
    ids = np.empty((groups, _GROUP), np.int32)
    mask = np.uint64((1 << width) - 1)
    for lane in range(_GROUP):
        word, shift = divmod(lane * width, _WORD_BITS)
        value = words[:, word] >> np.uint64(shift)
        if shift + width > _WORD_BITS:
            value |= words[:, word + 1] << np.uint64(_WORD_BITS - shift)
        ids[:, lane] = value & mask
    return ids.reshape(-1)[:count]


def _words(width: int) -> int:
    """64-bit words that hold one group."""
    return -(-_GROUP * width // _WORD_BITS)
