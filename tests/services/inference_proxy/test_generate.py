"""One engine, or a pair: what is injected, what is merged, what the client gets."""

from pathlib import Path
from typing import Any

import pytest
from fastapi import Response

from tests.services.inference_proxy.harness import GENERATE, pair, request_body, running
from tests.services.inference_proxy.reading import assert_rows, routing_of, segments_of
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.stub_model import sampled, true_rows

PROMPT = [5, 17, 3, 42, 8, 1]


def rows_of(prompt: list[int], count: int) -> Any:
    """The rows that an answer with ``count`` tokens must carry."""
    return true_rows((prompt + sampled(prompt, count))[:-1])


async def test_a_train_request_gets_a_payload_dir_and_answers_by_handle(tmp_path: Path) -> None:
    async with running({"e0": StubEngine()}, root=tmp_path / "root", policy_version=3) as proxy:
        answer = (await proxy.generate(request_body(PROMPT))).json()
        seen = proxy.engines["e0"].requests[0]
        extra = seen["sampling_params"]["extra_args"]
        assert extra["payload_dir"] == str(tmp_path / "root" / "v3")
        assert extra["payload_run_id"] == "run-1"
        assert answer["request_id"] == "r1"
        assert answer["choices"][0]["token_ids"] == sampled(PROMPT, 4)
        assert_rows(routing_of(answer, proxy.root), rows_of(PROMPT, 4))
        (mask,) = segments_of(answer, "sampling_mask")
        assert (mask.pos, mask.stop) == (6, 10)


@pytest.mark.parametrize("kind", ["eval", "frozen", None])
async def test_other_kinds_stay_inline_beside_by_handle(tmp_path: Path, kind: str | None) -> None:
    headers = {} if kind is None else {"X-Sideband-Kind": kind}
    async with running({"e0": StubEngine()}, root=tmp_path / "root") as proxy:
        response = await proxy.http.post(GENERATE, json=request_body(PROMPT), headers=headers)
        answer = response.json()
        assert "extra_args" not in proxy.engines["e0"].requests[0]["sampling_params"]
        assert "payload_segments" not in answer
        assert_rows(routing_of(answer, None), rows_of(PROMPT, 4))
        assert proxy.files() == []


async def test_without_a_root_train_stays_inline() -> None:
    async with running({"e0": StubEngine()}) as proxy:
        answer = (await proxy.generate(request_body(PROMPT))).json()
        assert "extra_args" not in proxy.engines["e0"].requests[0]["sampling_params"]
        assert_rows(routing_of(answer, None), rows_of(PROMPT, 4))


async def test_each_pool_gets_its_own_mount(tmp_path: Path) -> None:
    engine = StubEngine(by_handle=False)
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:
        proxy.parts.book.get("e0").payload_mount = "/engines/payloads/"
        await proxy.generate(request_body(PROMPT), version="12")
        extra = engine.requests[0]["sampling_params"]["extra_args"]
        assert extra["payload_dir"] == "/engines/payloads/v12"


@pytest.mark.parametrize("obeys", [True, False])
@pytest.mark.parametrize("by_handle", [True, False])
async def test_a_pair_equals_one_engine(tmp_path: Path, by_handle: bool, obeys: bool) -> None:
    root = tmp_path / "root" if by_handle else None
    engines = pair()
    engines["d0"].obeys = obeys
    async with running(engines, root=root) as proxy:
        answer = (await proxy.generate(request_body(PROMPT, min_tokens=4))).json()
        assert_rows(routing_of(answer, root), rows_of(PROMPT, 4))
        assert answer["kv_transfer_params"] is None
        prefill, decode = (proxy.engines[name].requests[0] for name in ("p0", "d0"))
        assert prefill["sampling_params"]["max_tokens"] == 1
        assert "min_tokens" not in prefill["sampling_params"]
        assert prefill["kv_transfer_params"]["do_remote_decode"] is True
        assert decode["sampling_params"]["routed_experts_prompt_start"] == len(PROMPT)
        assert decode["kv_transfer_params"]["remote_host"] == "prefill"
        assert decode["sampling_params"]["extra_args"]["kv_transfer_params"]["remote_host"]
        if by_handle:
            (mask,) = segments_of(answer, "sampling_mask")
            assert (mask.pos, mask.stop) == (6, 10)
            assert len(proxy.files()) == 2
            assert prefill["sampling_params"]["extra_args"]["payload_dir"].endswith("/v0")
            assert decode["sampling_params"]["extra_args"]["payload_dir"].endswith("/v0")
        else:
            assert len(answer["choices"][0]["sampling_mask"]) == 4


async def test_large_inline_answers_are_merged_off_the_loop() -> None:
    prompt = [i % 64 for i in range(60_000)]
    async with running(pair()) as proxy:
        answer = (await proxy.generate(request_body(prompt))).json()
        rows = routing_of(answer, None)
        expected = rows_of(prompt, 4)
        assert len(rows) == len(expected) == 60_003
        assert all((rows[i] == expected[i]).all() for i in (0, 59_999, 60_000, 60_002))


async def test_one_token_is_prefills_alone(tmp_path: Path) -> None:
    async with running(pair(), root=tmp_path / "root") as proxy:
        answer = (await proxy.generate(request_body(PROMPT, max_tokens=1))).json()
        assert_rows(routing_of(answer, proxy.root), rows_of(PROMPT, 1))
        assert [mask.pos for mask in segments_of(answer, "sampling_mask")] == [6]
        assert proxy.engines["d0"].requests == []
        assert proxy.engines["p0"].requests[0].get("kv_transfer_params") is None


@pytest.mark.parametrize("form", ["inline", "handle", "spill"])
async def test_an_engine_may_sample_more_than_it_was_asked_for(tmp_path: Path, form: str) -> None:
    """Real ones do now and then: what was sampled was sampled, and its rows belong to it."""
    root = None if form == "inline" else tmp_path / "root"
    engine = StubEngine(spills=form == "spill")

    def longer(body: dict[str, Any]) -> Response:
        params = {**body["sampling_params"], "max_tokens": 6}
        return StubEngine.json(engine.generate({**body, "sampling_params": params}))

    engine.script.append(longer)
    async with running({"e0": engine}, root=root) as proxy:
        answer = (await proxy.generate(request_body(PROMPT, 4), session="s1")).json()
        tokens = PROMPT + answer["choices"][0]["token_ids"]
        assert len(tokens) == len(PROMPT) + 6
        assert_rows(routing_of(answer, root), true_rows(tokens[:-1]))
        await proxy.generate(request_body([*tokens, 1]), session="s1")
        params = engine.requests[-1]["sampling_params"]
        assert params["routed_experts_prompt_start"] == len(tokens) - 1
