"""Kept sets without their sampled ids: any rows of any vocabulary come back, in each way; what no
writer makes, and the set of another token, is refused."""

import struct
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sideband.masks import others_rice
from sideband.masks.errors import MalformedMaskBlock, TokenNotOfRow
from sideband.masks.others_rice import bytes_before, decode_rows, encode_block, tags_of
from sideband.masks.rows import MaskRows
from tests.unit.masks.support import A_FEW, VOCAB_EDGES, Kept, kept_sets, lists, mask_rows
from tests.unit.masks.ways import ARRAYS, WAYS, names, taking

VOCAB = 1000


def tokens(sampled: list[int]) -> NDArray[np.int32]:
    return np.array(sampled, np.int32)


def encoded(kept: Kept, sampled: list[int], vocab_size: int) -> bytes:
    parts = encode_block(mask_rows(kept), tokens(sampled), vocab_size)
    return b"".join(part.tobytes() for part in parts)


def decoded(
    stored: bytes, rows: int, sampled: list[int], vocab_size: int, *, first: int = 0
) -> MaskRows:
    return decode_rows(memoryview(stored), rows, vocab_size, first=first, sampled_N=tokens(sampled))


def tag(token: int) -> int:
    return (token * 0x9E3779B1 & 0xFFFFFFFF) >> 28


