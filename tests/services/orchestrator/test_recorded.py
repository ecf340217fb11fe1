"""Answers of a real vLLM (tests/data/vllm), delivered in both forms, as their step holds them."""

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from services.kit.models import load_model
from sideband.batch.types import MicroBatch
from sideband.engines.inline import choice_payload
from sideband.ids import RequestId
from sideband.masks.rows import MaskRows
from sideband.model import ModelShape
from sideband.payload.reader import PayloadReader
from sideband.payload.root import PayloadRoot
from sideband.payload.writer import write_payload
from sideband.segments import InlineSegment, PayloadSegment, merge_prefill_decode
from tests.services.orchestrator.support import Bench, orchestrator

DATA: Final = Path(__file__).parents[2] / "data" / "vllm"
CONFIG: Final = DATA / "tiny-moe.config.json"
REFUSED_BY_VLLM: Final = {"0.32-p64_m12_greedy", "0.32-p64_m6_nofilter"}
NAMES: Final = sorted(
    name
    for path in DATA.glob("*.request.json")
    if (DATA / f"{(name := path.name.removesuffix('.request.json'))}.response.json").exists()
    and name not in REFUSED_BY_VLLM
)
PAIRS: Final = ["0.32-pd_n20_startnone", "0.32-pd_n200_start192", "0.32-pd_n600_start600"]
LAYERS: Final = slice(1, 4)  # layer 0 of the recorded model is dense


def load(name: str) -> Any:
    return json.loads((DATA / name).read_text())


def rows_of(choice: dict[str, Any]) -> Any:
    """The recorded array, as numpy reads it."""
    data = base64.b64decode(choice["routed_experts"])
    return np.load(io.BytesIO(data), allow_pickle=False)


def turn_of(name: str, prompt: list[int], choice: dict[str, Any], start: int) -> dict[str, Any]:
    return {
        "request_id": name,
        "prompt_token_ids": prompt,
        "completion_token_ids": choice["token_ids"],
        "logprobs": [-1.0] * len(choice["token_ids"]),
        "top_p": 0.9,
        "routed_experts": choice["routed_experts"],
        "sampling_mask": choice.get("sampling_mask"),
        "routed_experts_prompt_start": start,
    }


def written(root: PayloadRoot, model: ModelShape, turn: dict[str, Any]) -> list[PayloadSegment]:
    """What the plugin does: the same rows as a file."""
    choice = choice_payload(
        turn["routed_experts"],
        turn["sampling_mask"],
        layer_ids=None,
        prompt_tokens=len(turn["prompt_token_ids"]),
        completion_token_ids=turn["completion_token_ids"],
        prompt_start=turn["routed_experts_prompt_start"],
        model=model,
    )
    report = write_payload(
        root,
        policy_version=0,
        request_id=RequestId(turn["request_id"]),
        model=model,
        choices=[choice],
    )
    return list(report.segments[0])


def by_handle(turn: dict[str, Any], segments: list[PayloadSegment]) -> dict[str, Any]:
    inline = {"routed_experts", "sampling_mask", "routed_experts_prompt_start"}
    handles = [
        {name: getattr(segment, name) for name in segment.__struct_fields__}
        | {"shape": list(segment.shape)}
        for segment in segments
    ]
    return {key: value for key, value in turn.items() if key not in inline} | {
        "payload_segments": handles
    }


def read(root: PayloadRoot | None, batch: MicroBatch) -> tuple[dict[int, bytes], dict[int, Any]]:
    """Every row of a micro batch by position, from memory or from the files."""
    rows: dict[int, bytes] = {}
    masks: dict[int, Any] = {}
    for segment in batch.segments:
        data: Any
        if isinstance(segment, InlineSegment):
            data = segment.data
        else:
            assert root is not None
            with PayloadReader(root, model=None) as reader:
                if segment.field == "sampling_mask":
                    tokens = batch.token_ids_L[segment.pos : segment.stop]
                    data = reader.read_masks(segment, tokens)
                else:
                    data = np.zeros((segment.rows, *segment.shape), segment.dtype)
                    reader.read_routing(segment, data)
        for index in range(segment.rows):
            if isinstance(data, MaskRows):
                masks[segment.pos + index] = data[index].tolist()
            else:
                rows[segment.pos + index] = data[index].tobytes()
    return rows, masks


