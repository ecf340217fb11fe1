"""One simulated engine at work: courses of requests, versions, counters. No HTTP.

Errors: BadRequest (400), EngineDead and MaskRefused (500), as the real server answers them.
"""

import asyncio
import secrets
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from simulation.engine.answers import VersionSpans, choice_body
from simulation.engine.handles import Target, find_target, write_outcomes
from simulation.engine.outcomes import (
    Course,
    Outcome,
    choose_tokens,
    draws,
    observe,
)
from simulation.engine.settings import EngineSettings
from simulation.engine.wire import (
    REQUEST_ID_PREFIX,
    BadRequest,
    GenerateRequest,
    Json,
    answer,
    usage,
)
from simulation.models import load_shape
from simulation.truth import Truth, mix

_PREEMPTS, _DISOBEYS = 0x50, 0x44
LATENCY_BLOCK_TOKENS: Final = 16  # one sleep per block: the loop's clock is not finer


class EngineDead(Exception):
    """The engine core has died; every further request fails."""


class MaskRefused(Exception):
    """A server that returns masks fails, with no message, when sampling does not filter."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A finished request: its answer, and the parts that a stream is cut from."""

    request_id: str
    outcomes: list[Outcome]
    choices: list[Json]
    handle: dict[str, Any]
    body: Json


