"""Every law of segments, in both forms, against a plain dictionary from position to row."""

import itertools
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.segments import (
    AnySegment,
    InlineSegment,
    PayloadSegment,
    by_field,
    clip,
    concatenate,
    coverage,
    cut,
    fill,
    holes,
    join,
    merge_prefill_decode,
    shift,
)
from sideband.testing.batches import row_at, rows_by_position
from sideband.testing.segments import (
    FORMS,
    Kind,
    Stretch,
    disjoint_stretches,
    kinds,
    plain,
    rows_of,
    segment_of,
    segments_of,
    stretch_lists,
    stretches,
)

bounds = st.tuples(st.integers(0, 45), st.integers(0, 45)).map(sorted).map(tuple)
ROUTING = Kind("handle", "routed_experts")


def rows(segments: list[AnySegment], kind: Kind) -> object:
    return rows_by_position(segments, kind.field)


def is_ascending_and_disjoint(segments: list[AnySegment]) -> bool:
    pairs = itertools.pairwise(segments)
    return all(before.stop <= after.pos for before, after in pairs)


@given(stretches(), kinds(), bounds)
def test_clipping_keeps_exactly_the_rows_in_the_range(
    stretch: Stretch, kind: Kind, bound: tuple[int, int]
) -> None:
    start, stop = bound
    segment = segment_of(stretch, kind)
    clipped = clip(segment, start=start, stop=stop)
    expected = {p: row for p, row in plain([stretch]).items() if start <= p < stop}
    assert rows([clipped] if clipped else [], kind) == rows_of(expected, kind)
    assert (clipped is None) == (not expected)
    assert (clipped is segment) == (len(expected) == segment.rows)
    assert clipped is None or clip(clipped, start=start, stop=stop) is clipped


@given(disjoint_stretches(), kinds(), bounds)
def test_cutting_is_clipping_each(parts: list[Stretch], kind: Kind, bound: tuple[int, int]) -> None:
    start, stop = bound
    expected = {p: row for p, row in plain(parts).items() if start <= p < stop}
    segments = cut(segments_of(parts, kind), start=start, stop=stop)
    assert rows(segments, kind) == rows_of(expected, kind)


@given(disjoint_stretches(), kinds(), bounds, st.integers(0, 50))
def test_cutting_and_shifting_commute(
    parts: list[Stretch], kind: Kind, bound: tuple[int, int], by: int
) -> None:
    segments, (start, stop) = segments_of(parts, kind), bound
    cut_first = shift(cut(segments, start=start, stop=stop), by)
    shifted_first = cut(shift(segments, by), start=start + by, stop=stop + by)
    assert rows(cut_first, kind) == rows(shifted_first, kind)


@given(disjoint_stretches(), kinds(), st.integers(0, 1000))
def test_shifting_moves_positions_and_nothing_else(
    parts: list[Stretch], kind: Kind, by: int
) -> None:
    segments = segments_of(parts, kind)
    moved = shift(segments, by)
    expected = {p + by: row for p, row in plain(parts).items()}
    assert rows(moved, kind) == rows_of(expected, kind)
    assert rows(shift(moved, -by), kind) == rows(segments, kind)


@given(stretch_lists(), kinds(), bounds)
def test_coverage_and_holes_share_the_positions_between_them(
    parts: list[Stretch], kind: Kind, bound: tuple[int, int]
) -> None:
    segments, (start, stop) = segments_of(parts, kind), bound
    covered, missing = coverage(segments), holes(segments, start=start, stop=stop)
    assert [p for a, b in covered for p in range(a, b)] == sorted(plain(parts))
    assert [p for a, b in missing for p in range(a, b)] == [
        p for p in range(start, stop) if p not in plain(parts)
    ]
    assert all(a < b for a, b in covered + missing)
    assert all(x[1] < y[0] for x, y in itertools.pairwise(covered))


