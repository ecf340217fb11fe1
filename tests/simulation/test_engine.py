"""The simulated engine speaks vLLM's protocol, in both forms."""

import base64
import io
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sideband.engines.inline import decode_sampling_mask
from sideband.payload import PayloadReader, PayloadRoot
from sideband.payload.encodings import MASK_ENCODINGS, ROUTING_ENCODINGS, Encodings
from sideband.segments import PayloadSegment, by_field
from simulation.generation import ENCODINGS
from simulation.models import load_shape
from simulation.truth import Truth
from tests.simulation.engines import (
    RUN_ID,
    URL,
    Json,
    ask,
    body,
    by_handle,
    engine,
    events,
    make_root,
)

MODEL = load_shape("sim-uint8")
TRUTH = Truth(MODEL, seed=4)
PROMPT = list(range(5, 45))


def whole_tokens(answer: Json, prompt: list[int] = PROMPT, choice: int = 0) -> np.ndarray:
    return np.array([*prompt, *answer["choices"][choice]["token_ids"]], np.int32)


async def test_inline_answers_carry_all_layers_with_zeros_where_none_routes() -> None:
    async with engine() as client:
        answer = await ask(client, body(PROMPT))
    assert answer["request_id"] == "generate-tokens-r1"
    choice, tokens = answer["choices"][0], whole_tokens(answer)
    rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
    assert rows.shape == (len(tokens) - 1, MODEL.num_layers, MODEL.top_k)
    assert rows.dtype == np.uint8
    assert not rows[:, 0].any()  # the dense layer
    assert np.array_equal(rows[:, MODEL.layer_ids], TRUTH.routing(tokens, 0, len(tokens) - 1))
    masks = decode_sampling_mask(choice["sampling_mask"], vocab_size=MODEL.vocab_size)
    assert masks is not None
    assert masks.equals(TRUTH.masks(tokens, len(PROMPT), top_k=20))
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert np.array_equal(np.array(logprobs, np.float32), TRUTH.logprobs(tokens, len(PROMPT)))
    assert "payload_segments" not in answer


async def test_the_first_row_asked_for_is_obeyed() -> None:
    async with engine() as client:
        whole = await ask(client, body(PROMPT))
        part = await ask(client, body(PROMPT, routed_experts_prompt_start=30))
    rows, fewer = (
        np.load(io.BytesIO(base64.b64decode(answer["choices"][0]["routed_experts"])))
        for answer in (whole, part)
    )
    assert np.array_equal(rows[30:], fewer)


@pytest.mark.parametrize("of_masks", MASK_ENCODINGS)
@pytest.mark.parametrize("of_routing", ROUTING_ENCODINGS)
async def test_by_handle_the_file_holds_what_inline_would_carry(
    tmp_path: Path, of_routing: str, of_masks: str
) -> None:
    root = make_root(tmp_path / "root")
    encodings = Encodings(routing=of_routing, masks=of_masks)
    async with engine(payload_root=root, encodings=encodings) as client:
        answer = await ask(client, by_handle(root, body(PROMPT, n=3)))
    assert all(choice["routed_experts"] is None for choice in answer["choices"])
    assert all(choice["sampling_mask"] is None for choice in answer["choices"])
    opened = PayloadRoot.open(root, run_id=RUN_ID)
    files = set()
    with PayloadReader(opened, model=MODEL) as reader:
        for index in range(3):
            segments = msgspec.convert(answer["payload_segments"][str(index)], list[PayloadSegment])
            files |= {segment.file for segment in segments}
            tokens = whole_tokens(answer, choice=index)
            (routing,) = by_field(segments, "routed_experts")
            rows = np.empty((routing.rows, *routing.shape), routing.dtype)
            reader.read_routing(routing, rows)
            assert np.array_equal(rows, TRUTH.routing(tokens, 0, len(tokens) - 1))
            (kept,) = by_field(segments, "sampling_mask")
            assert kept.pos == len(PROMPT)
            masks = reader.read_masks(kept, tokens[kept.pos :])
            assert masks.equals(TRUTH.masks(tokens, len(PROMPT), top_k=20))
    assert len(files) == 1
    assert files.pop().startswith(f"v3/{RUN_ID}/")
    assert msgspec.convert(answer["payload_model"], type(MODEL)) == MODEL


