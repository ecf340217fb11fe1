"""Bodies that are small to send and dear to refuse: faults without end, depth, large numbers."""

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import Response

from services.inference_proxy.nesting import NESTING_MAX, is_too_deep
from services.kit.bodies import CONTROL_BYTES_MAX
from services.orchestrator.rollout_schemas import inlined_schema
from tests.services.inference_proxy.harness import GENERATE, running
from tests.services.inference_proxy.stub import Json, StubEngine
from tests.services.orchestrator.support import Bench, orchestrator

HEADERS = {"content-type": "application/json"}
TURN = {"request_id": "t", "prompt_token_ids": [1], "completion_token_ids": [2], "logprobs": [0]}
ITEMS = 200_000
COST_BYTES_MAX = 80 << 20  # the parsed body has up to 60 MB; a fault for each item, hundreds


def rollout(**turn: Any) -> Json:
    return {"rollout_id": "r0", "status": "completed", "reward": 1.0, "turns": [{**TURN, **turn}]}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


COSTLY: dict[str, tuple[str, Any]] = {
    "wrong tokens": ("/v1/rollouts", rollout(prompt_token_ids=["a"] * ITEMS)),
    "wrong masks": ("/v1/rollouts", rollout(sampling_mask=[["a"]] * ITEMS)),
    "wrong turns": ("/v1/rollouts", {**rollout(), "turns": [1] * 4096}),
    "unknown members": ("/v1/rollouts", rollout(**{f"x{i}": 1 for i in range(ITEMS)})),
    "unknown at the top": ("/v1/leases", {f"x{i}": 1 for i in range(ITEMS // 2)}),
    "wrong files": ("/v1/leases/a/renew", {"files": [1] * 4096}),
}


@pytest.mark.parametrize(("path", "body"), COSTLY.values(), ids=COSTLY.keys())
async def test_a_refusal_costs_no_more_than_the_body(tmp_path: Path, path: str, body: Any) -> None:
    content = json.dumps(body).encode()
    async with orchestrator(tmp_path, by_handle=False, with_feed=False) as bench:
        await bench.lease("r0")
        tracemalloc.start()
        answer = await bench.http.post(path, content=content, headers=HEADERS)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert answer.status_code == 422
        assert answer.json()["faults"][0]["field"]
        assert peak_bytes < COST_BYTES_MAX
        await still_works(bench)


async def test_a_body_that_only_steers_is_small(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, by_handle=False, with_feed=False) as bench:
        content = b" " * (CONTROL_BYTES_MAX + 1)
        answer = await bench.http.post("/v1/leases", content=content, headers=HEADERS)
        assert answer.status_code == 413
        assert answer.json()["bytes_max"] == CONTROL_BYTES_MAX
        # What carries tokens may be larger; here it is no JSON.
        answer = await bench.http.post("/v1/rollouts", content=content, headers=HEADERS)
        assert answer.status_code == 422


def numbers(node: Any, path: str) -> Iterator[tuple[str, Json]]:
    if isinstance(node, dict):
        if node.get("type") == "integer":
            yield path, node
        for name, inner in node.items():
            yield from numbers(inner, f"{path}.{name}")
    elif isinstance(node, list):
        for inner in node:
            yield from numbers(inner, path)


def test_every_number_of_a_rollout_fits_its_binary_form() -> None:
    found = dict(numbers(inlined_schema(), "rollout"))
    assert len(found) > 10
    for path, schema in found.items():
        upper = schema.get("maximum", schema.get("exclusiveMaximum"))
        lower = schema.get("minimum", schema.get("exclusiveMinimum"))
        assert upper is not None, path
        assert lower is not None, path
        assert -(1 << 63) <= lower < upper < 1 << 63, path


async def test_a_number_beyond_64_bits_is_refused(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, by_handle=False, with_feed=False) as bench:
        await bench.lease("r0")
        for turn in (
            {"routed_experts_prompt_start": 10**30},
            {"payload_model": {"num_layers": 10**30}},
            {"top_k": -(10**30)},
        ):
            answer = await bench.http.post("/v1/rollouts", json=rollout(**turn))
            assert answer.status_code == 422, answer.text
        await still_works(bench)


async def still_works(bench: Bench) -> None:
    assert [lease.state for lease in bench.service.book.open_leases.values()] == ["open"]
    assert (await bench.http.post("/v1/rollouts", json=rollout())).status_code == 202


# --- depth, through the proxy ------------------------------------------------------------------


def test_depth_is_counted_by_value_not_by_brackets() -> None:
    wide = [[1]] * 1000
    assert not is_too_deep(json.dumps(wide).encode(), wide)
    for levels, is_deep in ((NESTING_MAX, False), (NESTING_MAX + 1, True)):
        value = nested(levels)
        assert is_too_deep(json.dumps(value).encode(), value) == is_deep


@pytest.mark.parametrize("levels", [NESTING_MAX, 260, 900, 1100, 100_000])
@pytest.mark.parametrize("prompt_tokens", [3, 9000])
@pytest.mark.parametrize("path", [GENERATE, "/v1/chat/completions"])
async def test_a_deep_request_is_refused_by_name(
    levels: int, prompt_tokens: int, path: str
) -> None:
    engine = StubEngine()
    async with running({"e0": engine}) as proxy:
        body = {"token_ids": [1] * prompt_tokens, "sampling_params": {"max_tokens": 1}}
        content = json.dumps(body).encode()[:-1] + b', "x": ' + b"[" * levels + b"]" * levels + b"}"
        answer = await proxy.http.post(path, content=content, headers=HEADERS)
        assert answer.status_code == 422
        assert answer.json()["faults"]
        assert not engine.requests


@pytest.mark.parametrize("place", ["sampling_params", "extra_args", "vllm_xargs"])
async def test_places_to_look_for_a_folder_do_not_nest_without_end(place: str) -> None:
    async with running({"e0": StubEngine()}) as proxy:
        inner = b'{"%s":' % place.encode() * 1000 + b"1" + b"}" * 1000
        content = b'{"token_ids":[1],"sampling_params":{"extra_args":%s}}' % inner
        answer = await proxy.http.post(GENERATE, content=content, headers=HEADERS)
        assert answer.status_code == 422


@pytest.mark.parametrize("levels", [200, 260, 900, 1100])
@pytest.mark.parametrize("filler", [0, 20_000])
async def test_a_deep_answer_is_the_engines_fault(levels: int, filler: int) -> None:
    head = b'{"choices":[{"index":0,"token_ids":[1],"logprobs":null}],"y":"%s","x":' % (
        b"y" * filler
    )

    def deep(_: Json) -> Response:
        content = head + b"[" * levels + b"]" * levels + b"}"
        return Response(content, media_type="application/json")

    engine = StubEngine()
    engine.script.extend([deep] * 5)
    async with running({"e0": engine}, attempts_max=1) as proxy:
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}
        answer = await proxy.generate(body)
        assert answer.status_code == 502
        assert answer.headers["content-type"] == "application/problem+json"
