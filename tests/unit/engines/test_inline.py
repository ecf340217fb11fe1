"""One choice of an inline answer: where its rows lie, what is refused, what becomes a gap."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sideband.engines.inline import (
    InvalidInlineMask,
    InvalidInlineRouting,
    choice_payload,
    decode_sampling_mask,
    encode_npy_base64,
    encode_sampling_mask,
    inline_segments,
    routing_position,
)
from sideband.errors import InvalidInput
from sideband.model import ModelShape
from sideband.routing.rows import scatter_layers
from sideband.segments import InlineSegment, holes

MODEL = ModelShape(num_layers=5, layer_ids=(1, 2, 4), top_k=2, id_space=256, vocab_size=50)
WIDE = ModelShape(num_layers=5, layer_ids=(1, 2, 4), top_k=2, id_space=300, vocab_size=50)


def rows_of(count: int, model: ModelShape = MODEL) -> NDArray[Any]:
    """Rows of the routed layers, different in every place."""
    shape = (count, *model.row_shape)
    return np.arange(count * shape[1] * shape[2]).reshape(shape).astype(model.row_dtype)


def segments(rows: NDArray[Any] | None, **changes: Any) -> tuple[InlineSegment, ...]:
    """A request of 6 prompt and 3 completion tokens; ``rows`` are its routed layers' rows."""
    text = None if rows is None else encode_npy_base64(scatter_layers(rows, (1, 2, 4), 5))
    arguments: dict[str, Any] = {
        "routed_experts": text,
        "sampling_mask": None,
        "layer_ids": None,
        "prompt_tokens": 6,
        "completion_token_ids": [7, 8, 9],
        "prompt_start": 0,
        "model": MODEL,
    }
    return inline_segments(**(arguments | changes))


# where the rows lie


@given(st.integers(1, 50), st.integers(0, 50), st.data())
def test_rows_end_where_the_last_sampled_token_begins(
    prompt_tokens: int, completion_tokens: int, data: st.DataObject
) -> None:
    tokens = prompt_tokens + completion_tokens
    stop = tokens - 1 if completion_tokens else tokens
    prompt_start = data.draw(st.integers(0, prompt_tokens))
    start = data.draw(st.sampled_from([0, prompt_start]))
    sizes = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    if completion_tokens == 0 and prompt_start == 1:
        return  # has a test of its own
    pos = routing_position(rows=stop - start, prompt_start=prompt_start, **sizes)
    assert pos == start


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 30), st.integers(0, 100))
def test_every_other_count_is_refused(
    prompt_tokens: int, completion_tokens: int, prompt_start: int, rows: int
) -> None:
    stop = prompt_tokens + completion_tokens - 1
    starts = {0, prompt_start, prompt_tokens}
    sizes = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    if prompt_start <= prompt_tokens and stop - rows in starts:
        assert routing_position(rows=rows, prompt_start=prompt_start, **sizes) == stop - rows
    else:
        with pytest.raises(InvalidInlineRouting):
            routing_position(rows=rows, prompt_start=prompt_start, **sizes)


def test_counts_of_a_request_without_completion() -> None:
    """sglang#20964: with 5 + 0 tokens all 5 rows are real; an engine that drops one has 4."""
    sizes = {"prompt_tokens": 5, "completion_tokens": 0, "prompt_start": 0}
    assert routing_position(rows=5, **sizes) == 0
    assert routing_position(rows=4, **sizes) == 0
    with pytest.raises(InvalidInlineRouting):
        routing_position(rows=6, **sizes)


def test_a_count_that_fits_two_places_is_refused() -> None:
    """4 rows of 5 tokens: all but the last from 0, or all from 1. Guessing would misalign."""
    with pytest.raises(InvalidInlineRouting):
        routing_position(rows=4, prompt_tokens=5, completion_tokens=0, prompt_start=1)


def test_rows_of_twice_expanded_images_are_refused() -> None:
    """OpenRLHF#1220: 13313 rows came for 6817 tokens."""
    with pytest.raises(InvalidInlineRouting, match="13313 rows"):
        routing_position(rows=13313, prompt_tokens=6800, completion_tokens=17, prompt_start=0)


