"""Engines without the plugin: the proxy writes the payload file from their inline answers."""

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from fastapi import Response
from msgspec import structs

from services.inference_proxy import app
from services.inference_proxy.config import EngineSettings, ProxySettings
from sideband.engines.inline import encode_npy_base64
from sideband.payload.reader import PayloadReader
from sideband.payload.root import PayloadRoot
from tests.services.inference_proxy.harness import pair, request_body, running, until
from tests.services.inference_proxy.reading import assert_rows, routing_of, segments_of
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.stub_model import (
    HF_CONFIG,
    MODEL,
    all_layers,
    kept_ids,
    sampled,
    true_rows,
)

PROMPT = [5, 17, 3, 42, 8, 1]
TOKENS = PROMPT + sampled(PROMPT, 4)


def kept_in(answer: dict[str, Any], root: Path) -> list[list[int]]:
    """The kept sets that the answer's mask segment names."""
    (segment,) = segments_of(answer, "sampling_mask")
    reader = PayloadReader(PayloadRoot.open(root), model=MODEL)
    try:
        sampled_ids = np.array(answer["choices"][0]["token_ids"], np.int32)
        masks = reader.read_masks(segment, sampled_ids)
    finally:
        reader.close()
    return [masks[i].tolist() for i in range(len(masks))]


@pytest.mark.parametrize("spills", [False, True])
async def test_what_writers_use_is_compiled_before_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spills: bool
) -> None:
    """Compiling beside requests would make them wait."""
    compiled: list[bool] = []
    monkeypatch.setattr(app, "compile_loops", lambda: compiled.append(True))
    async with running({"e0": StubEngine(spills=spills)}, root=tmp_path / "root"):
        assert compiled == [True] * spills


@pytest.mark.parametrize("is_pair", [False, True])
async def test_a_stock_engine_answers_by_handle_through_the_proxy(
    tmp_path: Path, is_pair: bool
) -> None:
    root = tmp_path / "root"
    engines = pair(spills=True) if is_pair else {"e0": StubEngine(spills=True)}
    async with running(engines, root=root) as proxy:
        answer = (await proxy.generate(request_body(PROMPT))).json()
        (choice,) = answer["choices"]
        assert (choice["routed_experts"], choice["sampling_mask"]) == (None, None)
        assert answer["payload_model"]["layer_ids"] == [1, 2]
        assert_rows(routing_of(answer, root), true_rows(TOKENS[:-1]))
        assert kept_in(answer, root) == [kept_ids(token) for token in TOKENS[6:]]
        assert len(proxy.files()) == 1 + is_pair
        asked = [request["sampling_params"] for e in engines.values() for request in e.requests]
        assert not any("payload_dir" in (each.get("extra_args") or {}) for each in asked)
        metrics = (await proxy.http.get("/metrics")).text
        assert f"proxy_spilled_files_total {len(proxy.files())}.0" in metrics
        assert "proxy_spill_held_bytes 0.0" in metrics


async def test_eval_requests_of_a_stock_engine_stay_inline(tmp_path: Path) -> None:
    async with running({"e0": StubEngine(spills=True)}, root=tmp_path / "root") as proxy:
        answer = await proxy.http.post("/inference/v1/generate", json=request_body(PROMPT))
        assert answer.json()["choices"][0]["routed_experts"] is not None
        assert proxy.files() == []


@pytest.mark.parametrize("obeys", [True, False])
async def test_a_follow_up_turn_writes_only_rows_that_are_new(tmp_path: Path, obeys: bool) -> None:
    root = tmp_path / "root"
    async with running({"e0": StubEngine(spills=True, obeys=obeys)}, root=root) as proxy:
        await proxy.generate(request_body(PROMPT), session="s1")
        prompt = [*TOKENS, 9]
        answer = (await proxy.generate(request_body(prompt), session="s1")).json()
        whole = true_rows((prompt + sampled(prompt, 4))[:-1])
        assert_rows(routing_of(answer, root), whole[9:], start=9)


async def test_all_choices_of_a_request_lie_in_one_file(tmp_path: Path) -> None:
    async with running({"e0": StubEngine(spills=True)}, root=tmp_path / "root") as proxy:
        answer = (await proxy.generate(request_body(PROMPT, n=3))).json()
        assert set(answer["payload_segments"]) == {"0", "1", "2"}
        assert len(proxy.files()) == 1


async def test_an_invalid_row_is_a_gap_also_when_the_proxy_writes(tmp_path: Path) -> None:
    engine, root = StubEngine(spills=True), tmp_path / "root"
    rows = all_layers(true_rows(TOKENS[:-1]))
    rows[3, 1] = 5  # the same expert twice
    choice = {"index": 0, "token_ids": TOKENS[6:], "routed_experts": encode_npy_base64(rows)}
    engine.script.append(lambda _: StubEngine.json({"choices": [choice]}))
    async with running({"e0": engine}, root=root) as proxy:
        answer = (await proxy.generate(request_body(PROMPT))).json()
        assert sorted(routing_of(answer, root)) == [0, 1, 2, 4, 5, 6, 7, 8]
        metrics = (await proxy.http.get("/metrics")).text
        assert "proxy_spilled_rows_invalid_total 1.0" in metrics


