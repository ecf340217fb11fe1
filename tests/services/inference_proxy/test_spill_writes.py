"""The proxy's own payload files, leg by leg: when they are written, and when they are not."""

import asyncio
import shutil
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from services.inference_proxy.answers import MalformedAnswer
from services.inference_proxy.budget import ByteBudget
from services.inference_proxy.metrics import Metrics
from services.inference_proxy.payloads import RootHandle, RootNotReady
from services.inference_proxy.planning import Call, Plan, make_plan
from services.inference_proxy.prompts import Prompt
from services.inference_proxy.spill import Asked, InlineChoice, Spill, SpillFailed, payload_of
from sideband.ids import RequestId, RunId
from sideband.payload.encodings import DEFAULT_ENCODINGS
from sideband.payload.errors import WriteFailed
from sideband.payload.root import PayloadRoot
from tests.services.inference_proxy.harness import RUN, request_body, until
from tests.services.inference_proxy.stub_model import (
    MODEL,
    all_layers,
    kept_ids,
    sampled,
    true_rows,
)

PROMPT = [5, 17, 3, 42, 8, 1]
TOKENS = PROMPT + sampled(PROMPT, 4)


class ByHand(Executor):
    """Runs what was submitted when it is told to, as a thread that is slow to write."""

    def __init__(self) -> None:
        self.work: list[tuple[Future[Any], Any]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.work.append((future, lambda: fn(*args, **kwargs)))
        return future

    def start(self) -> None:
        """From here on the work cannot be cancelled any more."""
        for future, _ in self.work:
            future.set_running_or_notify_cancel()

    def finish(self) -> None:
        for future, work in self.work:
            future.set_result(work())


def spill_at(root: Path, executor: Executor) -> tuple[Spill, Plan, list[InlineChoice]]:
    PayloadRoot.create(root, RUN, fresh=True)
    handle = RootHandle(root, run_id=None)
    handle.refresh()
    spill = Spill(
        handle,
        MODEL,
        encodings=DEFAULT_ENCODINGS,
        executor=executor,
        budget=ByteBudget(1 << 20),
        metrics=Metrics(CollectorRegistry()),
    )
    call = Call(
        body=request_body(PROMPT),
        lazy_prompt=Prompt.of(PROMPT),
        kind="train",
        request_id=RequestId("r1"),
        session_id=None,
        policy_version=0,
        headers=(),
    )
    plan = make_plan(call, session=None, policy_version=0, run_id=RUN)
    rows = all_layers(true_rows(TOKENS[:-1]))
    choice = InlineChoice(index=0, token_ids=TOKENS[6:], routed_experts=rows, sampling_mask=None)
    return spill, plan, [choice]


async def test_a_write_that_nobody_waits_for_any_more_leaves_no_file(tmp_path: Path) -> None:
    root, executor = tmp_path / "root", ByHand()
    spill, plan, choices = spill_at(root, executor)
    task = asyncio.create_task(
        spill.write(plan, "whole", RequestId("r1.a1"), choices, layer_ids=None)
    )
    await until(lambda: executor.work)
    executor.start()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(executor.finish)
    assert list(root.rglob("*.sbp")) == []


async def test_the_answer_waits_for_its_file(tmp_path: Path) -> None:
    root, executor = tmp_path / "root", ByHand()
    spill, plan, choices = spill_at(root, executor)
    task = asyncio.create_task(
        spill.write(plan, "whole", RequestId("r1.a1"), choices, layer_ids=None)
    )
    await until(lambda: executor.work)
    assert not task.done()
    executor.start()
    await asyncio.to_thread(executor.finish)
    report = await task
    assert [str(path.relative_to(root)) for path in root.rglob("*.sbp")] == [report.file]


async def test_a_root_that_another_run_took_over_is_not_written_to(tmp_path: Path) -> None:
    root = tmp_path / "root"
    spill, plan, choices = spill_at(root, ByHand())
    shutil.rmtree(root)
    PayloadRoot.create(root, RunId("run-2"), fresh=True)
    spill._root.refresh()
    with pytest.raises(RootNotReady, match="another run"):
        await spill.write(plan, "whole", RequestId("r1.a1"), choices, layer_ids=None)


@pytest.mark.parametrize(
    ("leg", "first", "kept"),
    [("whole", 2, [0, 9]), ("prefill", 2, None), ("decode", 6, [0, 9])],
)
def test_a_leg_writes_its_own_rows_and_no_others(leg: Any, first: int, kept: Any) -> None:
    """Rows of an earlier turn, decode's rows of the prompt and prefill's mask are left out."""
    tokens = TOKENS[:7] if leg == "prefill" else TOKENS
    choice = InlineChoice(
        index=0,
        token_ids=tokens[6:],
        routed_experts=all_layers(true_rows(tokens[:-1])),
        sampling_mask=[kept_ids(token) for token in tokens[6:]],
    )
    asked = Asked(leg=leg, prompt_tokens=6, prompt_start=2, layer_ids=None)
    payload = payload_of(choice, asked, MODEL)
    assert payload.routing is not None
    assert payload.routing.pos == first
    np.testing.assert_array_equal(payload.routing.rows_NLK, true_rows(tokens[:-1])[first:])
    assert (payload.masks is None) == (kept is None)


def test_decode_rows_that_do_not_reach_the_prompt_are_refused() -> None:
    rows = all_layers(true_rows(TOKENS[:-1]))[-2:]
    choice = InlineChoice(index=0, token_ids=TOKENS[6:], routed_experts=rows, sampling_mask=None)
    asked = Asked(leg="decode", prompt_tokens=6, prompt_start=0, layer_ids=None)
    with pytest.raises(MalformedAnswer, match="2 rows"):
        payload_of(choice, asked, MODEL)


async def test_a_full_disk_is_the_proxys_trouble(tmp_path: Path) -> None:
    spill, plan, choices = spill_at(tmp_path / "root", executor := ByHand())
    task = asyncio.create_task(
        spill.write(plan, "whole", RequestId("r1.a1"), choices, layer_ids=None)
    )
    await until(lambda: executor.work)
    executor.start()
    for future, _ in executor.work:
        future.set_exception(WriteFailed("v0/x", OSError(28, "No space left on device")))
    with pytest.raises(SpillFailed, match="No space left"):
        await task
