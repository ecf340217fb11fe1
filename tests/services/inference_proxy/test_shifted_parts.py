"""Streams of which one part tells of more tokens than it has, and another of fewer."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fastapi import Response

from services.inference_proxy.recording import TurnRecord
from services.kit.turns import TurnWire
from sideband.engines.long_text import LongText
from sideband.ids import RequestId
from tests.services.inference_proxy.harness import request_body, running, until
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.test_streams import events_of

PROMPT = [5, 17, 3]


def part(tokens: list[int], logprobs: list[float], masks: list[list[int]] | None) -> Any:
    content = [{"logprob": value} for value in logprobs]
    choice = {"index": 0, "token_ids": tokens, "logprobs": {"content": content}}
    return {"choices": [{**choice, "sampling_mask": masks}]}


def turn_of(*parts: Any) -> TurnWire | None:
    record = TurnRecord()
    for each in parts:
        record.take(each)
    encoded = record.encoded(RequestId("r"), np.empty(0, np.int32), {})[0]
    return None if encoded is None else msgspec.msgpack.decode(b"".join(encoded), type=TurnWire)


def test_parts_that_make_up_for_each_other_are_no_turn() -> None:
    whole = turn_of(part([1, 2], [-1.0, -2.0], [[1], [2]]), part([3], [-3.0], [[3]]))
    assert whole is not None
    assert whole.sampling_mask == [[1], [2], [3]]
    assert turn_of(part([1, 2], [-1.0], [[1], [2]]), part([3], [-2.0, -3.0], [[3]])) is None
    assert turn_of(part([1, 2], [-1.0, -2.0], [[1]]), part([3], [-3.0], [[2], [3]])) is None


@pytest.mark.parametrize("version", ["1" * 5000, "9999999999", "weights", LongText((b"1",))])
def test_weights_whose_name_is_no_version_give_tokens_none(version: Any) -> None:
    said = part([1], [-1.0], None)
    said["choices"][0]["weight_versions"] = [{"version": version, "start": 0, "end": 1}]
    turn = turn_of(said)
    assert turn is not None
    assert turn.weight_versions is None
    said["choices"][0]["weight_versions"] = [version]  # no span at all
    assert turn_of(said) == turn


@pytest.mark.parametrize(("first", "second"), [(1, 3), (3, 1), (0, 4)])
async def test_kept_sets_of_other_tokens_are_not_written(
    tmp_path: Path, first: int, second: int
) -> None:
    engine = StubEngine(spills=True)

    def shifted(body: dict[str, Any]) -> Response:
        (choice,) = engine.generate(body)["choices"]
        tokens, masks = choice["token_ids"], choice["sampling_mask"]
        assert len(tokens) == len(masks) == 4
        parts = [
            {"token_ids": tokens[:2], "sampling_mask": masks[:first]},
            {**choice, "token_ids": tokens[2:], "sampling_mask": masks[first : first + second]},
        ]
        events = [{"choices": [{"index": 0, **each}]} for each in parts]
        lines = [b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events]
        return Response(b"".join([*lines, b"data: [DONE]\n\n"]), media_type="text/event-stream")

    engine.script.append(shifted)
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:
        body = {**request_body(PROMPT), "stream": True}
        events = events_of((await proxy.generate(body)).text)
        assert "sampling_mask: has" in events[-1]["error"]["message"]
        await until(lambda: proxy.parts.janitor.pending == 0)
        assert proxy.files() == []