@given(disjoint_stretches(), stretch_lists(), kinds())
def test_filling_adds_rows_only_where_there_is_none(
    base: list[Stretch], extra: list[Stretch], kind: Kind
) -> None:
    filled = fill(segments_of(base, kind), segments_of(extra, kind))
    assert rows(filled, kind) == rows_of(plain([*base, *extra]), kind)
    assert is_ascending_and_disjoint(filled)


@given(disjoint_stretches(), kinds())
def test_filling_with_the_same_rows_changes_nothing(parts: list[Stretch], kind: Kind) -> None:
    once = fill([], segments_of(parts, kind))
    again = fill(once, segments_of(parts, kind))
    assert [(s.pos, s.stop) for s in again] == [(s.pos, s.stop) for s in once]
    assert rows(again, kind) == rows_of(plain(parts), kind)


@given(st.lists(stretch_lists(size_max=4), max_size=5), kinds())
def test_the_turn_that_first_ran_a_token_keeps_its_row(
    turns: list[list[Stretch]], kind: Kind
) -> None:
    joined = concatenate([segments_of(turn, kind) for turn in turns])
    assert rows(joined, kind) == rows_of(plain(part for turn in turns for part in turn), kind)
    assert is_ascending_and_disjoint(joined)


@given(disjoint_stretches(), kinds())
def test_joining_changes_no_row_and_leaves_no_seam_within_a_file(
    parts: list[Stretch], kind: Kind
) -> None:
    segments = segments_of(parts, kind)
    joined = join(segments)
    assert rows(joined, kind) == rows_of(plain(parts), kind)
    if kind.form == "handle":
        assert [(s.pos, s.stop) for s in joined] == coverage(segments)
    else:
        assert joined == segments  # joining arrays would copy them


@given(stretches(), kinds(), st.integers(1, 39))
def test_a_handle_that_was_split_is_one_again(stretch: Stretch, kind: Kind, at: int) -> None:
    segment = segment_of(stretch, kind)
    halves = cut([segment], start=0, stop=at) + cut([segment], start=at, stop=40)
    assert rows(halves, kind) == rows([segment], kind)
    if isinstance(segment, PayloadSegment):
        assert join(halves) == [segment]


@pytest.mark.parametrize(
    "change",
    [
        {"file": "v0/run/00/other.sbp"},
        {"offset": 64},
        {"row": 99},
        {"pos": 99},
        {"dtype": "uint8"},
        {"shape": (3, 3)},
        {"field": "sampling_mask"},
    ],
)
def test_segments_that_only_seem_to_continue_are_not_joined(change: dict[str, object]) -> None:
    first, second = segments_of([Stretch(0, 0, 5), Stretch(0, 5, 9)], ROUTING)
    assert isinstance(first, PayloadSegment)
    assert isinstance(second, PayloadSegment)
    assert first.joined(second) is not None
    assert first.joined(msgspec.structs.replace(second, **change)) is None


@given(
    stretch_lists(), stretch_lists(), stretch_lists(), stretch_lists(), st.integers(0, 40), kinds()
)
def test_prefill_speaks_first_and_decode_from_the_later_of_both_ends(
    prefill: list[Stretch],
    decode: list[Stretch],
    prefill_masks: list[Stretch],
    decode_masks: list[Stretch],
    prompt_tokens: int,
    any_kind: Kind,
) -> None:
    routing = Kind(any_kind.form, "routed_experts", any_kind.model)
    masks = Kind(any_kind.form, "sampling_mask", any_kind.model)
    merged = merge_prefill_decode(
        segments_of(prefill, routing) + segments_of(prefill_masks, masks),
        segments_of(decode_masks, masks) + segments_of(decode, routing),
        prompt_tokens=prompt_tokens,
    )
    expected = dict(plain(prefill))
    first = max([prompt_tokens, *(position + 1 for position in expected)])
    expected |= {p: row for p, row in plain(decode).items() if p >= first}
    kept = {p: row for p, row in plain(decode_masks).items() if p >= prompt_tokens}
    assert rows(by_field(merged, "routed_experts"), routing) == rows_of(expected, routing)
    assert rows(by_field(merged, "sampling_mask"), masks) == rows_of(kept, masks)


