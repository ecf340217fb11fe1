"""Blocks of kept sets: any rows of any vocabulary come back; what no writer makes is refused."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.masks.csr_bits import bytes_before, decode_rows, encode_block
from sideband.masks.errors import MalformedMaskBlock, TokenNotOfRow
from sideband.masks.rows import MaskRows
from tests.unit.masks.support import A_FEW, VOCAB_EDGES, Kept, kept_sets, lists, mask_rows
from tests.unit.masks.test_bits import packed_by_hand
from tests.unit.masks.ways import WAYS, names, taking


def encoded(kept: Kept, vocab_size: int) -> bytes:
    none = np.zeros(len(kept), np.int32)
    return b"".join(part.tobytes() for part in encode_block(mask_rows(kept), none, vocab_size))


def decoded(
    stored: bytes, rows: int, vocab_size: int, *, first: int = 0, sampled: list[int] | None = None
) -> MaskRows:
    """Rows from ``first`` on; without ``sampled`` the tokens are those that stand first."""
    if sampled is None:
        sampled = first_ids(stored, rows, vocab_size)
    return decode_rows(
        memoryview(stored), rows, vocab_size, first=first, sampled_N=np.array(sampled, np.int32)
    )


def first_ids(stored: bytes, rows: int, vocab_size: int) -> list[int]:
    """The first id of each row as it lies there, whatever it is; any where there is none."""
    rows = min(rows, 20)
    width = max(1, (vocab_size - 1).bit_length())
    stream = int.from_bytes(stored[4 * (rows + 1) :], "little")
    starts = struct.unpack_from(f"<{rows}I", stored.ljust(4 * rows, b"\0"))
    return [(stream >> min(start, 1000) * width) & ((1 << width) - 1) for start in starts]


def forged(starts: list[int], ids: list[int], width: int) -> bytes:
    return struct.pack(f"<{len(starts)}I", *starts) + packed_by_hand(ids, width)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("vocab_size", VOCAB_EDGES)
@A_FEW
@given(data=st.data())
def test_any_rows_of_every_vocabulary_come_back(
    way: str, vocab_size: int, data: st.DataObject
) -> None:
    kept = data.draw(kept_sets(vocab_size)) or [[]]
    sampled = [data.draw(st.sampled_from(row)) if row else -1 for row in kept]
    stored = encoded(kept, vocab_size)
    first = data.draw(st.integers(0, len(kept) - 1))
    last = data.draw(st.integers(first + 1, len(kept)))
    with taking(way):
        found = decoded(stored, len(kept), vocab_size, first=first, sampled=sampled[first:last])
    assert lists(found) == kept[first:last]
    assert found.ids_M.dtype == np.int32
    assert found.starts_N.dtype == np.int64


@given(data=st.data(), vocab_size=st.sampled_from([1, 2, 1000, 151_936, 1 << 24]))
def test_the_bound_of_a_blocks_bytes_holds_for_any_rows_of_it(
    data: st.DataObject, vocab_size: int
) -> None:
    kept = data.draw(kept_sets(vocab_size)) or [[]]
    first = data.draw(st.integers(0, len(kept) - 1))
    last = data.draw(st.integers(first + 1, len(kept)))
    before = bytes_before(mask_rows(kept), vocab_size)
    assert len(encoded(kept[first:last], vocab_size)) <= before[last] - before[first] + before[0]


@pytest.mark.parametrize("way", WAYS)
def test_the_set_of_another_token_is_refused(way: str) -> None:
    stored = encoded([[7, 999], [], [5]], 1000)
    with taking(way):
        assert len(decoded(stored, 3, 1000, sampled=[7, 1, 5])) == 3
        with pytest.raises(TokenNotOfRow) as caught:
            decoded(stored, 3, 1000, first=1, sampled=[1, 6])
    assert (caught.value.row, caught.value.token_id) == (1, 6)


def test_a_block_is_its_starts_and_its_packed_ids() -> None:
    assert encoded([[7, 999], [], [5]], 1000) == forged([0, 2, 2, 3], [7, 999, 5], 10)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("stored", "rows", "vocab_size", "reason"),
    [
        (b"", 1, 1000, "must hold 1 rows"),
        (forged([0, 0], [], 10)[:-1], 1, 1000, "must hold 1 rows"),
        (forged([0, 1], [5], 10), 2, 1000, "must hold 2 rows"),
        (forged([0, 1], [5], 10), 1 << 40, 1000, "must hold"),
        (forged([1, 1], [], 10), 1, 1000, "begin with 0"),
        (forged([0, 2, 1], [1, 2], 10), 2, 1000, "backwards"),
        (forged([0, 1 << 31], [], 10), 1, 1000, "keeps over 1000"),
        (forged([0, 4], [0, 1, 0, 1], 1), 1, 2, "keeps over 2"),
        (forged([0, 2], [5], 10), 1, 1000, "must hold 2 ids"),
        (forged([0, 1], [5, 6, 7], 10), 1, 1000, "must hold 1 ids"),
        (forged([0, 1], [5], 10) + b"\0", 1, 1000, "must hold 1 ids"),
        (forged([0, 1], [5 | 1 << 10], 10), 1, 1000, "must be zero"),
        (forged([0, 1], [1000], 10), 1, 1000, "below 1000"),
        (forged([0, 2], [6, 5], 10), 1, 1000, "ascend"),
        (forged([0, 2], [5, 5], 10), 1, 1000, "ascend"),
        (forged([0, 1, 1, 3], [9, 6, 6], 10), 3, 1000, "ascend"),
        (forged([0, 1], [1], 1), 1, 1, "below 1"),
    ],
)
def test_what_no_writer_makes_is_refused(
    way: str, stored: bytes, rows: int, vocab_size: int, reason: str
) -> None:
    with taking(way), pytest.raises(MalformedMaskBlock, match=reason):
        decoded(stored, rows, vocab_size)


@given(stored=st.binary(max_size=64), rows=st.integers(1, 16), bits=st.integers(1, 24))
def test_any_bytes_are_rows_or_refused(stored: bytes, rows: int, bits: int) -> None:
    vocab_size = 1 << bits
    found = {outcome(way, stored, rows, vocab_size) for way in names()}
    assert len(found) == 1, "in each way the same"
    kept = found.pop()
    if kept is not None:
        assert len(kept) == rows
        assert encoded([list(row) for row in kept], vocab_size) == stored  # one form for each


def outcome(way: str, stored: bytes, rows: int, bits: int) -> tuple[tuple[int, ...], ...] | None:
    with taking(way):
        try:
            return tuple(map(tuple, lists(decoded(stored, rows, bits))))
        except MalformedMaskBlock:
            return None


@given(stored=st.binary(min_size=8, max_size=40), bits=st.integers(1, 24))
def test_rows_take_at_most_six_times_the_stored_bytes(stored: bytes, bits: int) -> None:
    rows = len(stored) // 4 - 1
    try:
        found = decoded(stored, rows, 1 << bits)
    except MalformedMaskBlock:
        return
    assert found.ids_M.nbytes + found.starts_N.nbytes <= 6 * len(stored)


@pytest.mark.parametrize("bits", range(1, 8))
def test_whole_vocabularies_are_the_worst_case_and_take_six_times(bits: int) -> None:
    kept = [list(range(1 << bits))] * 100
    stored = encoded(kept, 1 << bits)
    found = decoded(stored, 100, 1 << bits, sampled=[0] * 100)
    assert found.ids_M.nbytes + found.starts_N.nbytes <= 6 * len(stored)