async def shipped(bench: Bench, turn: dict[str, Any]) -> tuple[MicroBatch, Any]:
    """The micro batch of a rollout of one turn, and what it holds."""
    await bench.lease("r0")
    answer = await bench.deliver("r0", turn)
    assert answer.status_code == 202, answer.text
    await bench.until(lambda: bench.feed.taken == [1], "the step is shipped")
    [batch] = bench.feed.steps[1].grid[0]
    return batch, await asyncio.to_thread(read, bench.root, batch)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["inline", "handle"])
async def test_a_recorded_answer_reaches_its_step_row_by_row(
    tmp_path: Path, name: str, form: str
) -> None:
    request, [choice] = load(f"{name}.request.json"), load(f"{name}.response.json")["choices"]
    start = request["sampling_params"].get("routed_experts_prompt_start", 0)
    prompt = request["token_ids"]
    turn = turn_of("r0.t0", prompt, choice, start)
    is_handle = form == "handle"
    async with orchestrator(
        tmp_path,
        by_handle=is_handle,
        seq_len=1024,
        model_config_path=CONFIG,
        keep_rows_around_holes=True,
    ) as bench:
        if is_handle:
            assert bench.root is not None
            model = load_model(CONFIG)
            assert model is not None
            segments = await asyncio.to_thread(written, bench.root, model, turn)
            turn = by_handle(turn, segments)
        batch, (rows, masks) = await shipped(bench, turn)
    recorded = rows_of(choice)
    tokens = prompt + choice["token_ids"]
    assert batch.form == form
    assert batch.token_ids_L.tolist() == tokens
    first = len(tokens) - 1 - len(recorded)
    assert rows == {first + i: row[LAYERS].tobytes() for i, row in enumerate(recorded)}
    expected = choice.get("sampling_mask") or []
    assert masks == {len(prompt) + i: row for i, row in enumerate(expected)}


@pytest.mark.parametrize("name", PAIRS)
async def test_a_recorded_pair_of_prefill_and_decode_becomes_one_sample(
    tmp_path: Path, name: str
) -> None:
    """Two files in one turn, merged as the proxy does; prompts were not recorded, so any stand."""
    legs = {leg: load(f"{name}_{leg}.response.json") for leg in ("prefill", "decode")}
    prompt_tokens = legs["decode"]["usage"]["prompt_tokens"]
    prompt = [token % 1024 for token in range(prompt_tokens)]
    start = name.split("_start")[1]
    decode = turn_of(
        "r0.t0.d", prompt, legs["decode"]["choices"][0], 0 if start == "none" else int(start)
    )
    prefill = turn_of("r0.t0.p", prompt, legs["prefill"]["choices"][0], 0)
    async with orchestrator(tmp_path, seq_len=1024, model_config_path=CONFIG) as bench:
        root, model = bench.root, load_model(CONFIG)
        assert root is not None
        assert model is not None
        merged = merge_prefill_decode(
            await asyncio.to_thread(written, root, model, prefill),
            await asyncio.to_thread(written, root, model, decode),
            prompt_tokens=prompt_tokens,
        )
        _, (rows, masks) = await shipped(bench, by_handle(decode, merged))
        bench.feed.commit(1)
        bench.proxy.applied = 1
        await bench.until(lambda: not bench.on_disk(), "both files are deleted")
    first = rows_of(legs["prefill"]["choices"][0])
    second = rows_of(legs["decode"]["choices"][0])
    total = prompt_tokens + len(decode["completion_token_ids"])
    expected = {i: row[LAYERS].tobytes() for i, row in enumerate(first)}
    expected |= {
        position: second[position - (total - 1)][LAYERS].tobytes()
        for position in range(prompt_tokens, total - 1)
    }
    assert rows == expected
    assert len(masks) == len(decode["completion_token_ids"])
