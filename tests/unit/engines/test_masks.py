"""Logprobs of kept ids as engines send them: one number per kept id, or a named refusal."""

from typing import Any

import numpy as np
import pytest

from sideband.engines.inline import (
    InvalidInlineScores,
    decode_mask_logprobs,
    decode_sampling_mask,
    encode_mask_logprobs,
    inline_segments,
)
from sideband.masks.rows import MaskRows, ScoreRows
from sideband.segments import by_field
from sideband.testing.batches import WIDE_MODEL

KEPT = [[4, 9], [], [5]]
MASKS = decode_sampling_mask(KEPT, vocab_size=5003)


def test_numbers_come_back_as_float32_and_null_is_minus_infinity() -> None:
    found = decode_mask_logprobs([[-0.1, None], [], [0]], MASKS)
    assert found is not None
    assert found.dtype == np.float32
    assert found.tolist() == [np.float32(-0.1), -np.inf, 0.0]
    assert MASKS is not None
    rows = ScoreRows(MASKS.starts_N, found)
    assert encode_mask_logprobs(rows) == [[float(np.float32(-0.1)), None], [], [0.0]]
    assert decode_mask_logprobs(rows, MASKS) is found
    assert decode_mask_logprobs(None, MASKS) is None


@pytest.mark.parametrize(
    ("value", "masks", "rule"),
    [
        ([[-1.0, -1.0], [], [-1.0]], None, "must come with a sampling_mask"),
        ([[-1.0, -1.0], []], MASKS, "must be one per kept set, 3"),
        ([[-1.0], [], [-1.0]], MASKS, "row 0 of 1 values.*must be one per kept id, 2"),
        ([[-1.0, -1.0], [-1.0], [-1.0]], MASKS, "row 1 of 1 values.*must be one per kept id, 0"),
        ([[-1.0, float("nan")], [], [-1.0]], MASKS, "row 0.*below infinity"),
        ([[-1.0, 1e39], [], [-1.0]], MASKS, "row 0.*below infinity"),
        ([[-1.0, -1.0], [], ["-1"]], MASKS, "must hold numbers"),
        ([[-1.0, -1.0], [], [True]], MASKS, "must hold numbers"),
        ({"0": []}, MASKS, "must be a list of lists"),
        ([None, [], []], MASKS, "must be a list of lists"),
    ],
)
def test_numbers_that_do_not_belong_to_the_kept_ids_are_refused(
    value: Any, masks: MaskRows | None, rule: str
) -> None:
    with pytest.raises(InvalidInlineScores, match=rule):
        decode_mask_logprobs(value, masks)


def test_an_inline_answer_gives_both_fields_the_same_positions() -> None:
    segments = inline_segments(
        None,
        KEPT,
        layer_ids=None,
        prompt_tokens=3,
        completion_token_ids=[9, 7, 5],
        prompt_start=0,
        model=WIDE_MODEL,
        sampling_mask_logprobs=[[-1.0, -2.0], [], [0.0]],
    )
    places = [
        [(segment.pos, segment.rows) for segment in by_field(segments, field)]
        for field in ("sampling_mask", "sampling_mask_logprobs")
    ]
    assert places == [[(3, 1), (5, 1)]] * 2