def width(count: int, vocab_size: int) -> int:
    return (vocab_size // (2 * (count + 1))).bit_length() if count else 0


def by_hand(rows: list[tuple[int, list[int]]], vocab_size: int) -> bytes:
    """The page's sentences for (sampled token, other ids) as plain integers."""
    counts = [len(others) for _, others in rows]
    stored = bytes(min(count, 255) for count in counts)
    stored += b"".join(struct.pack("<I", count) for count in counts if count >= 255)
    stored += packed([(tag(token), 4) for token, _ in rows])
    gaps = [
        (b - a - 1, width(len(others), vocab_size))
        for _, others in rows
        for a, b in pairwise([-1, *others])
    ]
    stored += packed([(gap & ((1 << bits) - 1), bits) for gap, bits in gaps])
    return stored + packed([(1 << (gap >> bits), (gap >> bits) + 1) for gap, bits in gaps])


def packed(values: list[tuple[int, int]]) -> bytes:
    """Values at widths of their own, lowest bit first."""
    stream = place = 0
    for value, bits in values:
        stream |= value << place
        place += bits
    return stream.to_bytes(-(-place // 8), "little")


def split(kept: Kept, sampled: list[int]) -> list[tuple[int, list[int]]]:
    return [
        (token, [token_id for token_id in row if token_id != token])
        for row, token in zip(kept, sampled, strict=True)
    ]


@st.composite
def sampled_sets(draw: st.DrawFn, vocab_size: int) -> tuple[Kept, list[int]]:
    """Rows that keep something, and the token that was sampled from each."""
    kept = [row for row in draw(kept_sets(vocab_size)) if row] or [[vocab_size - 1]]
    return kept, [draw(st.sampled_from(row)) for row in kept]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("vocab_size", VOCAB_EDGES)
@A_FEW
@given(data=st.data())
def test_any_rows_of_every_vocabulary_come_back(
    way: str, vocab_size: int, data: st.DataObject
) -> None:
    kept, sampled = data.draw(sampled_sets(vocab_size))
    with taking(way):
        stored = encoded(kept, sampled, vocab_size)
    assert stored == by_hand(split(kept, sampled), vocab_size)
    first = data.draw(st.integers(0, len(kept) - 1))
    last = data.draw(st.integers(first + 1, len(kept)))
    with taking(way):
        found = decoded(stored, len(kept), sampled[first:last], vocab_size, first=first)
    assert lists(found) == kept[first:last]
    assert found.starts_N.dtype == np.int64
    assert found.ids_M.dtype == np.int32


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sampled", [0, 499, 999])
def test_counts_around_a_byte_and_whole_vocabularies(way: str, sampled: int) -> None:
    kept = [
        sorted({*range(0, 2 * count, 2), sampled})
        for count in (1, 2, 62, 63, 64, 253, 254, 255, 256, 257, 499)
    ]
    kept.insert(4, list(range(1000)))
    kept.append([sampled])
    rows = [sampled] * len(kept)
    with taking(way):
        stored = encoded(kept, rows, VOCAB)
    assert stored == by_hand(split(kept, rows), VOCAB)
    with taking(way):
        for first in range(len(kept)):
            assert (
                lists(decoded(stored, len(kept), rows[first:], VOCAB, first=first))
                == (kept[first:])
            )
            one = decoded(stored, len(kept), rows[first : first + 1], VOCAB, first=first)
            assert lists(one) == [kept[first]]


@pytest.mark.parametrize("way", WAYS)
def test_quotients_that_end_with_a_word(way: str) -> None:
    """Rows of 64 ones: a row may begin in the last word, and past it."""
    row = list(range(65))
    kept, sampled = [row, row, [7]], [64, 64, 7]
    with taking(way):
        stored = encoded(kept, sampled, 65)
        assert stored[-16:] == b"\xff" * 16
        for first in range(3):
            found = decoded(stored, 3, sampled[first:], 65, first=first)
            assert lists(found) == kept[first:]


def test_neighbouring_tokens_have_different_tags() -> None:
    tags = tags_of(np.arange(151_936, dtype=np.int32))
    assert tags.tolist()[:1000] == [tag(token) for token in range(1000)]
    assert (tags[1:] != tags[:-1]).all()
    assert np.bincount(tags).min() > 9000


@pytest.mark.parametrize("way", WAYS)
def test_the_set_of_another_token_is_refused(way: str) -> None:
    kept = [[7, 999], [5], [1, 2, 3]]
    stored = encoded(kept, [999, 5, 2], VOCAB)
    with taking(way):
        assert lists(decoded(stored, 3, [5, 2], VOCAB, first=1)) == kept[1:]
        for wrong, row in (
            ([999, 6, 2], 1),
            ([2, 5, 2], 0),
            ([999, 5, -1], 2),
            ([999, 5, 1000], 2),
        ):
            with pytest.raises(TokenNotOfRow) as caught:
                decoded(stored, 3, wrong, VOCAB)
            assert (caught.value.row, caught.value.token_id) == (row, wrong[row])
        same_tag = next(token for token in range(8, 999) if tag(token) == tag(999))
        assert lists(decoded(stored, 3, [same_tag, 5, 2], VOCAB))[0] == [7, same_tag]


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_no_writer_may_encode(way: str) -> None:
    with taking(way):
        with pytest.raises(AssertionError, match="gap"):
            encode_block(mask_rows([[1], []]), tokens([1, 2]), VOCAB)
        for lacking in ([[1], [3]], [[1], [3, 4, 5]], [[1], [2, 2]]):
            with pytest.raises(AssertionError, match="sampled"):
                encode_block(mask_rows(lacking), tokens([1, 2]), VOCAB)


@pytest.mark.parametrize("way", [way for way in WAYS if way != ARRAYS])
@given(
    kept=st.lists(st.lists(st.integers(-5, 80), min_size=1, max_size=9), min_size=1, max_size=5),
    data=st.data(),
)
def test_a_loop_leaves_its_arrays_for_no_row(way: str, kept: Kept, data: st.DataObject) -> None:
    """Rows that were not checked: some are coded, the others noticed before a word too many."""
    sampled = [data.draw(st.one_of(st.sampled_from(row), st.integers(-5, 80))) for row in kept]
    rows = split(kept, sampled)
    can_be = all(
        others == sorted(set(others) & set(range(64))) and len(others) == len(row) - 1
        for (_, others), row in zip(rows, kept, strict=True)
    )
    with taking(way):
        if can_be:
            assert encoded(kept, sampled, 64) == by_hand(rows, 64)
        else:
            with pytest.raises(AssertionError, match="sampled"):
                encoded(kept, sampled, 64)


ONE = by_hand([(5, [7, 900])], VOCAB)  # two remainders of 8 bits
LONGER = by_hand([(5, [7, 8, 9])], VOCAB)  # three of 7 bits; quotients may need a byte more


def changed(place: int, value: int, stored: bytes = ONE) -> bytes:
    data = bytearray(stored)
    data[place] = value
    return bytes(data)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("stored", "rows", "vocab_size", "reason"),
    [
        (b"", 1, VOCAB, "must hold 1 rows"),
        (ONE[:1], 1, VOCAB, "must hold 1 rows"),
        (ONE, 1 << 40, VOCAB, "must hold"),
        (b"\xff\xff\0\0", 1, VOCAB, "must hold 1 rows"),
        (ONE[:2], 1, VOCAB, "must hold 2 ids"),
        (ONE[:-1], 1, VOCAB, "must hold 2 ids"),
        (ONE + b"\0", 1, VOCAB, "must hold 2 ids"),
        (ONE + b"\1", 1, VOCAB, "must hold 2 ids"),
        (LONGER + b"\0", 1, VOCAB, "end with the last id"),
        (changed(1, ONE[1] | 0xF0), 1, VOCAB, "must be zero"),
        (changed(4, LONGER[4] | 0x80, LONGER), 1, VOCAB, "must be zero"),
        (by_hand([(0, [1])], 2), 1, 1, "keeps over 1"),
        (b"\xff" + struct.pack("<I", VOCAB), 1, VOCAB, "must hold 1 rows"),
        (b"\xff" + struct.pack("<I", VOCAB) + b"\0", 1, VOCAB, "keeps over 1000"),
        (b"\xff" + struct.pack("<I", 3) + b"\0", 1, VOCAB, "fits a byte"),
        (by_hand([(5, [7, 1000])], VOCAB), 1, VOCAB, "vocabulary"),
        (by_hand([(5, [5, 7])], VOCAB), 1, VOCAB, "sampled token"),
        (changed(4, 0x01), 1, VOCAB, "a one for each id"),
        (changed(4, 0b1110), 1, VOCAB, "end with the last id"),
    ],
)
def test_what_no_writer_makes_is_refused(
    way: str, stored: bytes, rows: int, vocab_size: int, reason: str
) -> None:
    assert len(ONE) == 5
    wanted = rows if rows < 100 else 1
    with taking(way), pytest.raises(MalformedMaskBlock, match=reason):
        decoded(stored, rows, [5] * wanted if vocab_size > 5 else [0], vocab_size)


@pytest.mark.parametrize("way", WAYS)
def test_rows_before_the_wanted_ones_that_lack_ids_are_noticed(way: str) -> None:
    stored = by_hand([(5, [7, 900]), (5, [1, 2])], VOCAB)[:-1] + b"\x80"  # one 1 for four ids
    assert len(stored) == 2 + 1 + 4 + 1
    with taking(way), pytest.raises(MalformedMaskBlock, match="a one for each id"):
        decoded(stored, 2, [5], VOCAB, first=1)


def test_a_block_of_many_rows_decodes_to_a_bounded_number_of_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = [list(range(100))] * 3
    stored = encoded(kept, [1, 2, 3], 100)
    monkeypatch.setattr(others_rice, "IDS_MAX", 299)
    with pytest.raises(MalformedMaskBlock, match="over 299 ids"):
        decoded(stored, 3, [1, 2, 3], 100)
    one = encoded(kept[:1], [1], 100)
    monkeypatch.setattr(others_rice, "IDS_MAX", 5)
    assert lists(decoded(one, 1, [1], 100)) == kept[:1]


@pytest.mark.parametrize("bits", range(1, 9))
def test_whole_vocabularies_are_the_worst_case_and_take_32_times(bits: int) -> None:
    kept = [list(range(1 << bits))] * 64
    stored = encoded(kept, [0] * 64, 1 << bits)
    found = decoded(stored, 64, [0] * 64, 1 << bits)
    assert found.ids_M.nbytes + found.starts_N.nbytes <= 32 * len(stored) + 8


@st.composite
def damaged_blocks(draw: st.DrawFn) -> tuple[bytes, list[int], int]:
    """A block with some bytes changed, cut off or added, and its tokens."""
    vocab_size = draw(st.sampled_from([2, 3, 50, 300, 1000, 151_936]))
    kept, sampled = draw(sampled_sets(vocab_size))
    if draw(st.booleans()) and vocab_size >= 300:
        kept.append(list(range(draw(st.integers(255, 299)))))
        sampled.append(0)
    data = bytearray(encoded(kept, sampled, vocab_size))
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(data) - 1))
        data[place] = draw(st.one_of(st.just(data[place] ^ 1 << place % 8), st.integers(0, 255)))
    end = draw(st.one_of(st.just(len(data)), st.integers(0, len(data))))
    return bytes(data[:end]) + draw(st.binary(max_size=3)), sampled, vocab_size