@pytest.mark.parametrize("prompt_start", [-1, 7])
def test_a_start_outside_the_prompt_is_refused(prompt_start: int) -> None:
    with pytest.raises(InvalidInlineRouting, match=r"must lie in \[0, 6\]"):
        routing_position(rows=2, prompt_tokens=6, completion_tokens=3, prompt_start=prompt_start)


def test_a_decode_leg_alone_begins_at_the_prompts_end() -> None:
    [segment] = segments(rows_of(2), prompt_start=2)
    assert (segment.pos, segment.stop) == (6, 8)


# routing


@pytest.mark.parametrize("model", [MODEL, WIDE])
def test_rows_of_all_layers_become_rows_of_the_routed_layers(model: ModelShape) -> None:
    rows = rows_of(8, model)
    [segment] = segments(rows, model=model)
    assert (segment.field, segment.pos) == ("routed_experts", 0)
    assert isinstance(segment.data, np.ndarray)
    assert segment.data.dtype == model.row_dtype
    assert np.array_equal(segment.data, rows)


@pytest.mark.parametrize("layer_ids", [(1, 2, 4), (4, 2, 1), (0, 4, 1, 2)])
def test_named_columns_are_taken_by_id_whatever_their_order(layer_ids: tuple[int, ...]) -> None:
    rows_all = scatter_layers(rows_of(8), (1, 2, 4), 5)
    picked = list(layer_ids)
    text = encode_npy_base64(rows_all[:, picked])
    [segment] = segments(None, routed_experts=text, layer_ids=layer_ids)
    assert np.array_equal(segment.data, rows_of(8))  # type: ignore[arg-type]  # an array


def test_an_invalid_row_is_a_gap_never_a_zero_row() -> None:
    """sglang#23885: all-zero prompt rows ended as "Duplicate experts in routing!"."""
    rows = rows_of(8)
    rows[0] = 0
    rows[3, 1] = 0  # one all-zero layer: a pipeline stage was not gathered (slime)
    rows[5, 2] = 9  # the same expert twice
    found = segments(rows)
    assert [(s.pos, s.stop) for s in found] == [(1, 3), (4, 5), (6, 8)]
    assert holes(found, start=0, stop=8) == [(0, 1), (3, 4), (5, 6)]
    assert all(np.array_equal(s.data, rows[s.pos : s.stop]) for s in found)  # type: ignore[arg-type]


def test_the_last_valid_expert_id_is_not_a_gap() -> None:
    """sglang#9499: a fill of -1 in uint8 is 255, a valid id of 256 experts."""
    rows = rows_of(8)
    rows[4, 0] = (255, 254)
    assert [(s.pos, s.stop) for s in segments(rows)] == [(0, 8)]


def test_zeros_in_a_dense_layer_are_not_looked_at() -> None:
    assert MODEL.layer_ids == (1, 2, 4)  # layers 0 and 3 are all zero in what was sent
    assert [(s.pos, s.stop) for s in segments(rows_of(8))] == [(0, 8)]


SMALL = ModelShape(num_layers=5, layer_ids=(1, 2, 4), top_k=2, id_space=40, vocab_size=50)
DEEP = ModelShape(num_layers=9, layer_ids=(1, 2, 4), top_k=2, id_space=256, vocab_size=50)


@pytest.mark.parametrize(
    ("rows", "changes", "part"),
    [
        (rows_of(8), {"model": WIDE}, "must be uint16"),  # ids above 255 were lost already
        (rows_of(8, WIDE), {}, "must be uint8"),
        (rows_of(7), {}, "7 rows"),
        (rows_of(9), {}, "9 rows"),
        (rows_of(30), {}, "bytes"),
        (rows_of(8), {"model": DEEP}, "(9, 2)"),
        (rows_of(8), {"layer_ids": (1, 2, 3, 4)}, "(4, 2)"),
        (rows_of(8), {"layer_ids": tuple(range(2000))}, "2000 layers"),
        (rows_of(8), {"layer_ids": (1, 2, 2, 4, 0)}, "must be different"),
        (rows_of(8), {"layer_ids": (0, 1, 2, 3, 5)}, "every routed layer"),
        (rows_of(8), {"model": SMALL}, "expert id 47"),  # a range check, never a wrap
    ],
)
def test_rows_of_another_model_or_other_tokens_are_refused(
    rows: NDArray[Any], changes: dict[str, Any], part: str
) -> None:
    with pytest.raises(InvalidInlineRouting) as caught:
        segments(rows, **changes)
    assert part in str(caught.value)


