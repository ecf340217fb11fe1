"""The P/D merge of inline arrays against a plain model, and its refusals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference_proxy.answers import Answer, Choice, MalformedAnswer
from services.inference_proxy.assembly import from_one, from_pair
from services.inference_proxy.inline import InlineRows, merge_rows, valid_ranges
from sideband.engines.inline import encode_npy_base64
from tests.services.inference_proxy.reading import assert_rows, routing_of
from tests.services.inference_proxy.stub_model import GARBAGE, MODEL, all_layers, sampled, true_rows


def leg(
    tokens: list[int],
    prompt_tokens: int,
    *,
    start: int | None,
    garbage: bool = False,
    layer_ids: tuple[int, ...] | None = None,
    dtype: type = np.uint8,
) -> Answer:
    """An answer with rows [start, N − 1); None means no rows."""
    text = None
    if start is not None:
        rows = true_rows(tokens[:-1])
        if garbage:
            rows[:prompt_tokens] = (rows[:prompt_tokens] + GARBAGE) % MODEL.id_space
        text = encode_npy_base64(all_layers(rows)[start:].astype(dtype))
    choice = Choice(index=0, token_ids=tokens[prompt_tokens:], routed_experts=text)
    raw = {"index": 0, "token_ids": choice.token_ids, "routed_experts": text}
    return Answer(
        body={"choices": [raw]},
        choices=(choice,),
        model=None,
        layer_ids=layer_ids,
        is_by_handle=False,
    )


@given(
    prompt=st.lists(st.integers(0, 63), min_size=1, max_size=12),
    count=st.integers(1, 6),
    data=st.data(),
)
def test_merged_rows_are_the_true_ones_whatever_decode_says_below_the_prompt(
    prompt: list[int], count: int, data: st.DataObject
) -> None:
    size = len(prompt)
    start = data.draw(st.integers(0, size), label="prefill start")
    decode_start = data.draw(st.integers(0, size), label="decode start")
    prefill_tokens = prompt + sampled(prompt, 1)
    outcome = from_pair(
        leg(prefill_tokens, size, start=start),
        leg(prompt + sampled(prompt, count), size, start=decode_start, garbage=True),
        request_id="r",
        prompt_tokens=size,
        prompt_start=start,
    )
    expected = true_rows((prompt + sampled(prompt, count))[:-1])
    assert_rows(routing_of(outcome.body, None), expected[start:], start=start)
    if len(expected) > start:
        assert outcome.ranges[0] == [(start, len(expected))]


def test_without_prefills_rows_only_decodes_stay_and_say_where_they_begin() -> None:
    prompt = [1, 2, 3]
    tokens = prompt + sampled(prompt, 4)
    outcome = from_pair(
        leg(prompt + sampled(prompt, 1), 3, start=None),
        leg(tokens, 3, start=0, garbage=True),
        request_id="r",
        prompt_tokens=3,
        prompt_start=0,
    )
    assert outcome.body["routed_experts_start"] == {"0": 3}
    assert_rows(routing_of(outcome.body, None), true_rows(tokens[:-1])[3:], start=3)


def test_with_a_hole_only_the_run_that_ends_the_sequence_stays() -> None:
    rows = all_layers(true_rows(list(range(10))))
    prefill = InlineRows(pos=0, rows_NLK=rows[:4], text="")
    decode = InlineRows(pos=5, rows_NLK=rows[5:], text="")
    merged = merge_rows(prefill, decode, prompt_tokens=5)
    assert merged is not None
    assert (merged.pos, merged.stop) == (5, 10)
    np.testing.assert_array_equal(merged.rows_NLK, rows[5:])


def test_neither_leg_with_rows_is_no_rows() -> None:
    tokens = [1, 2, *sampled([1, 2], 2)]
    outcome = from_pair(
        leg(tokens[:3], 2, start=None),
        leg(tokens, 2, start=None),
        request_id="r",
        prompt_tokens=2,
        prompt_start=0,
    )
    assert outcome.body["choices"][0]["routed_experts"] is None
    assert outcome.form == "none"


def test_decode_that_stops_at_once_leaves_prefills_rows() -> None:
    prompt = [4, 5, 6]
    tokens = prompt + sampled(prompt, 1)
    outcome = from_pair(
        leg(tokens, 3, start=0),
        leg(tokens, 3, start=3),
        request_id="r",
        prompt_tokens=3,
        prompt_start=0,
    )
    assert_rows(routing_of(outcome.body, None), true_rows(prompt))


@pytest.mark.parametrize(
    ("decode", "said"),
    [
        ({"dtype": np.uint16}, "uint16"),
        ({"layer_ids": (0, 1, 2)}, "different layers"),
    ],
)
def test_legs_of_different_models_are_refused(decode: dict[str, object], said: str) -> None:
    prompt = [1, 2, 3]
    with pytest.raises(MalformedAnswer, match=said):
        from_pair(
            leg(prompt + sampled(prompt, 1), 3, start=0),
            leg(prompt + sampled(prompt, 4), 3, start=3, **decode),  # type: ignore[arg-type]
            request_id="r",
            prompt_tokens=3,
            prompt_start=0,
        )


def test_a_decode_leg_that_does_not_reach_the_prompts_end_is_refused() -> None:
    prompt = [1, 2, 3]
    tokens = prompt + sampled(prompt, 4)
    with pytest.raises(MalformedAnswer, match="rows must fit"):
        from_pair(
            leg(prompt + sampled(prompt, 1), 3, start=0),
            leg(tokens, 3, start=5),
            request_id="r",
            prompt_tokens=3,
            prompt_start=0,
        )


@pytest.mark.parametrize("text", ["", "!!", "AAAA", encode_npy_base64(true_rows([1]))[:40]])
def test_broken_arrays_are_refused(text: str) -> None:
    choice = Choice(index=0, token_ids=[1], routed_experts=text)
    answer = Answer(
        body={"choices": []}, choices=(choice,), model=None, layer_ids=None, is_by_handle=False
    )
    with pytest.raises(MalformedAnswer, match="routed_experts"):
        from_one(answer, request_id="r", prompt_tokens=1, prompt_start=0)


def test_invalid_rows_are_not_counted_as_delivered() -> None:
    rows = all_layers(true_rows([3, 1, 4, 1, 5, 9]))
    rows[2] = 0  # an all-zero row
    rows[4, 1] = 5  # the same expert twice
    assert valid_ranges(InlineRows(pos=10, rows_NLK=rows, text="")) == [
        (10, 12),
        (13, 14),
        (15, 16),
    ]
    zeros = InlineRows(pos=0, rows_NLK=np.zeros((4, 3, 2), np.uint8), text="")
    assert valid_ranges(zeros) == []
    top_1 = InlineRows(pos=0, rows_NLK=np.zeros((4, 3, 1), np.uint8), text="")
    assert valid_ranges(top_1) == [(0, 4)]
