"""Payload files that the proxy writes itself, from the inline answers of engines without a plugin.

A leg's answer becomes what the same engine with the plugin would have answered: its rows lie in one
synced file under the leg's own request id, and the answer names them. So whatever follows (the
merge of two legs, retries, deletion) is one way for both. See decisions/0027.

Memory: what whole answers take, from before they are read until their file is written, is bounded
by a budget; what waits for room is not read from its engine.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, TypeVar

import msgspec
import structlog
from msgspec import structs

from services.inference_proxy.answers import Answer, Choice, MalformedAnswer
from services.inference_proxy.budget import ByteBudget
from services.inference_proxy.inline import decode_rows
from services.inference_proxy.limits import UNKNOWN_ANSWER_BYTES
from services.inference_proxy.metrics import Metrics
from services.inference_proxy.payloads import RootHandle, RootNotReady
from services.inference_proxy.planning import Plan
from services.inference_proxy.request_ids import Leg
from services.inference_proxy.slices import opened
from sideband.engines.inline import RoutingValue, choice_payload
from sideband.errors import InvalidInput, PayloadError
from sideband.fields import FIELDS
from sideband.ids import RequestId
from sideband.masks.rows import MaskRows, ScoreRows
from sideband.model import ModelShape
from sideband.payload.columns import ChoicePayload
from sideband.payload.encodings import Encodings
from sideband.payload.refusals import PayloadRefused
from sideband.payload.root import PayloadRoot
from sideband.payload.writer import WriteReport, write_payload

log = structlog.get_logger(__name__)
T = TypeVar("T")


class SpillFailed(Exception):
    """The file could not be written; the engine is not to blame."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InlineChoice:
    """One choice's rows as an engine sent them, with the tokens that they belong to."""

    index: int
    token_ids: Sequence[int]
    routed_experts: RoutingValue | None
    sampling_mask: Sequence[Sequence[int]] | MaskRows | msgspec.Raw | None
    sampling_mask_logprobs: Sequence[Sequence[float | None]] | ScoreRows | msgspec.Raw | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the leg was asked for, and so where its rows belong."""

    leg: Leg
    prompt_tokens: int
    prompt_start: int
    layer_ids: tuple[int, ...] | None


class Spill:
    """Writes files in threads of its own."""

    def __init__(
        self,
        root: RootHandle,
        model: ModelShape,
        *,
        encodings: Encodings,
        executor: Executor,
        budget: ByteBudget,
        metrics: Metrics,
    ) -> None:
        self._root, self.model, self._executor = root, model, executor
        self._encodings, self._budget, self._metrics = encodings, budget, metrics.spill
        self._has_warned = False

    def room(self, size_bytes: int | None) -> AbstractAsyncContextManager[None]:
        """Room for an answer of this size, to be held from before it is read until it is spilled.

        An answer that does not tell its size counts as UNKNOWN_ANSWER_BYTES.
        """
        return self._budget.claim(UNKNOWN_ANSWER_BYTES if size_bytes is None else size_bytes)

    async def spilled(self, plan: Plan, leg: Leg, request_id: RequestId, answer: Answer) -> Answer:
        """The answer by handle, its file synced. Raises what ``write`` raises."""
        if answer.is_by_handle:
            raise MalformedAnswer("payload_segments", "came without a payload_dir")
        raw_choices = answer.body["choices"]
        inline = [
            InlineChoice(
                index=choice.index,
                token_ids=choice.token_ids,
                routed_experts=choice.routed_experts,
                sampling_mask=raw.get("sampling_mask"),
                sampling_mask_logprobs=raw.get("sampling_mask_logprobs"),
            )
            for choice, raw in zip(answer.choices, raw_choices, strict=True)
        ]
        report = await self.write(plan, leg, request_id, inline, layer_ids=answer.layer_ids)
        body = {
            **answer.body,
            "choices": [without_rows(raw) for raw in raw_choices],
            **self.members(report),
        }
        body.pop("routed_layer_ids", None)
        return Answer(
            body=body,
            choices=tuple(
                replace_rows(choice, report.segments[choice.index]) for choice in answer.choices
            ),
            model=self.model,
            layer_ids=None,
            is_by_handle=True,
        )

    def members(self, report: WriteReport) -> dict[str, Any]:
        """What an answer says about its file at its top level."""
        return {
            "payload_segments": {
                str(index): msgspec.to_builtins(segments)
                for index, segments in report.segments.items()
            },
            "payload_model": msgspec.to_builtins(self.model),
        }

    async def write(
        self,
        plan: Plan,
        leg: Leg,
        request_id: RequestId,
        choices: Sequence[InlineChoice],
        *,
        layer_ids: tuple[int, ...] | None,
    ) -> WriteReport:
        """Publish the rows of one leg. A cancelled call leaves no file, or one that the janitor
        finds by the id.

        Raises MalformedAnswer, SpillFailed, RootNotReady.
        """
        root = self._root.current
        if root is None or root.run_id != plan.run_id:
            raise RootNotReady("the payload root was taken over by another run meanwhile")
        asked = Asked(
            leg=leg,
            prompt_tokens=plan.prompt_tokens,
            prompt_start=plan.prompt_start,
            layer_ids=layer_ids,
        )

        def work() -> WriteReport:
            return write_payload(
                root,
                policy_version=plan.policy_version,
                request_id=request_id,
                model=self.model,
                choices=[payload_of(choice, asked, self.model) for choice in choices],
                encodings=self._encodings,
            )

        try:
            report = await self._finished(root, work)
        except (InvalidInput, PayloadRefused) as exc:
            raise MalformedAnswer("rows", str(exc)) from exc
        except PayloadError as exc:
            raise SpillFailed(str(exc)) from exc
        self._count(plan, leg, report)
        return report

    async def _finished(self, root: PayloadRoot, work: Callable[[], WriteReport]) -> WriteReport:
        """The result of ``work``; when nobody waits for it any more its file is deleted again."""
        is_abandoned = Event()

        def run() -> WriteReport:
            report = work()
            if is_abandoned.is_set() and report.file is not None:
                root.delete(report.file)
            return report

        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, run)
        except asyncio.CancelledError:
            is_abandoned.set()
            raise

    def _count(self, plan: Plan, leg: Leg, report: WriteReport) -> None:
        if report.file is None:
            if not self._has_warned and leg != "decode":
                self._has_warned = True  # an engine that was not told to capture sends none at all
                log.warning("nothing_to_spill", request_id=plan.call.request_id)
            return
        self._metrics.files_total.inc()
        self._metrics.bytes_total.inc(report.size_bytes)
        self._metrics.rows_invalid_total.inc(report.rows_invalid)


def without_rows(raw: dict[str, Any]) -> dict[str, Any]:
    """A choice whose rows lie in a file."""
    rows = {"routed_experts": None, "sampling_mask": None}
    return {**raw, **rows, **{name: None for name in FIELDS if name in raw}}


def replace_rows(choice: Choice, segments: Any) -> Choice:
    """The same choice by handle."""
    return structs.replace(choice, routed_experts=None, segments=tuple(segments))


def payload_of(choice: InlineChoice, asked: Asked, model: ModelShape) -> ChoicePayload:
    """What of a choice goes into the file: pure.

    Never a row that is not asked for: rows of an earlier turn are in its file, and what decode
    reports of the prompt is not what ran. Prefill's token is thrown away, and so is its mask.
    Raises MalformedAnswer, InvalidInput.
    """
    routing: RoutingValue | None = choice.routed_experts
    start = asked.prompt_start
    if asked.leg == "decode":
        start = asked.prompt_tokens
        plain = Choice(index=choice.index, token_ids=list(choice.token_ids), routed_experts=routing)
        rows = decode_rows(plain, prompt_tokens=asked.prompt_tokens)
        routing = None if rows is None else rows.rows_NLK[max(0, start - rows.pos) :]
    payload = choice_payload(
        routing,
        None if asked.leg == "prefill" else opened(choice.sampling_mask),
        layer_ids=asked.layer_ids,
        prompt_tokens=asked.prompt_tokens,
        completion_token_ids=choice.token_ids,
        prompt_start=start,
        model=model,
        choice=choice.index,
        sampling_mask_logprobs=None
        if asked.leg == "prefill"
        else opened(choice.sampling_mask_logprobs),
    )
    found = payload.routing
    if found is not None and found.pos < start:  # it did not obey
        kept = found.rows_NLK[start - found.pos :]
        payload = replace(payload, routing=replace(found, pos=start, rows_NLK=kept))
    return payload
