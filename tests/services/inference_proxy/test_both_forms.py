"""The plugin's debug flag through the proxy: one answer in both forms, merged by one rule each."""

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from tests.services.inference_proxy.harness import pair, request_body, running
from tests.services.inference_proxy.reading import assert_rows, routing_of, segments_of
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.stub_model import sampled, true_rows

PROMPT = [3, 1, 4, 1, 5]


def last_event(text: str) -> dict[str, Any]:
    """The event that has the segments."""
    events = [orjson.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    (found,) = [event for event in events if "payload_segments" in event]
    return dict(found)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("obeys", [False, True])
@pytest.mark.parametrize("is_pair", [False, True])
async def test_both_forms_of_an_answer_hold_the_same_rows(
    tmp_path: Path, is_pair: bool, obeys: bool, is_stream: bool
) -> None:
    engines = pair() if is_pair else {"c0": StubEngine()}
    for engine in engines.values():
        engine.obeys = obeys
    body = request_body(PROMPT)
    body["sampling_params"]["extra_args"] = {"payload_debug": True}
    async with running(engines, root=tmp_path / "root") as proxy:
        reply = await proxy.generate({**body, "stream": is_stream})
        assert reply.status_code == 200, reply.text
        answer = last_event(reply.text) if is_stream else reply.json()
        tokens = PROMPT + sampled(PROMPT, body["sampling_params"].get("max_tokens", 4))
        expected = true_rows(tokens[:-1])
        assert answer["choices"][0]["routed_experts"] is not None
        assert_rows(routing_of(answer, None), expected)
        only_files = {**answer, "choices": [{**answer["choices"][0], "routed_experts": None}]}
        rows = routing_of(only_files, tmp_path / "root")
        np.testing.assert_array_equal([rows[pos] for pos in sorted(rows)], expected)
        assert {segment.file for segment in segments_of(answer, "routed_experts")} == set(
            proxy.files()
        )


@pytest.mark.parametrize("inline_leg", ["p0", "d0"])
async def test_a_leg_in_one_form_does_not_merge_with_one_in_both(
    tmp_path: Path, inline_leg: str
) -> None:
    engines = pair()
    engines[inline_leg].by_handle = False
    body = request_body(PROMPT)
    body["sampling_params"]["extra_args"] = {"payload_debug": True}
    async with running(engines, root=tmp_path / "root") as proxy:
        reply = await proxy.generate(body)
        assert reply.status_code == 502
        assert "one leg answers by handle, the other inline" in reply.text