def test_an_answer_without_anything_has_no_segments() -> None:
    """vime#49: aborted before the first token."""
    assert segments(None) == ()
    assert segments(None, completion_token_ids=[], sampling_mask=[]) == ()
    assert segments(np.zeros((0, 3, 2), np.uint8), prompt_start=6, completion_token_ids=[7]) == ()


# masks


@st.composite
def masks(draw: st.DrawFn) -> list[list[int]]:
    ids = st.sets(st.integers(0, 49), max_size=6).map(sorted)
    return draw(st.lists(ids, max_size=8))


@given(masks())
def test_masks_survive(value: list[list[int]]) -> None:
    decoded = decode_sampling_mask(value, vocab_size=50)
    assert decoded is not None
    assert [decoded[i].tolist() for i in range(len(decoded))] == value
    assert encode_sampling_mask(decoded) == value


@given(masks(), st.randoms(use_true_random=False))
def test_shuffled_or_repeated_ids_are_refused(value: list[list[int]], random: Any) -> None:
    wide = [row for row in value if len(row) > 1]
    if not wide:
        return
    row = random.choice(wide)
    row[:] = random.choice([row[::-1], [*row, row[-1]], [row[0], *row]])
    with pytest.raises(InvalidInlineMask, match="must ascend without repeats"):
        decode_sampling_mask(value, vocab_size=50)


def test_masks_cover_the_completion_only() -> None:
    """ "No mask" and "one id kept" are different: the first is a gap, the second greedy."""
    [segment] = segments(None, sampling_mask=[[], [8], list(range(50))])
    assert (segment.field, segment.pos, segment.stop) == ("sampling_mask", 7, 9)
    assert np.diff(segment.data.starts_N).tolist() == [1, 50]  # type: ignore[union-attr]
    assert segments(None, sampling_mask=[[], [], []]) == ()


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ({"7": 1}, "list of lists"),
        ([[7], 8, [9]], "list of lists"),
        ([[7], [8.0], [9]], "integers"),
        ([[7], [True, 8], [9]], "integers"),
        ([[7], ["8"], [9]], "integers"),
        ([[7], [8, 50], [9]], "must lie in the vocabulary [0, 50)"),
        ([[-1, 7], [8], [9]], "must lie in the vocabulary"),
        ([[7], [8, 1 << 80], [9]], "must lie in the vocabulary"),
        ([[7], [8]], "one per completion token, 3"),
        ([[7], [8], [9], [9]], "one per completion token, 3"),
        ([[7], [8], [3, 4]], "row 2 without its sampled token 9"),
        ([[8], [8], [9]], "row 0 without its sampled token 7"),
        ([[], [9, 8], [9]], "ascend"),
    ],
)
def test_kept_sets_that_cannot_be_are_refused(value: Any, part: str) -> None:
    with pytest.raises(InvalidInlineMask) as caught:
        segments(None, sampling_mask=value)
    assert part in str(caught.value)


@pytest.mark.parametrize("token_ids", [[7, 50, 9], [-1, 8, 9], [7, 1 << 70, 9]])
def test_sampled_tokens_outside_the_vocabulary_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(InvalidInput, match="completion_token_ids"):
        segments(None, completion_token_ids=token_ids)


def test_a_payload_keeps_invalid_rows_for_the_writer_to_count() -> None:
    rows = rows_of(8)
    rows[2] = 0
    payload = choice_payload(
        encode_npy_base64(scatter_layers(rows, (1, 2, 4), 5)),
        [[7], [8], [9]],
        layer_ids=None,
        prompt_tokens=6,
        completion_token_ids=np.array([7, 8, 9], np.int32),
        prompt_start=0,
        model=MODEL,
        choice=3,
    )
    assert payload.choice == 3
    assert payload.routing is not None
    assert payload.masks is not None
    assert np.array_equal(payload.routing.rows_NLK, rows)
    assert (payload.routing.pos, payload.masks.pos) == (0, 6)
    assert payload.masks.sampled_token_ids_N.tolist() == [7, 8, 9]