@pytest.mark.parametrize("form", ["inline", "handle"])
async def test_a_stream_says_the_same_as_a_whole_answer(form: str, tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    request = body(PROMPT) if form == "inline" else by_handle(root, body(PROMPT))
    async with engine(payload_root=root) as client:
        whole = await ask(client, request)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = await client.post(URL, json={**request, **options})
    assert streamed.content.endswith(b"data: [DONE]\n\n")
    *blocks, last = events(streamed.content)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(whole["choices"][0]["token_ids"])
    parts = [block["choices"][0] for block in blocks]
    assert [token for part in parts for token in part["token_ids"]] == whole["choices"][0][
        "token_ids"
    ]
    assert all(part["routed_experts"] is None for part in parts[:-1])
    assert parts[-1]["routed_experts"] == whole["choices"][0]["routed_experts"]
    assert parts[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    if form == "inline":
        masks = [row for part in parts for row in part["sampling_mask"]]
        assert masks == whole["choices"][0]["sampling_mask"]
    else:
        assert all("payload_segments" not in block for block in blocks[:-1])
        assert blocks[-1]["payload_segments"]["0"]


@pytest.mark.parametrize(
    "folder",
    ["/elsewhere/v3", "{root}/../v3", "{root}", "{root}/v3/deeper", "{root}/w3", "{root}/v03", 7],
)
async def test_a_payload_dir_outside_its_own_root_is_refused(
    folder: str | int, tmp_path: Path
) -> None:
    root = make_root(tmp_path / "root")
    wanted = folder.format(root=root) if isinstance(folder, str) else folder
    async with engine(payload_root=root) as client:
        answer = await client.post(URL, json=body(PROMPT, extra_args={"payload_dir": wanted}))
    assert answer.status_code == 400
    assert "payload_dir" in answer.json()["error"]["message"]
    assert not list(root.rglob("*.sbp"))


async def test_another_run_and_a_missing_root_are_refused(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    request = by_handle(root, body(PROMPT))
    async with engine() as client:
        assert (await client.post(URL, json=request)).status_code == 400
    request["sampling_params"]["extra_args"]["payload_run_id"] = "other"
    async with engine(payload_root=root) as client:
        assert (await client.post(URL, json=request)).status_code == 400


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": []},
        {"token_ids": [-1]},
        {"token_ids": [1 << 30]},
        {"token_ids": "no"},
        {"sampling_params": {"max_tokens": 0}},
        {"sampling_params": {"n": 0}},
        {"sampling_params": {"routed_experts_prompt_start": 99}},
        {"sampling_params": {"extra_args": "no"}},
    ],
)
async def test_a_malformed_request_is_a_400_in_the_engines_form(wrong: Json) -> None:
    async with engine() as client:
        answer = await client.post(URL, json={**body(PROMPT), **wrong})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == 400


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 0}])
async def test_without_a_filter_a_server_with_masks_fails_and_says_nothing(params: Json) -> None:
    async with engine() as client:
        answer = await client.post(URL, json=body(PROMPT, **params))
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == ""


async def test_weights_that_change_are_reported_per_token() -> None:
    async with engine() as client:
        await client.post("/update_weight_version", json={"weight_version": "6"})
        assert (await client.get("/weight_version")).json() == {"weight_version": "6"}
        answer = await ask(client, body(PROMPT))
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "sim-uint8"
    choice = answer["choices"][0]
    count = len(choice["token_ids"])
    assert choice["weight_versions"] == [{"version": "6", "start": 0, "end": count}]


def test_the_pairings_together_write_in_every_encoding() -> None:
    """So that each run of the checker compares them."""
    used = ENCODINGS.values()
    assert {encodings.routing for encodings in used} == set(ROUTING_ENCODINGS)
    assert {encodings.masks for encodings in used} == set(MASK_ENCODINGS)
