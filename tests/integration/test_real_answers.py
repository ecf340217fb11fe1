"""Answers of a real vLLM from the engine's door to the tensors of every rank.

Each recorded answer is sent as an engine would: inline, by handle with the file that the library
writes from it, or inline with a proxy that writes the file. What arrives at the ranks is compared
with numpy's own reading of the recording.
"""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sideband.feed.micro_batch import RankMicroBatch
from tests.integration.way import Way, running_way
from tests.services.inference_proxy.harness import pair
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.test_recorded import (
    DATA,
    MODEL,
    PAIRS,
    SINGLE,
    recorded,
    replay,
)

SETTINGS = {"max_tokens": 12, "temperature": 1.0, "top_k": 20, "top_p": 0.9}
CONFIG = DATA / "tiny-moe.config.json"
FORMS = ("inline", "handle", "spill")
DELTA = "0.32-p300_m8_promptstart260"  # asked from row 260 on: its sample has a hole


def numpy_rows(answer: dict[str, Any]) -> NDArray[Any]:
    """Routed layers' rows, read without any of our code."""
    raw = base64.b64decode(answer["choices"][0]["routed_experts"])
    rows: NDArray[Any] = np.load(io.BytesIO(raw), allow_pickle=False)
    return rows[:, list(MODEL.layer_ids)]


def whole(batches: list[list[RankMicroBatch]]) -> list[dict[str, NDArray[Any]]]:
    """Each packed row put together again from its contiguous chunks."""
    names = ("input_ids", "labels", "loss_mask", "logprobs", "routing_valid", "routed_experts")
    rows = []
    for parts in zip(*batches, strict=True):
        first = parts[0]
        row = {
            name: np.concatenate([getattr(part, name)[0] for part in parts])
            for name in names
            if getattr(first, name) is not None
        }
        row["mask_counts"] = np.concatenate([np.diff(part.mask_starts) for part in parts])
        row["mask_ids"] = np.concatenate([part.mask_ids for part in parts])
        row["cu_seqlens"] = first.cu_seqlens
        row["lengths"] = first.sequence_lengths
        row["sample_ids"] = np.array([sample or "" for sample in first.sample_ids])
        rows.append(row)
    return rows


def kept(row: dict[str, NDArray[Any]], start: int, stop: int) -> list[list[int]]:
    """Kept sets of the row's positions [start, stop)."""
    ends = np.concatenate([[0], np.cumsum(row["mask_counts"])])
    return [row["mask_ids"][ends[i] : ends[i + 1]].tolist() for i in range(start, stop)]


async def roll_out(way: Way, name: str, body: dict[str, Any]) -> dict[str, Any]:
    """Lease, generate and deliver one rollout of one turn; the engine's merged answer."""
    rollout = name.replace("_", "-")
    lease = await way.orchestrator.post(
        "/v1/leases", json={"rollout_id": rollout, "group_id": rollout, "group_size": 1}
    )
    assert lease.status_code in {200, 201}, lease.text
    version = str(lease.json()["policy_version"])
    reply = await way.proxy.generate(body, version=version)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    choice = answer["choices"][0]
    turn = {
        "request_id": answer["request_id"],
        "prompt_token_ids": body["token_ids"],
        "completion_token_ids": choice["token_ids"],
        "logprobs": [-0.25 * (i % 8) for i in range(len(choice["token_ids"]))],
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.9,
        "payload_segments": (answer.get("payload_segments") or {}).get("0"),
        "payload_model": answer.get("payload_model"),
        "routed_experts": choice["routed_experts"],
        "routed_layer_ids": answer.get("routed_layer_ids"),
        "routed_experts_prompt_start": (answer.get("routed_experts_start") or {}).get("0", 0),
        "sampling_mask": choice["sampling_mask"],
    }
    receipt = await way.orchestrator.post(
        "/v1/rollouts",
        json={
            "rollout_id": rollout,
            "status": "completed",
            "advantage": 0.5,
            "turns": [{key: value for key, value in turn.items() if value is not None}],
        },
    )
    assert receipt.status_code < 300, receipt.text
    assert receipt.json()["accepted"], receipt.text
    return answer


def check_row(
    found: dict[str, NDArray[Any]],
    start: int,
    *,
    tokens: list[int],
    prompt_tokens: int,
    rows: NDArray[Any] | None,
    masks: list[list[int]] | None,
) -> None:
    """One sequence of a packed row against the recording."""
    stop = start + len(tokens)
    np.testing.assert_array_equal(found["input_ids"][start:stop], tokens)
    np.testing.assert_array_equal(found["labels"][start : stop - 1], tokens[1:])
    assert found["labels"][stop - 1] == -100
    trained = np.zeros(len(tokens), bool)
    trained[prompt_tokens - 1 : len(tokens) - 1] = True
    np.testing.assert_array_equal(found["loss_mask"][start:stop], trained)
    valid = np.zeros(len(tokens), bool)
    if rows is not None:
        valid[: len(tokens) - 1] = True
        np.testing.assert_array_equal(found["routed_experts"][start : stop - 1], rows)
    np.testing.assert_array_equal(found["routing_valid"][start:stop], valid)
    before: list[list[int]] = [[]] * (prompt_tokens - 1)
    expected = [*before, *(masks or [[]] * (len(tokens) - prompt_tokens)), []]
    assert kept(found, start, stop) == expected