class Engine:
    """Runs requests. Equal settings give equal answers, request by request."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.truth = Truth(load_shape(settings.model), seed=settings.seed)
        self.weight_version = "0"
        self.is_dead = False
        self.counters: Counter[str] = Counter()

    async def run(self, request: GenerateRequest) -> Run:
        """The whole answer of one request. Cancelling it is a client that went away."""
        self._check(request)
        target = await asyncio.to_thread(
            find_target, request.sampling_params, self.settings.payload_root
        )
        self.counters["requests"] += 1
        raw_id = request.request_id or secrets.token_hex(16)
        course = self._course(request)
        try:
            completions = self._sample(request)
            versions = await self._decode(completions)
        except asyncio.CancelledError:
            self.counters["cancelled"] += 1
            raise
        outcomes, choices, handle = await asyncio.to_thread(
            self._report, request, raw_id, completions, course, versions, target
        )
        counts = usage(
            len(request.token_ids), sum(map(len, completions)), min(course.loaded_tokens, 1 << 30)
        )
        request_id = REQUEST_ID_PREFIX + raw_id
        body = answer(
            request_id=request_id,
            model=self.settings.model,
            choices=choices,
            counts=counts,
            kv_transfer_params=self._transfer(request, outcomes),
            handle=handle,
        )
        return Run(
            request_id=request_id, outcomes=outcomes, choices=choices, handle=handle, body=body
        )

    def _check(self, request: GenerateRequest) -> None:
        if self.is_dead:
            raise EngineDead
        params = request.sampling_params
        if self.settings.returns_masks and not (params.temperature > 0 and params.top_k > 0):
            raise MaskRefused
        if self.settings.role != "colocated" and params.n > 1:
            raise BadRequest("n > 1 cannot be transferred between engines")

    def _course(self, request: GenerateRequest) -> Course:
        """What happens to this request; a decode below what it loaded may kill the engine."""
        settings, asked = self.settings, request.sampling_params.routed_experts_prompt_start
        loaded = self._loaded_tokens(request)
        if settings.is_fragile and asked < loaded:
            self.is_dead = True
            self.counters["deaths"] += 1
            raise EngineDead
        key = self._key(request)
        was_preempted = draws(key, salt=_PREEMPTS, rate=settings.preemption_rate)
        disobeys = settings.role == "decode" and draws(
            key, salt=_DISOBEYS, rate=settings.disobedience_rate
        )
        self.counters["preempted"] += was_preempted
        self.counters["disobeyed"] += disobeys
        start = 0 if disobeys else asked
        if loaded > start and not was_preempted:
            self.counters["garbage_rows"] += loaded - start
        return Course(loaded_tokens=loaded, was_preempted=was_preempted, rows_start=start)

    def _loaded_tokens(self, request: GenerateRequest) -> int:
        """Prompt tokens whose cache comes from the prefill engine that the request names."""
        transfer = self._transfer_of(request)
        if self.settings.role != "decode" or not transfer.get("do_remote_prefill"):
            return 0
        if transfer.get("remote_prompt_hash") != self._prompt_hash(request):
            self.counters["transfer_mismatches"] += 1
            raise BadRequest("kv_transfer_params do not belong to this prompt")
        self.counters["transfers"] += 1
        return len(request.token_ids)

    def _transfer(self, request: GenerateRequest, outcomes: list[Outcome]) -> Json | None:
        """What a decode engine needs to go on; kept only for a request that ended by length."""
        asked = self._transfer_of(request)
        if self.settings.role != "prefill" or not asked.get("do_remote_decode"):
            return None
        if any(outcome.finish_reason != "length" for outcome in outcomes):
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.settings.name,
            "remote_block_ids": [],
            "remote_host": self.settings.host,
            "remote_port": self.settings.port,
            "remote_prompt_hash": self._prompt_hash(request),
        }

    @staticmethod
    def _transfer_of(request: GenerateRequest) -> dict[str, Any]:
        extra = (request.sampling_params.extra_args or {}).get("kv_transfer_params")
        found = request.kv_transfer_params or extra
        return found if isinstance(found, dict) else {}

    def _prompt_hash(self, request: GenerateRequest) -> str:
        return f"{int(self.truth.hashes(np.asarray(request.token_ids, np.int32))[-1]):016x}"

    def _key(self, request: GenerateRequest) -> int:
        """64 bits that follow from prompt and sampling seed: equal requests fare equally."""
        prompt = int(self.truth.hashes(np.asarray(request.token_ids, np.int32))[-1])
        return mix(prompt ^ mix(request.sampling_params.seed or 0))

    def _sample(self, request: GenerateRequest) -> list[list[int]]:
        params = request.sampling_params
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        return [
            choose_tokens(self.truth, request.token_ids, params, index=index, seed=seed)
            for index in range(params.n)
        ]

    async def _decode(self, completions: list[list[int]]) -> list[VersionSpans]:
        """Let simulated time pass; which weights sampled which tokens, per choice."""
        steps = max(map(len, completions))
        marks: list[tuple[int, str]] = []  # first token of each version
        for start in range(0, steps, LATENCY_BLOCK_TOKENS):
            if not marks or marks[-1][1] != self.weight_version:
                marks.append((start, self.weight_version))
            block = min(LATENCY_BLOCK_TOKENS, steps - start)
            if self.settings.token_latency_s:
                await asyncio.sleep(block * self.settings.token_latency_s)
        ends = [start for start, _ in marks[1:]] + [steps]
        return [
            [
                {"version": version, "start": start, "end": min(end, len(completion))}
                for (start, version), end in zip(marks, ends, strict=True)
                if start < len(completion)
            ]
            for completion in completions
        ]

    def _report(
        self,
        request: GenerateRequest,
        raw_id: str,
        completions: list[list[int]],
        course: Course,
        versions: list[VersionSpans],
        target: Target | None,
    ) -> tuple[list[Outcome], list[Json], dict[str, Any]]:
        """Rows and masks, in the file or inline. Blocks: called in a thread."""
        model, params = self.truth.model, request.sampling_params
        outcomes = [
            observe(self.truth, request.token_ids, completion, params, index=index, course=course)
            for index, completion in enumerate(completions)
        ]
        handle: dict[str, Any] = {}
        if target is not None:
            encodings = self.settings.encodings
            handle = write_outcomes(target, raw_id, model, outcomes, encodings)
        choices = [
            choice_body(outcome, request, model, is_inline=target is None, versions=spans)
            for outcome, spans in zip(outcomes, versions, strict=True)
        ]
        return outcomes, choices, handle
