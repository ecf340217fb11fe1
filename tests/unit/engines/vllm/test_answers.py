"""Whole answers: rows in the file are those of the engine, and nothing else about it changes."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sideband.engines.vllm.asks import open_target, read_ask
from sideband.engines.vllm.takes import Takings
from sideband.engines.vllm.writing import Request, Write
from sideband.payload.durable import DurableFolders
from sideband.payload.encodings import DEFAULT_ENCODINGS, Encodings
from tests.unit.engines.vllm.fakes import (
    HF_CONFIG,
    MODEL,
    CompletionOutput,
    RequestOutput,
    Script,
    masks_of,
    rows_of,
    script_for,
)
from tests.unit.engines.vllm.running import RUN, inline_rows, server, until

PROMPT = [1, 2, 3, 4, 5]


async def test_rows_by_handle_are_the_engines_and_no_longer_inline(tmp_path: Path) -> None:
    running = server(tmp_path, script_for(5))
    body = await running.answer(running.request(PROMPT))
    (choice,) = body["choices"]
    assert (choice["routed_experts"], choice["sampling_mask"]) == (None, None)
    assert choice["token_ids"] == [20, 30, 40]
    assert body["payload_model"]["layer_ids"] == (1, 2, 3)
    segments = body["payload_segments"]["0"]
    assert [(s["field"], s["pos"], s["rows"]) for s in segments] == [
        ("routed_experts", 0, 7),
        ("sampling_mask", 5, 3),
    ]
    np.testing.assert_array_equal(running.rows(segments), running.script.routing[0])
    assert running.masks(segments) == running.script.masks[0]
    (file,) = running.files()
    assert file.startswith(f"v3/{RUN}/")
    assert file.rpartition("/")[2].startswith("r1-")


async def test_wide_ids_are_packed_where_the_setting_says_so_and_read_back_the_same(
    tmp_path: Path,
) -> None:
    config = {**HF_CONFIG, "num_experts": 512}
    rows = np.tile(np.array([300, 511, 7, 256], np.uint16), (7, 4, 1))
    rows[:, 0] = 0  # the dense layer
    rows[:, 2, 0] = np.arange(400, 407)
    sizes = {}
    for encoding in ("raw", "packed"):
        script = script_for(5)
        script.routing = {0: rows}
        folder = tmp_path / encoding
        running = server(folder, script, encodings=Encodings(routing=encoding), hf_config=config)
        body = await running.answer(running.request(PROMPT))
        np.testing.assert_array_equal(running.rows(body["payload_segments"]["0"]), rows)
        (file,) = running.files()
        sizes[encoding] = (running.root / file).stat().st_size
    assert sizes["packed"] < sizes["raw"]


async def test_the_debug_flag_answers_both_forms_with_every_layer(tmp_path: Path) -> None:
    running = server(tmp_path, script_for(5))
    body = await running.answer(running.request(PROMPT, more={"payload_debug": True}))
    (choice,) = body["choices"]
    np.testing.assert_array_equal(running.rows(body["payload_segments"]["0"]), inline_rows(choice))
    assert choice["sampling_mask"] == running.masks(body["payload_segments"]["0"])
    assert "routed_layer_ids" not in body


async def test_inline_answers_carry_the_routed_layers_alone_and_name_them(tmp_path: Path) -> None:
    running = server(tmp_path, script_for(5))
    body = await running.answer(running.request(PROMPT, extra={}))
    assert body["routed_layer_ids"] == [1, 2, 3]
    rows = inline_rows(body["choices"][0])
    np.testing.assert_array_equal(rows, running.script.routing[0][:, 1:])
    assert body["choices"][0]["sampling_mask"] == running.script.masks[0]
    assert "payload_segments" not in body
    assert running.files() == []


async def test_large_inline_rows_are_cut_in_a_thread_and_come_out_the_same(tmp_path: Path) -> None:
    rows = rows_of(1 << 17)
    running = server(tmp_path, Script(tokens={0: [9]}, routing={0: rows}))
    body = await running.answer(running.request([1] * (1 << 17), extra={}))
    assert body["routed_layer_ids"] == [1, 2, 3]


async def test_debug_without_a_folder_is_what_the_server_says_without_a_plugin(
    tmp_path: Path,
) -> None:
    running = server(tmp_path, script_for(5))
    body = await running.answer(running.request(PROMPT, extra={"payload_debug": True}))
    np.testing.assert_array_equal(inline_rows(body["choices"][0]), running.script.routing[0])
    assert body.pop("engine_process") == running.state.process
    assert body.keys() == {"request_id", "kv_transfer_params", "output_mode", "choices"}


async def test_choices_share_one_file_and_have_segments_of_their_own(tmp_path: Path) -> None:
    running = server(tmp_path, script_for(5, choices=3))
    body = await running.answer(running.request(PROMPT, n=3))
    assert len(running.files()) == 1
    for index in range(3):
        segments = body["payload_segments"][str(index)]
        np.testing.assert_array_equal(running.rows(segments), running.script.routing[index])
        assert running.masks(segments, choice=index) == running.script.masks[index]


async def test_rows_begin_where_they_were_asked_from(tmp_path: Path) -> None:
    running = server(tmp_path, script_for(5, start=4))
    body = await running.answer(running.request(PROMPT, routed_experts_prompt_start=4))
    segment = body["payload_segments"]["0"][0]
    assert (segment["pos"], segment["rows"]) == (4, 3)


async def test_an_engine_that_captures_nothing_serves_tokens_and_an_empty_list(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config: dict[str, Any] = {"enable_return_routed_experts": False, "return_sampling_mask": False}
    running = server(tmp_path, Script(), **config)
    assert "--enable-return-routed-experts" in caplog.text
    assert "--return-sampling-mask" in caplog.text
    body = await running.answer(running.request(PROMPT))
    assert body["payload_segments"] == {"0": []}
    assert body["choices"][0]["token_ids"] == [11, 12, 13]
    assert running.files() == []


async def test_rows_of_other_tokens_are_a_500_and_no_file(tmp_path: Path) -> None:
    running = server(tmp_path, Script(routing={0: rows_of(9)}))
    body = await running.answer(running.request(PROMPT))
    assert body["status"] == 500
    assert "choice 0" in body["message"]
    assert running.files() == []


async def test_a_mask_without_its_token_is_a_500_and_no_file(tmp_path: Path) -> None:
    running = server(tmp_path, Script(masks={0: [[11], [12], [12]]}))
    body = await running.answer(running.request(PROMPT))
    assert body["status"] == 500
    assert "13" in body["message"]
    assert running.files() == []


async def test_an_aborted_choice_whose_rows_do_not_fit_keeps_its_tokens(tmp_path: Path) -> None:
    script = Script(
        routing={0: rows_of(3)}, masks={0: masks_of([11, 12, 13])}, finish_reason="abort"
    )
    running = server(tmp_path, script)
    body = await running.answer(running.request(PROMPT))
    assert body["choices"][0]["token_ids"] == [11, 12, 13]
    assert body["payload_segments"] == {"0": []}
    assert running.files() == []


async def test_an_aborted_choice_without_tokens_or_rows_is_an_empty_list(tmp_path: Path) -> None:
    running = server(tmp_path, Script(tokens={0: []}, finish_reason="abort"))
    body = await running.answer(running.request(PROMPT))
    assert body["payload_segments"] == {"0": []}


async def test_invalid_rows_are_gaps_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = script_for(5)
    script.routing[0][2, 3] = 0
    running = server(tmp_path, script)
    body = await running.answer(running.request(PROMPT))
    routing = [s for s in body["payload_segments"]["0"] if s["field"] == "routed_experts"]
    assert [(s["pos"], s["rows"]) for s in routing] == [(0, 2), (3, 4)]
    assert "1 invalid rows" in caplog.text


async def test_a_refused_folder_is_a_400_before_anything_runs(tmp_path: Path) -> None:
    running = server(tmp_path, script_for(5))
    for extra in ({"payload_dir": "/etc/v3"}, {"payload_dir": f"{tmp_path}/v3"}):
        body = await running.answer(running.request(PROMPT, extra=extra))
        assert (body["status"], body["kind"]) == (400, "BadRequestError")
    other = {"payload_dir": f"{running.root}/v3", "payload_run_id": "run-2"}
    assert (await running.answer(running.request(PROMPT, extra=other)))["status"] == 400
    assert not running.script.closed


async def test_a_server_without_a_root_refuses_by_handle_and_serves_inline(tmp_path: Path) -> None:
    running = server(tmp_path, script_for(5), root=False)
    body = await running.answer(running.request(PROMPT))
    assert body["status"] == 400
    assert "SIDEBAND_VLLM_PAYLOAD_ROOT" in body["message"]
    assert (await running.answer(running.request(PROMPT, extra={})))["routed_layer_ids"]


async def test_an_unknown_version_refuses_by_handle_and_leaves_all_else_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    running = server(tmp_path, script_for(5), version="0.99.0")
    assert "0.99.0 is not known" in caplog.text
    body = await running.answer(running.request(PROMPT))
    assert body["status"] == 400
    assert "0.99.0 is not known" in body["message"]
    body = await running.answer(running.request(PROMPT, extra={}))
    np.testing.assert_array_equal(inline_rows(body["choices"][0]), running.script.routing[0])
    assert "routed_layer_ids" not in body
    shown = await running.state.shown()
    assert not shown["is_by_handle"]
    assert "0.99.0" in shown["why_not"]


@pytest.mark.parametrize("hf_config", [{"model_type": "never-heard-of"}, {"model_type": "llama"}])
async def test_a_model_whose_layers_are_not_known_refuses_by_handle_and_cuts_nothing(
    tmp_path: Path, hf_config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    running = server(tmp_path, script_for(5), hf_config=hf_config)
    assert "this model's layers are not known" in caplog.text
    assert (await running.answer(running.request(PROMPT)))["status"] == 400
    body = await running.answer(running.request(PROMPT, extra={}))
    np.testing.assert_array_equal(inline_rows(body["choices"][0]), running.script.routing[0])


async def test_masks_that_the_engine_cannot_return_refuse_by_handle(tmp_path: Path) -> None:
    running = server(tmp_path, script_for(5), use_v2_model_runner=False)
    body = await running.answer(running.request(PROMPT))
    assert body["status"] == 400
    assert "Model Runner V2" in body["message"]


async def test_what_a_proxy_compares_is_shown(tmp_path: Path) -> None:
    running = server(tmp_path, script_for(5))
    shown = await running.state.shown(weight_version="7")
    assert shown["is_by_handle"]
    assert shown["policy_version"] == 7
    assert shown["run_id"] == RUN
    assert shown["payload_model"]["vocab_size"] == MODEL.vocab_size
    assert shown["captures"] == {"routed_experts": True, "sampling_mask": True}
    assert (shown["why_not"], shown["findings"]) == (None, [])
    assert shown["engine_process"] == running.state.process


@pytest.mark.parametrize("name", [None, "default", "", "-1", "07", "1.0", "9" * 10, "\u0661"])
async def test_weights_named_by_no_policy_version_tell_none(
    name: str | None, tmp_path: Path
) -> None:
    running = server(tmp_path, script_for(5))
    assert (await running.state.shown(weight_version=name))["policy_version"] is None


async def test_a_client_that_leaves_while_tokens_are_made_leaves_no_file(tmp_path: Path) -> None:
    script = script_for(5)
    script.gate = asyncio.Event()
    running = server(tmp_path, script)
    task = asyncio.create_task(running.handler.serve_tokens(running.request(PROMPT), None))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: script.closed)
    await asyncio.to_thread(running.settled)
    assert running.files() == []


async def test_a_client_that_leaves_while_its_file_is_written_leaves_none(tmp_path: Path) -> None:
    running = server(tmp_path, script_for(5), threads=1)
    running.script.gate = asyncio.Event()
    task = asyncio.create_task(running.handler.serve_tokens(running.request(PROMPT), None))
    await asyncio.sleep(0.05)  # admitted, and waiting for its tokens
    entered, held = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        held.wait(5)

    running.state.pool.submit(hold)
    await asyncio.to_thread(entered.wait, 5)
    running.script.gate.set()
    await until(lambda: running.script.closed)  # its write stands behind the one that is held
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held.set()
    await asyncio.to_thread(running.settled)
    assert running.files() == []


@pytest.mark.parametrize("is_first", [True, False])
def test_an_abandoned_file_is_gone_whether_the_write_or_the_news_comes_first(
    tmp_path: Path, is_first: bool
) -> None:
    running = server(tmp_path, script_for(5))
    request = running.request(PROMPT)
    ask = read_ask(request.sampling_params.extra_args, root=running.root, request_id="r1")
    assert ask.place is not None
    takings = Takings(choices=1, is_stream=False)
    script = running.script
    output = CompletionOutput(0, script.tokens[0], script.routing[0], "length")
    takings.take(RequestOutput(PROMPT, [output]), leaves_inline=False)
    write = Write(
        Request(
            target=open_target(ask.place, durable=DurableFolders()),
            model=MODEL,
            encodings=DEFAULT_ENCODINGS,
            prompt_tokens=5,
            prompt_start=0,
            choices=takings.choices,
        )
    )
    steps: list[Callable[[], object]] = [write.abandon, write.run]
    for step in steps if is_first else reversed(steps):
        step()
    assert running.files() == []


async def test_a_full_disk_is_a_500_that_says_so(tmp_path: Path) -> None:
    running = server(tmp_path, script_for(5))
    (running.root / "v3").write_text("a file where the folder should be")
    body = await running.answer(running.request(PROMPT))
    assert body["status"] == 500
    assert "v3" in body["message"]