def check_all(batches: list[list[RankMicroBatch]], facts: dict[str, dict[str, Any]]) -> None:
    """Every recorded sequence is somewhere in the step, once, and as it was recorded."""
    seen = []
    for row in whole(batches):
        for index, sample in enumerate(row["sample_ids"].tolist()):
            if sample:
                rollout = sample.removesuffix(".b0")
                check_row(row, int(row["cu_seqlens"][index]), **facts[rollout])
                seen.append(rollout)
    assert sorted(seen) == sorted(facts)


async def finish(way: Way) -> list[list[RankMicroBatch]]:
    """Drain the run while the ranks train."""
    drained = await way.orchestrator.post("/v1/admin/drain")
    assert drained.status_code < 300, drained.text
    return await way.train()


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("form", FORMS)
async def test_recorded_answers_reach_every_rank_as_they_were_recorded(
    tmp_path: Path, form: str, cp_size: int
) -> None:
    root = None if form == "inline" else tmp_path / "root"
    engine = StubEngine(spills=form == "spill")
    facts: dict[str, dict[str, Any]] = {}
    async with running_way(
        {"c0": engine},
        root=root,
        model_config=CONFIG,
        cp_size=cp_size,
        seq_len=2048,
        step_rollouts=len(SINGLE),
    ) as way:
        for name in SINGLE:
            answer, body = recorded(f"{name}.response"), recorded(f"{name}.request")
            engine.script.append(replay(answer, root if form == "handle" else None))
            await roll_out(way, name, body)
            prompt = body["token_ids"]
            facts[name.replace("_", "-")] = {
                "tokens": [*prompt, *answer["choices"][0]["token_ids"]],
                "prompt_tokens": len(prompt),
                "rows": None if name == DELTA else numpy_rows(answer),
                "masks": answer["choices"][0]["sampling_mask"],
            }
        check_all(await finish(way), facts)


@pytest.mark.parametrize("form", FORMS)
async def test_recorded_pairs_reach_every_rank_merged(tmp_path: Path, form: str) -> None:
    root = None if form == "inline" else tmp_path / "root"
    written = root if form == "handle" else None
    engines = pair(spills=form == "spill")
    facts: dict[str, dict[str, Any]] = {}
    async with running_way(
        engines, root=root, model_config=CONFIG, cp_size=2, seq_len=2048, step_rollouts=len(PAIRS)
    ) as way:
        for name in PAIRS:
            prefill = recorded(f"{name}_prefill.response")
            decode = recorded(f"{name}_decode.response")
            engines["p0"].script.append(replay(prefill, written))
            engines["d0"].script.append(replay(decode, written))
            prompt_tokens = decode["usage"]["prompt_tokens"]
            prompt = [(7 * i) % 1024 for i in range(prompt_tokens)]
            await roll_out(way, name, {"token_ids": prompt, "sampling_params": SETTINGS})
            completion = decode["choices"][0]["token_ids"]
            decoded = numpy_rows(decode)[-(len(completion) - 1) :]
            facts[name.replace("_", "-")] = {
                "tokens": [*prompt, *completion],
                "prompt_tokens": prompt_tokens,
                "rows": np.concatenate([numpy_rows(prefill), decoded]),
                "masks": decode["choices"][0]["sampling_mask"],
            }
        check_all(await finish(way), facts)


@pytest.mark.parametrize("is_by_handle", [False, True], ids=["inline", "handle"])
async def test_kept_sets_that_the_engine_left_empty_are_missing_in_both_forms(
    tmp_path: Path, is_by_handle: bool
) -> None:
    """P62: the same tokens are counted as without a mask, and replay nothing at the ranks."""
    root = tmp_path / "root" if is_by_handle else None
    name = "0.32-p17_m16"
    answer, body = recorded(f"{name}.response"), recorded(f"{name}.request")
    choice = answer["choices"][0]
    for token in (0, 5, 6, 15):
        choice["sampling_mask"][token] = []
    engine = StubEngine()
    engine.script.append(replay(answer, root))
    async with running_way(
        {"c0": engine}, root=root, model_config=CONFIG, cp_size=2, seq_len=2048, step_rollouts=1
    ) as way:
        await roll_out(way, name, body)
        metrics = (await way.orchestrator.get("/metrics")).text.splitlines()
        assert "orchestrator_masks_missing_total 4.0" in metrics
        fact = {
            "tokens": [*body["token_ids"], *choice["token_ids"]],
            "prompt_tokens": len(body["token_ids"]),
            "rows": numpy_rows(answer),
            "masks": choice["sampling_mask"],
        }
        check_all(await finish(way), {name.replace("_", "-"): fact})


def test_the_recordings_are_there() -> None:
    assert len(SINGLE) >= 10
    assert len(PAIRS) == 5
    assert json.loads(CONFIG.read_text())["model_type"] == "qwen3_moe"
