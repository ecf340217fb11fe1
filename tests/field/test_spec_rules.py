"""Sentences of SPEC that no owner's test says on its own, through the running services."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from tests.field.rollouts import HF_CONFIG, Driver
from tests.integration.way import Way, running_way
from tests.services.inference_proxy.harness import GENERATE, pair, request_body, running
from tests.services.inference_proxy.stub import Json, StubEngine
from tests.services.inference_proxy.stub_model import MODEL, true_rows
from tests.services.orchestrator.support import orchestrator, plain_turn

HEADER = "X-Sideband-Kind"
FLOATS = ("advantages", "logprobs", "temperatures")
INTEGERS = ("input_ids", "labels", "position_ids", "cu_seqlens", "mask_ids", "weight_versions")


@pytest.mark.parametrize("headers", [{}, {HEADER: "eval"}, {HEADER: "frozen"}])
async def test_no_kind_means_eval_and_only_train_writes_files(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    engine = StubEngine()
    async with running({"c0": engine}, root=tmp_path / "root") as proxy:
        reply = await proxy.http.post(GENERATE, json=request_body([1, 2, 3]), headers=headers)
        assert reply.json()["choices"][0]["routed_experts"] is not None
        assert "payload_segments" not in reply.json()
        assert proxy.files() == []
        assert "extra_args" not in engine.requests[0]["sampling_params"]


async def test_several_choices_of_a_request_are_segments_of_one_file(tmp_path: Path) -> None:
    async with running({"c0": StubEngine()}, root=tmp_path / "root") as proxy:
        answer = (await proxy.generate(request_body([1, 2, 3], n=3))).json()
        segments = answer["payload_segments"]
        assert sorted(segments) == ["0", "1", "2"]
        assert {s["file"] for each in segments.values() for s in each} == set(proxy.files())
        assert len(proxy.files()) == 1


@pytest.mark.parametrize("kind", ["train", "eval", "frozen"])
async def test_several_choices_through_a_pair_are_a_400_for_every_kind(kind: str) -> None:
    async with running(pair()) as proxy:
        body = request_body([1, 2, 3], n=2)
        reply = await proxy.http.post(GENERATE, json=body, headers={HEADER: kind})
        assert (reply.status_code, reply.json()["code"]) == (400, "choices_refused")
        assert not any(engine.requests for engine in proxy.engines.values())


async def run_one(way: Way, turn: Json | None = None) -> Json:
    """One rollout of one turn; its receipt."""
    driver = Driver(way, "r0")
    await driver.lease("r0", 1)
    if turn is None:
        await driver.turn([1, 2, 3, 4], 4)
        driver.turns[0]["weight_versions"] = [0, 0, 1, 2]
    else:
        driver.turns.append(turn)
    return await driver.deliver(advantage=1.0)


def config_of(tmp_path: Path) -> Path:
    """The stub model's config file."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(HF_CONFIG))
    return path


async def finished(way: Way) -> Any:
    """The one micro batch of the one rank."""
    await way.orchestrator.post("/v1/admin/drain")
    return (await way.train())[0][0]


@pytest.mark.parametrize("by_handle", [False, True])
async def test_a_rank_gets_int32_float32_and_each_tokens_weight_version(
    tmp_path: Path, by_handle: bool
) -> None:
    root = tmp_path / "root" if by_handle else None
    async with running_way(
        {"c0": StubEngine()},
        root=root,
        model_config=config_of(tmp_path),
        cp_size=1,
        step_rollouts=1,
        seq_len=64,
    ) as way:
        await run_one(way)
        batch = await finished(way)
    assert {getattr(batch, name).dtype for name in FLOATS} == {np.dtype(np.float32)}
    assert {getattr(batch, name).dtype for name in INTEGERS} == {np.dtype(np.int32)}
    assert batch.routed_experts.dtype == np.uint8
    assert batch.weight_versions[0, 3:8].tolist() == [0, 0, 1, 2, -1]


async def test_a_pair_whose_prefill_sends_no_rows_trains_without_routing_and_says_so(
    tmp_path: Path,
) -> None:
    engines = pair()

    def without_rows(body: Json) -> Any:
        answer = engines["p0"].generate(body)
        answer["choices"][0] |= {"routed_experts": None, "sampling_mask": None}
        return StubEngine.json({k: v for k, v in answer.items() if not k.startswith("payload_")})

    engines["p0"].script.append(without_rows)
    async with running_way(
        engines,
        root=tmp_path / "root",
        model_config=config_of(tmp_path),
        cp_size=1,
        step_rollouts=1,
        seq_len=64,
    ) as way:
        receipt = await run_one(way)
        assert receipt["tally"]["samples_with_holes"] == 1
        assert receipt["tally"]["routing_rows"] == 0
        batch = await finished(way)
    assert batch.routed_experts is None
    assert not batch.routing_valid.any()
    assert batch.loss_mask.sum() == 4, "it trains all the same"
    assert np.diff(batch.mask_starts).sum() == len(batch.mask_ids) > 0, "and keeps its masks"


async def test_a_decode_engine_that_ran_the_prompt_again_changes_nothing(tmp_path: Path) -> None:
    """Preempted and re-prefilled: its rows below the prompt's end are right, and still not used."""
    engines = {"p0": StubEngine("prefill"), "d0": StubEngine("decode", obeys=False)}
    decode = engines["d0"]

    def prefilled_again(body: Json) -> Any:
        decode.role = "colocated"  # no garbage
        answer = decode.generate(body)
        decode.role = "decode"
        return StubEngine.json(answer)

    decode.script.append(prefilled_again)
    async with running_way(
        engines,
        root=tmp_path / "root",
        model_config=config_of(tmp_path),
        cp_size=1,
        step_rollouts=1,
        seq_len=64,
    ) as way:
        await run_one(way)
        batch = await finished(way)
    tokens = batch.input_ids[0, :8].tolist()
    np.testing.assert_array_equal(batch.routed_experts[0, :7], true_rows(tokens)[:7])
    assert batch.routing_valid[0].tolist() == [True] * 7 + [False]
    assert MODEL.top_k == batch.routed_experts.shape[-1]


async def test_a_sample_without_rows_is_loud_where_the_run_has_a_model(tmp_path: Path) -> None:
    """The flag is on and the field is not there: seen at the first rollout, not at the loss."""
    async with orchestrator(tmp_path, routing_valid_fraction_min=0.5) as bench:
        await bench.lease("r0")
        with capture_logs() as logs:
            bare = plain_turn("q", [1, 2, 3], [4])
            receipt = (await bench.deliver("r0", bare, advantage=1.0)).json()
        (warning,) = [entry for entry in logs if entry["event"] == "routing_has_holes"]
        assert (warning["log_level"], warning["rows_missing"]) == ("warning", 3)
        assert receipt["tally"]["routing_positions"] == 3
        assert receipt["tally"]["routing_rows"] == 0
        await bench.until(lambda: bench.service.book.run.is_terminal, "the run is stopped")
        assert "routing" in (await bench.run())["reason"]
        assert bench.feed.steps == {}


async def test_rows_that_nobody_would_read_are_refused_and_not_carried(tmp_path: Path) -> None:
    """Replay is off (no model): inline rows are a 422 that says so, by handle likewise."""
    async with orchestrator(tmp_path, model_config_path=None) as bench:
        await bench.lease("r0")
        turn = await bench.write("q", [1, 2, 3], [4, 5])
        answer = await bench.deliver("r0", turn)
        assert (answer.status_code, answer.json()["code"]) == (422, "no_model")
        await bench.until(lambda: bench.on_disk() == set(), "its file is deleted")