@given(block=damaged_blocks(), data=st.data())
def test_all_ways_find_the_same_in_damaged_bytes(
    block: tuple[bytes, list[int], int], data: st.DataObject
) -> None:
    """Rows or a refusal, and the same in each way: compiled loops check no bounds."""
    stored, sampled, vocab_size = block
    first = data.draw(st.integers(0, len(sampled) - 1))
    last = data.draw(st.integers(first + 1, len(sampled)))
    found = [outcome(way, stored, sampled, vocab_size, first, last) for way in names()]
    assert all(one == found[0] for one in found)
    if isinstance(found[0], list) and (first, last) == (0, len(sampled)):
        assert encoded(found[0], sampled, vocab_size) == stored  # one form for each set of rows


def outcome(
    way: str, stored: bytes, sampled: list[int], vocab_size: int, first: int, last: int
) -> Kept | str:
    with taking(way):
        try:
            found = decoded(stored, len(sampled), sampled[first:last], vocab_size, first=first)
        except TokenNotOfRow as exc:
            return str(exc)
        except MalformedMaskBlock:  # what is named first may differ
            return "malformed"
    assert not set(chain(*lists(found))) - set(range(vocab_size))
    return lists(found)


@given(data=st.data(), vocab_size=st.sampled_from([2, 50, 300, 151_936]))
def test_the_bound_of_a_blocks_bytes_holds_for_any_rows_of_it(
    data: st.DataObject, vocab_size: int
) -> None:
    kept, sampled = data.draw(sampled_sets(vocab_size))
    first = data.draw(st.integers(0, len(kept) - 1))
    last = data.draw(st.integers(first + 1, len(kept)))
    before = bytes_before(mask_rows(kept), vocab_size)
    stored = encoded(kept[first:last], sampled[first:last], vocab_size)
    assert len(stored) <= before[last] - before[first] + before[0]
