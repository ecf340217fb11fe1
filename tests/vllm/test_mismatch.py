"""A trainer with a real server's own weights: its log probabilities with and without replay.

Each answer comes in both forms. The rows in its file, read by the library, must give the very
numbers that its inline rows give; and replay must bring the trainer closer to the engine.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from scripts.vllm_env.build import model_folder
from scripts.vllm_env.servers import BASE, VllmServer
from tests.vllm.comparing import GENERATE, Comparer, body_of, read_whole
from tests.vllm.report import Report

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from examples.train_tiny_moe.learner import USES, Use
from examples.train_tiny_moe.loss import Mismatch
from examples.train_tiny_moe.mismatch import measure

pytestmark = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.timeout(300)]
ANSWERS = 16
ROWS_INLINE = ("routed_experts", "sampling_mask")


async def answers_of(server: VllmServer, root: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Requests with log probabilities, and their answers in both forms."""
    random = np.random.default_rng(7)
    extra = {"payload_dir": f"{root}/v0", "payload_debug": True}

    def body(number: int) -> dict[str, Any]:
        prompt = random.integers(0, 1024, 30 + 5 * number).tolist()
        name = f"mismatch-{number}"
        return body_of(prompt, name, seed=number, max_tokens=24, logprobs=0, extra_args=extra)

    async def answered(asked: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        reply = await http.post(GENERATE, json=asked)
        assert reply.status_code == 200, reply.text[:2000]
        return asked, reply.json()

    bodies = [body(number) for number in range(ANSWERS)]
    async with httpx.AsyncClient(base_url=server.url, timeout=200) as http:
        return list(await asyncio.gather(*map(answered, bodies)))


def written(path: Path, answers: list[tuple[dict[str, Any], dict[str, Any]]]) -> Path:
    """JSON lines as the example reads them."""
    lines = [json.dumps({"request": asked, "response": answer}) for asked, answer in answers]
    path.write_text("\n".join(lines))
    return path


def by_handle(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what it carries inline."""
    choices = [{**choice, **dict.fromkeys(ROWS_INLINE)} for choice in answer["choices"]]
    return {**answer, "choices": choices}


def inline(answer: dict[str, Any]) -> dict[str, Any]:
    """Without its segments."""
    return {name: value for name, value in answer.items() if not name.startswith("payload_")}


async def test_replay_brings_a_trainer_closer_to_a_real_engine_in_both_forms_alike(
    vllm_0_32: VllmServer, payload_root: Path, comparer: Comparer, report: Report, tmp_path: Path
) -> None:
    row = report.row("0.32 mismatch of a trainer")
    answers = await answers_of(vllm_0_32, payload_root)
    for asked, answer in answers:
        comparer.check(read_whole(asked["token_ids"], answer), row)
    model = model_folder(BASE, 0)
    handles = written(tmp_path / "handle.jsonl", [(a, by_handle(b)) for a, b in answers])
    plain = written(tmp_path / "inline.jsonl", [(a, inline(b)) for a, b in answers])
    found = await measure(model, handles, tmp_path / "handle", answers_root=payload_root)
    assert found == await measure(model, plain, tmp_path / "inline")
    report.notes += table(found)
    neither, both = found[Use(routing=False, masks=False)], found[Use(routing=True, masks=True)]
    assert neither.tokens == both.tokens == 24 * ANSWERS
    assert both.mean_distance < neither.mean_distance / 10
    masks_alone = found[Use(routing=False, masks=True)]
    assert both.mean_distance < masks_alone.mean_distance
    assert both.mean_k3 < masks_alone.mean_k3


def table(found: dict[Use, Mismatch]) -> list[str]:
    """The trainer against the engine, for each use of its rows."""
    head = "float32 trainer against vLLM 0.32: nats per token over"
    lines = [f"{head} {found[USES[0]].tokens} tokens"]
    for use in USES:
        experts = "replayed experts" if use.routing else "its own experts"
        over = "kept ids" if use.masks else "the vocabulary"
        numbers = f"|Δ| {found[use].mean_distance:.5f}  k3 {found[use].mean_k3:.6f}"
        lines.append(f"{experts:16}  over {over:14}  {numbers}")
    return lines