async def test_wide_ids_are_packed_where_the_setting_says_so_and_read_back_the_same(
    tmp_path: Path,
) -> None:
    config = tmp_path / "wide.json"
    config.write_bytes(orjson.dumps({**HF_CONFIG, "num_experts": 512}))
    model = structs.replace(MODEL, id_space=512)
    rows = np.stack([np.arange(9), np.arange(300, 309)], axis=1).astype(np.uint16)
    wide = np.stack([np.zeros_like(rows), rows, rows + 200], axis=1)  # layer 0 is dense
    choice = {"index": 0, "token_ids": TOKENS[6:], "routed_experts": encode_npy_base64(wide)}
    sizes = {}
    for encoding in ("raw", "packed"):
        engine, root = StubEngine(spills=True), tmp_path / encoding
        engine.script.append(lambda _: StubEngine.json({"choices": [choice]}))
        settings: dict[str, Any] = {"model_config_path": config, "routing_encoding": encoding}
        async with running({"e0": engine}, root=root, **settings) as proxy:
            answer = (await proxy.generate(request_body(PROMPT))).json()
            (file,) = proxy.files()
        (segment,) = segments_of(answer, "routed_experts")
        found = np.empty((9, 2, 2), np.uint16)
        with PayloadReader(PayloadRoot.open(root), model=model) as reader:
            reader.read_routing(segment, found)
        np.testing.assert_array_equal(found, wide[:, 1:])
        sizes[encoding] = (root / file).stat().st_size
    assert sizes["packed"] < sizes["raw"]


async def test_the_prefill_file_of_a_failed_decode_goes(tmp_path: Path) -> None:
    engines = pair(spills=True)
    engines["d0"].script.append(lambda _: StubEngine.json({}, 500))
    async with running(engines, root=tmp_path / "root") as proxy:
        answer = (await proxy.generate(request_body(PROMPT))).json()
        named = {s["file"] for s in answer["payload_segments"]["0"]}
        assert len(engines["p0"].requests) == 2
        await until(lambda: set(proxy.files()) == named)
        assert len(named) == 2


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"routed_experts": encode_npy_base64(all_layers(true_rows(TOKENS)))}, "10 rows"),
    ({"routed_experts": encode_npy_base64(true_rows(TOKENS[:-1]))}, "rows of (2, 2)"),
    ({"routed_experts": "AAAA"}, "npy"),
    ({"sampling_mask": [[1]] * 4}, "sampled"),
    ({"sampling_mask": [kept_ids(TOKENS[6])]}, "1 rows"),
    ({"token_ids": [*TOKENS[6:9], 64]}, "vocabulary"),
]


@pytest.mark.parametrize(("change", "said"), BROKEN, ids=[said for _, said in BROKEN])
async def test_rows_that_cannot_be_the_requests_are_refused_and_leave_no_file(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    engine = StubEngine(spills=True)
    choice = {"index": 0, "token_ids": TOKENS[6:], **change}
    engine.script.append(lambda _: StubEngine.json({"choices": [choice]}))
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:
        answer = await proxy.generate(request_body(PROMPT))
        assert (answer.status_code, answer.json()["code"]) == (502, "engine_answer_malformed")
        assert said in answer.json()["detail"]
        assert proxy.files() == []


@pytest.mark.parametrize("is_stream", [False, True])
async def test_segments_of_an_engine_that_writes_no_files_are_refused(
    tmp_path: Path, is_stream: bool
) -> None:
    def lying(body: dict[str, Any]) -> Any:
        choices = [{"index": 0, "token_ids": [1], "finish_reason": "length"}]
        whole = {"choices": choices, "payload_segments": {}}
        return StubEngine.json(whole) if not is_stream else streamed(whole)

    engine = StubEngine(spills=True)
    engine.script.append(lying)
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:
        answer = await proxy.generate({**request_body(PROMPT), "stream": is_stream})
        assert "came without a payload_dir" in answer.text


def streamed(event: dict[str, Any]) -> Any:
    content = b"data: " + orjson.dumps(event) + b"\n\ndata: [DONE]\n\n"
    return Response(content, media_type="text/event-stream")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_file_that_cannot_be_written_is_said_and_blames_no_engine(
    tmp_path: Path, is_stream: bool
) -> None:
    root = tmp_path / "root"
    async with running({"e0": StubEngine(spills=True)}, root=root) as proxy:
        (root / "v0").write_text("a file where the folder must be")
        answer = await proxy.generate({**request_body(PROMPT), "stream": is_stream})
        if is_stream:
            assert "v0" in answer.text
            assert "[DONE]" not in answer.text
        else:
            assert (answer.status_code, answer.json()["code"]) == (503, "payload_not_written")
        (engine,) = proxy.parts.book
        assert (engine.health.state, engine.health.failures) == ("healthy", 0)


async def test_spilling_asks_for_the_models_config(tmp_path: Path) -> None:
    engine = EngineSettings(name="e0", url="http://e0", spill="proxy")
    with pytest.raises(ValueError, match="model_config_path"):
        ProxySettings(engines=(engine,), payload_root=tmp_path)
    ProxySettings(engines=(engine,))  # without a root nothing is spilled