@given(stretch_lists(), stretch_lists(), bounds, st.integers(0, 9))
def test_both_forms_take_the_same_way(
    base: list[Stretch], extra: list[Stretch], bound: tuple[int, int], by: int
) -> None:
    """Inline and by handle end at the same positions with the rows of the same sequences."""
    ends = []
    for form in FORMS:
        kind = Kind(form, "routed_experts")
        segments = concatenate([segments_of(base, kind), segments_of(extra, kind)])
        segments = shift(cut(segments, start=bound[0], stop=bound[1]), by)
        by_position = rows_by_position(segments, "routed_experts")
        source = plain([*base, *extra])
        wanted = {p + by: row for p, row in source.items() if bound[0] <= p < bound[1]}
        assert by_position == rows_of(wanted, kind)
        ends.append((coverage(segments), sorted(by_position)))
    assert ends[0] == ends[1]


def routing(serial: int, start: int, stop: int) -> AnySegment:
    return segment_of(Stretch(serial, start, stop), ROUTING)


def test_the_last_row_of_a_turn_comes_from_the_next_turn() -> None:
    """prime-rl#1807: 5 + 3 tokens have 7 rows; row 7 is in the next turn only."""
    first, second = [routing(1, 0, 7)], [routing(2, 7, 12)]
    joined = concatenate([first, second])
    assert coverage(joined) == [(0, 12)]
    assert row_at(joined[1], 0) == row_at(routing(2, 7, 8), 0)


def test_overlap_is_resolved_by_position_never_appended() -> None:
    """verl#6029: the second answer repeats the rows of the first."""
    joined = concatenate([[routing(1, 0, 10)], [routing(2, 0, 16)]])
    assert [(s.pos, s.stop) for s in joined] == [(0, 10), (10, 16)]


def test_a_turn_is_cut_at_the_shared_prefix() -> None:
    """AReno#524: turn 2 shares 9 of 12 tokens; only rows [0, 9) are inherited."""
    inherited = cut([routing(1, 0, 12)], start=0, stop=9)
    joined = concatenate([inherited, [routing(2, 0, 14)]])
    assert [(s.pos, s.stop) for s in joined] == [(0, 9), (9, 14)]


def test_garbage_below_the_prompt_is_never_used_even_without_prefill() -> None:
    """llm-d-router#1473: decode's first P rows are garbage; without prefill they are a hole."""
    merged = merge_prefill_decode([], [routing(1, 0, 12)], prompt_tokens=8)
    assert coverage(merged) == [(8, 12)]
    assert holes(merged, start=0, stop=12) == [(0, 8)]


def test_an_aborted_request_is_an_empty_list() -> None:
    """vime#49: no field, no rows, no error."""
    nothing: list[AnySegment] = []
    assert concatenate([nothing, nothing]) == []
    assert cut(nothing, start=0, stop=9) == []
    assert coverage(nothing) == []
    assert merge_prefill_decode(nothing, nothing, prompt_tokens=3) == []
    assert holes(nothing, start=0, stop=4) == [(0, 4)]


def test_a_segment_without_rows_covers_nothing() -> None:
    data = np.zeros((0, 3, 2), np.uint8)
    empty = InlineSegment(field="routed_experts", pos=2, data=data)
    assert coverage([empty]) == []
    assert fill([], [empty]) == []
    assert cut([empty], start=0, stop=9) == []


def test_hundreds_of_turns_cost_no_square() -> None:
    """Each of 4,000 turns repeats the whole history; a quadratic fill would take minutes."""
    turns = [[routing(serial, 0, 10 * (serial + 1))] for serial in range(4000)]
    started_s = time.monotonic()
    joined = concatenate(turns)
    assert time.monotonic() - started_s < 5
    assert len(joined) == 4000


def test_an_inverted_range_is_the_callers_bug() -> None:
    with pytest.raises(AssertionError):
        clip(routing(0, 0, 5), start=4, stop=3)
    with pytest.raises(AssertionError):
        routing(0, 3, 5).narrowed(2, 4)
