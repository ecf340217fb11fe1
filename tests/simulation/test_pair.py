"""A prefill and a decode engine agree with a colocated one, in the way a real pair does."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from sideband.engines.inline import inline_segments
from sideband.payload import PayloadReader, PayloadRoot
from sideband.segments import AnySegment, PayloadSegment, by_field, coverage, merge_prefill_decode
from simulation.models import load_shape
from simulation.truth import Truth
from simulation.turn_check import read_ragged, read_rows
from tests.simulation.engines import RUN_ID, URL, Json, ask, body, by_handle, engine, make_root

MODEL = load_shape("sim-uint16")
TRUTH = Truth(MODEL, seed=4)
PREFILL_KV = {"do_remote_decode": True, "do_remote_prefill": False}


async def both_legs(prompt: list[int], root: Path | None, **decode: float) -> tuple[Json, Json]:
    """The answers of a pair; decode is asked from the prompt's end on, as the proxy asks it."""

    def formed(request: Json) -> Json:
        return request if root is None else by_handle(root, request)

    async with engine("prefill", model="sim-uint16", payload_root=root) as client:
        request = formed({**body(prompt, max_tokens=1, ignore_eos=True), "request_id": "p"})
        first = await ask(client, {**request, "kv_transfer_params": PREFILL_KV})
    async with engine("decode", model="sim-uint16", payload_root=root, **decode) as client:
        asked = body(prompt, routed_experts_prompt_start=len(prompt))
        transfer = first["kv_transfer_params"]
        second = await ask(client, {**formed(asked), "kv_transfer_params": transfer})
    return first, second


def segments_of(answer: Json, prompt: list[int], prompt_start: int) -> list[AnySegment]:
    if "payload_segments" in answer:
        return list(msgspec.convert(answer["payload_segments"]["0"], list[PayloadSegment]))
    choice = answer["choices"][0]
    return list(
        inline_segments(
            choice["routed_experts"],
            choice["sampling_mask"],
            layer_ids=None,
            prompt_tokens=len(prompt),
            completion_token_ids=choice["token_ids"],
            prompt_start=prompt_start,
            model=MODEL,
        )
    )


@pytest.mark.parametrize("form", ["inline", "handle"])
@pytest.mark.parametrize("disobedience_rate", [0.0, 1.0])
@pytest.mark.parametrize("preemption_rate", [0.0, 1.0])
async def test_merged_legs_equal_the_truth(
    form: str, disobedience_rate: float, preemption_rate: float, tmp_path: Path
) -> None:
    root = make_root(tmp_path / "root") if form == "handle" else None
    prompt = list(range(100, 150))
    prefill, decode = await both_legs(
        prompt, root, disobedience_rate=disobedience_rate, preemption_rate=preemption_rate
    )
    merged = merge_prefill_decode(
        segments_of(prefill, prompt, 0),
        segments_of(decode, prompt, len(prompt)),
        prompt_tokens=len(prompt),
    )
    tokens = np.array([*prompt, *decode["choices"][0]["token_ids"]], np.int32)
    reader = None
    if root is not None:
        reader = PayloadReader(PayloadRoot.open(root, run_id=RUN_ID), model=MODEL)
    routing = by_field(merged, "routed_experts")
    assert coverage(routing) == [(0, len(tokens) - 1)]
    for segment in routing:
        found = read_rows(segment, reader)
        assert np.array_equal(found, TRUTH.routing(tokens, segment.pos, segment.stop))
    (kept,) = by_field(merged, "sampling_mask")
    right = TRUTH.masks(tokens, len(prompt), top_k=20)
    assert read_ragged(kept, reader, tokens).equals(right)
    if reader is not None:
        reader.close()


async def test_a_decode_that_does_not_obey_returns_garbage_below_the_prompt() -> None:
    prompt = list(range(60))
    _, decode = await both_legs(prompt, None, disobedience_rate=1.0)
    tokens = np.array([*prompt, *decode["choices"][0]["token_ids"]], np.int32)
    routing = by_field(segments_of(decode, prompt, 0), "routed_experts")
    assert routing[0].pos == 0
    rows = read_rows(routing[0], None)
    right = TRUTH.routing(tokens, 0, len(tokens) - 1)
    assert (rows[:60] != right[:60]).any(axis=(1, 2)).all()
    assert np.array_equal(rows[60:], right[60:])


async def test_a_preempted_decode_ran_the_prompt_itself_so_its_rows_are_right() -> None:
    prompt = list(range(60))
    _, decode = await both_legs(prompt, None, disobedience_rate=1.0, preemption_rate=1.0)
    tokens = np.array([*prompt, *decode["choices"][0]["token_ids"]], np.int32)
    (routing,) = by_field(segments_of(decode, prompt, 0), "routed_experts")
    rows = read_rows(routing, None)
    assert np.array_equal(rows, TRUTH.routing(tokens, 0, len(tokens) - 1))


async def test_a_decode_below_what_it_loaded_kills_a_fragile_engine() -> None:
    prompt = list(range(30))
    prefill, _ = await both_legs(prompt, None)
    transfer = prefill["kv_transfer_params"]
    async with engine("decode", model="sim-uint16", is_fragile=True) as client:
        request = {**body(prompt), "kv_transfer_params": transfer}
        assert (await client.post(URL, json=request)).status_code == 500
        assert (await client.get("/health")).status_code == 503
        again = await client.post(URL, json=body(prompt))
        assert again.status_code == 500


async def test_a_transfer_of_another_prompt_is_refused() -> None:
    prefill, _ = await both_legs(list(range(30)), None)
    async with engine("decode", model="sim-uint16") as client:
        request = {**body([1, 2, 3]), "kv_transfer_params": prefill["kv_transfer_params"]}
        assert (await client.post(URL, json=request)).status_code == 400


async def test_a_prefill_that_stopped_hands_nothing_over() -> None:
    every = list(range(MODEL.vocab_size))
    async with engine("prefill", model="sim-uint16") as client:
        request = body([1, 2, 3], max_tokens=1, stop_token_ids=every)
        answer = await ask(client, {**request, "kv_transfer_params": PREFILL_KV})
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["kv_transfer_params"] is None
