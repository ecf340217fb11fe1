"""A kept turn is encoded in parts, to the very bytes that one call gives."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference_proxy import long_json, turn_parts
from services.inference_proxy.prompts import Prompt
from services.inference_proxy.recording import UnreadChoice
from services.inference_proxy.turn_parts import packed_turn, unpacked_turn
from services.kit.turns import TurnWire
from sideband.engines.long_text import LongText
from sideband.ids import RequestId

KEPT = st.lists(st.lists(st.integers(0, 1 << 20), max_size=9), max_size=70)


def turn_of(masks: list[list[int]] | None, **members: Any) -> TurnWire:
    return TurnWire(
        request_id="r",
        prompt_token_ids=b"\0" * 8,
        completion_token_ids=b"\1" * 8,
        logprobs=b"\2" * 8,
        sampling_mask=masks,
        **members,
    )


@given(
    KEPT | st.none(),
    st.none() | st.text("AB+/=", max_size=99),
    st.lists(st.integers(0, 99), max_size=3),
    st.integers(0, 40),
)
def test_the_parts_are_what_one_call_gives(
    masks: list[list[int]] | None, text: str | None, cuts: list[int], together: int
) -> None:
    scores: Any = None if masks is None else [[-0.5 for _ in row] for row in masks]
    turn = turn_of(masks, routed_experts=text, sampling_mask_logprobs=scores)
    whole = msgspec.msgpack.encode(turn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turn_parts, "VALUES_TOGETHER", together)
        assert b"".join(packed_turn(turn, text)) == whole
        if text is None:
            return
        edges = [0, *sorted(cuts), len(text)]
        pieces = [text[a:b].encode() for a, b in pairwise(edges)]
        parts = packed_turn(turn, LongText(tuple(piece for piece in pieces if piece)))
    assert msgspec.msgpack.decode(b"".join(parts), type=TurnWire) == turn
    found, rows = unpacked_turn(parts)
    assert rows is not None
    assert b"".join(rows.parts).decode() == text
    assert found == msgspec.structs.replace(turn, routed_experts="")


def test_no_part_holds_many_kept_sets() -> None:
    masks = [[7] * 1000 for _ in range(1000)]
    parts = packed_turn(turn_of(masks), None)
    assert max(map(len, parts)) < 2 * turn_parts.VALUES_TOGETHER
    assert len(parts) > 10


def test_what_was_answered_is_handed_in_whatever_it_has_beside_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a pair, whose answer has what two engines said, each within its bound."""
    monkeypatch.setattr(long_json, "BESIDE_BYTES_MAX", 50)
    entry = {"logprob": -0.5}
    choice = {"index": 0, "token_ids": [1], "logprobs": {"content": [entry]}}
    content = msgspec.json.encode({"choices": [choice], "prompt_logprobs": ["x"] * 50})
    turn = UnreadChoice(
        index=0,
        choice_count=1,
        answer=(content,),
        request_id=RequestId("r"),
        prompt=Prompt.of([1, 2]),
        params={},
    ).encoded()
    assert turn is not None
    assert unpacked_turn(turn)[0].logprobs == b"\0\0\0\xbf"
