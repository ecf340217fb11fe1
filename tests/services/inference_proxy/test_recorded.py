"""Answers of a real vLLM, sent by the stub as they were recorded: inline, and by handle with the
file that the library writes from the same answer.
"""

import json
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from fastapi import Response
from numpy.typing import NDArray

from sideband.engines.inline import choice_payload, decode_npy_base64
from sideband.ids import RequestId, RunId
from sideband.model import ModelShape
from sideband.payload.root import PayloadRoot
from sideband.payload.writer import write_payload
from sideband.routing.layers import model_shape
from tests.services.inference_proxy.harness import GENERATE, TRAIN, pair, running
from tests.services.inference_proxy.reading import routing_of, segments_of
from tests.services.inference_proxy.stub import StubEngine

DATA: Final = Path(__file__).parents[2] / "data" / "vllm"
MODEL: Final = model_shape(json.loads((DATA / "tiny-moe.config.json").read_text()))
PAIRS: Final = sorted(
    path.name.removesuffix("_prefill.response.json")
    for path in DATA.glob("*_prefill.response.json")
)
SINGLE: Final = sorted(
    path.name.removesuffix(".request.json")
    for path in DATA.glob("*.request.json")
    if not any(word in path.name for word in ("stream", "greedy", "nofilter"))
)
REFUSED: Final = ("0.32-p64_m12_greedy", "0.32-p64_m6_nofilter")


def recorded(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return body


def rows_in(answer: dict[str, Any]) -> NDArray[Any]:
    """All layers' rows of a recorded answer."""
    return decode_npy_base64(answer["choices"][0]["routed_experts"], bytes_max=1 << 24)


def by_handle(body: dict[str, Any], answer: dict[str, Any], root: Path) -> dict[str, Any]:
    """The recorded answer as an engine with the plugin gives it for this request."""
    extra, choice = body["sampling_params"]["extra_args"], answer["choices"][0]
    start = len(body["token_ids"]) + len(choice["token_ids"]) - 1 - len(rows_in(answer))
    payload = choice_payload(
        choice["routed_experts"],
        choice["sampling_mask"],
        layer_ids=None,
        prompt_tokens=len(body["token_ids"]),
        completion_token_ids=choice["token_ids"],
        prompt_start=start,
        model=MODEL,
    )
    report = write_payload(
        PayloadRoot.open(root, run_id=RunId(extra["payload_run_id"])),
        policy_version=int(Path(extra["payload_dir"]).name[1:]),
        request_id=RequestId(body["request_id"]),
        model=MODEL,
        choices=[payload],
    )
    return {
        **answer,
        "choices": [{**choice, "routed_experts": None, "sampling_mask": None}],
        "payload_segments": {"0": msgspec.to_builtins(list(report.segments[0]))},
        "payload_model": msgspec.to_builtins(MODEL),
    }


def replay(answer: dict[str, Any], root: Path | None) -> Any:
    def script(body: dict[str, Any]) -> Response:
        return StubEngine.json(answer if root is None else by_handle(body, answer, root))

    return script


def routed(answer: dict[str, Any], root: Path | None, model: ModelShape = MODEL) -> dict[int, Any]:
    """Routed layers' row per position, whatever the form."""
    if root is not None:
        return routing_of(answer, root, model)
    rows = rows_in(answer)[:, list(model.layer_ids)]
    start = (answer.get("routed_experts_start") or {}).get("0", 0)
    return {start + i: row for i, row in enumerate(rows)}


@pytest.mark.parametrize("is_by_handle", [False, True])
@pytest.mark.parametrize("name", PAIRS)
async def test_a_real_pair_merges_to_prefills_rows_then_decodes(
    tmp_path: Path, name: str, is_by_handle: bool
) -> None:
    root = tmp_path / "root" if is_by_handle else None
    prefill = recorded(f"{name}_prefill.response")
    decode = recorded(f"{name}_decode.response")
    prompt_tokens = decode["usage"]["prompt_tokens"]
    engines = pair()
    engines["p0"].script.append(replay(prefill, root))
    engines["d0"].script.append(replay(decode, root))
    body = {
        "token_ids": [(7 * i) % 1024 for i in range(prompt_tokens)],
        "sampling_params": {"max_tokens": 12, "temperature": 1.0, "top_k": 20},
    }
    async with running(engines, root=root) as proxy:
        answer = (await proxy.http.post(GENERATE, json=body, headers=TRAIN)).json()
        found = routed(answer, root)
        stop = prompt_tokens + 11
        expected = np.concatenate([rows_in(prefill), rows_in(decode)[-11:]])
        assert sorted(found) == list(range(stop))
        for pos in range(stop):
            np.testing.assert_array_equal(found[pos], expected[pos][list(MODEL.layer_ids)])
        assert answer["choices"][0]["token_ids"] == decode["choices"][0]["token_ids"]
        assert answer["usage"] == decode["usage"]
        if root is None:
            masks = decode["choices"][0]["sampling_mask"]
            assert answer["choices"][0]["sampling_mask"] == masks
        else:
            (mask,) = segments_of(answer, "sampling_mask")
            assert (mask.pos, mask.stop) == (prompt_tokens, prompt_tokens + 12)
            assert mask.file != segments_of(answer, "routed_experts")[0].file


@pytest.mark.parametrize("is_by_handle", [False, True])
@pytest.mark.parametrize("name", SINGLE)
async def test_a_real_answer_passes_unchanged(
    tmp_path: Path, name: str, is_by_handle: bool
) -> None:
    root = tmp_path / "root" if is_by_handle else None
    request, response = recorded(f"{name}.request"), recorded(f"{name}.response")
    engine = StubEngine()
    engine.script.append(replay(response, root))
    async with running({"e0": engine}, root=root) as proxy:
        answer = (await proxy.http.post(GENERATE, json=request, headers=TRAIN)).json()
        start = request["sampling_params"].get("routed_experts_prompt_start", 0)
        rows = rows_in(response)[:, list(MODEL.layer_ids)]
        found = routed(answer, root)
        assert sorted(found) == list(range(start, start + len(rows)))
        for i, row in enumerate(rows):
            np.testing.assert_array_equal(found[start + i], row)
        assert answer["request_id"] == request["request_id"]
        if root is None:
            assert answer["choices"] == response["choices"]


@pytest.mark.parametrize("version", ["0.30", "0.32"])
async def test_a_real_stream_passes_event_by_event(version: str) -> None:
    request = recorded(f"{version}-stream.request")
    stream = (DATA / f"{version}-stream.response.sse").read_bytes()
    engine = StubEngine()
    engine.script.append(lambda _: Response(stream, media_type="text/event-stream"))
    async with running({"e0": engine}) as proxy:
        answer = await proxy.generate(request, session="s1")
        sent = [json.loads(e[6:]) for e in stream.decode().split("\n\n") if "{" in e]
        got = [json.loads(e[6:]) for e in answer.text.split("\n\n") if "{" in e]
        assert [e["choices"] for e in got] == [e["choices"] for e in sent]
        assert answer.text.endswith("data: [DONE]\n\n")
        # 40 prompt and 5 sampled tokens: the next turn needs rows from 44 on.
        tokens = [t for e in sent for c in e["choices"] for t in c["token_ids"]]
        follow_up = {**request, "stream": False, "token_ids": [*request["token_ids"], *tokens, 1]}
        await proxy.generate(follow_up, session="s1")
        params = engine.requests[-1]["sampling_params"]
        assert params["routed_experts_prompt_start"] == 44


@pytest.mark.parametrize("name", REFUSED)
async def test_the_real_empty_500_becomes_a_clear_400(name: str) -> None:
    request, response = recorded(f"{name}.request"), recorded(f"{name}.response")
    engine = StubEngine()
    engine.script.append(
        lambda _: Response(response["body"], response["status"], media_type="application/json")
    )
    async with running({"e0": engine}) as proxy:
        answer = await proxy.generate(request)
        assert (answer.status_code, answer.json()["code"]) == (400, "sampling_refused")
