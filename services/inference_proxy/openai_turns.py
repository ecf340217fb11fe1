"""Train requests on OpenAI routes: answered as ever, their tokens and rows kept for the hand-in.

The prompt's tokens are known only once an engine has rendered them: the engine is asked for all
rows, and what an earlier turn of the session has written is left out of the file. Whatever comes
inline is spilled where the proxy knows the model, since no plugin stands on these routes. An
engine that tells no token ids is relayed; nothing of such a turn is kept, and that is counted.
"""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import structlog

from services.inference_proxy.answers import Answer, MalformedAnswer, read_answer
from services.inference_proxy.assembly import Outcome, from_one, from_pair
from services.inference_proxy.attempts import mask_refusal_reader
from services.inference_proxy.calls import EngineCalls
from services.inference_proxy.dialects.base import Ask, Body
from services.inference_proxy.engine import Engine, Role
from services.inference_proxy.engines import EngineBook
from services.inference_proxy.janitor import Janitor
from services.inference_proxy.long_json import size_of
from services.inference_proxy.offload import offload
from services.inference_proxy.openai import OpenAICall
from services.inference_proxy.planning import Call, Place, Plan, injection_for
from services.inference_proxy.prompts import Prompt
from services.inference_proxy.reading import read_openai, read_parts
from services.inference_proxy.request_ids import AttemptIds, Leg, upstream_base
from services.inference_proxy.retries import RetryLimits, retried
from services.inference_proxy.service import GenerateService, busy
from services.inference_proxy.spill import Spill
from services.inference_proxy.upstream import UpstreamError, parsed
from sideband.ids import RequestId

log = structlog.get_logger(__name__)
_SAMPLING: Final = ("n", "temperature", "top_p", "top_k")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTurn:
    """An answered request. Without ``outcome`` the engine told no token ids."""

    shown: Body  # for the client
    plan: Plan | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The same for every attempt."""

    call: OpenAICall
    body: Body
    request_id: RequestId
    place: Place
    base_id: str

    @property
    def wants_one_token(self) -> bool:
        return tokens_max(self.body) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _LegAnswer:
    raw: Body
    plan: Plan | None
    answer: Answer | None
    engine: Engine


class OpenAITurns:
    """What the OpenAI endpoints call for train requests."""

    def __init__(
        self,
        calls: EngineCalls,
        book: EngineBook,
        janitor: Janitor,
        spill: Spill | None,
        generate: GenerateService,
        *,
        retries: RetryLimits,
    ) -> None:
        self._calls, self._book, self._janitor = calls, book, janitor
        self._spill, self._generate, self._retries = spill, generate, retries

    async def whole(
        self, call: OpenAICall, request_id: RequestId, policy_version: int | None
    ) -> TrainTurn:
        """The whole answer. Raises what the last attempt raised, VersionChanged, RootNotReady."""
        assert call.body is not None, "a train request has a body"
        asked = _Asked(
            call=call,
            body=call.body,
            request_id=request_id,
            place=self._generate.place(call.session_id, policy_version, is_train=True),
            base_id=upstream_base(request_id),
        )
        avoid: set[str] = set()

        async def one(number: int) -> TrainTurn:
            try:
                return await self._attempt(asked, AttemptIds(asked.base_id, number), avoid)
            except UpstreamError as exc:
                avoid.add(exc.engine)
                raise

        with busy(asked.place.session):
            return await retried(one, self._retries)

    async def _attempt(self, asked: _Asked, ids: AttemptIds, avoid: AbstractSet[str]) -> TrainTurn:
        is_pair = self._book.is_pair
        with self._files_of(asked, ids):
            if is_pair and not asked.wants_one_token:
                prefill = await self._leg(asked, ids, "prefill", "prefill", avoid)
                last = await self._leg(asked, ids, "decode", "decode", avoid, prefill)
                turn = await self._paired(asked, prefill, last)
            else:
                role: Role = "prefill" if is_pair else "colocated"
                last = await self._leg(asked, ids, role, "whole", avoid)
                turn = await self._alone(asked, last)
            if turn.plan is not None and turn.outcome is not None:
                self._generate.count(turn.plan, turn.outcome.form)
                self._drop(asked, files=turn.outcome.files_dropped, reason="unused_leg")
            return turn

    async def _alone(self, asked: _Asked, leg: _LegAnswer) -> TrainTurn:
        plan, answer = leg.plan, leg.answer
        if plan is None or answer is None:
            return TrainTurn(shown=self._shown(asked, leg, None))
        outcome = await offload(
            lambda: from_one(
                answer,
                request_id=asked.request_id,
                prompt_tokens=plan.prompt_tokens,
                prompt_start=plan.prompt_start,
            ),
            size_bytes=answer.inline_bytes,
        )
        return TrainTurn(shown=self._shown(asked, leg, outcome), plan=plan, outcome=outcome)

    async def _paired(self, asked: _Asked, prefill: _LegAnswer, decode: _LegAnswer) -> TrainTurn:
        plan, first, second = decode.plan, prefill.answer, decode.answer
        if plan is None or prefill.plan is None or first is None or second is None:
            return TrainTurn(shown=self._shown(asked, decode, None))
        if not np.array_equal(plan.prompt, prefill.plan.prompt):
            raise MalformedAnswer("prompt_token_ids", "prefill and decode rendered other prompts")
        outcome = await offload(
            lambda: from_pair(
                first,
                second,
                request_id=asked.request_id,
                prompt_tokens=plan.prompt_tokens,
                prompt_start=plan.prompt_start,
            ),
            size_bytes=first.inline_bytes + second.inline_bytes,
        )
        return TrainTurn(shown=self._shown(asked, decode, outcome), plan=plan, outcome=outcome)

    async def _leg(
        self,
        asked: _Asked,
        ids: AttemptIds,
        role: Role,
        leg: Leg,
        avoid: AbstractSet[str],
        prefill: _LegAnswer | None = None,
    ) -> _LegAnswer:
        engine = self._calls.choose(role, session=asked.call.session_id, avoid=avoid)
        request_id = ids.of(leg)
        body, known = self._body(asked, engine, request_id, leg, prefill), engine.weights
        async with AsyncExitStack() as held:
            async with self._calls.open(
                engine,
                asked.call.path,
                leg=f"openai_{leg}",
                content=await asked.call.written(body),
                headers=asked.call.headers,
                reading=mask_refusal_reader(engine, asked.body),
            ) as reply:
                if self._spill is not None and asked.place.run_id is not None:
                    await held.enter_async_context(self._spill.room(reply.size_bytes))
                content = await reply.parts()
            raw, canonical = await offload(
                lambda: read_openai(engine.dialect, read_parts(content, parsed), asked.call.path),
                size_bytes=size_of(content),
            )
            prompt = canonical.get("prompt_token_ids")
            told = [choice.get("token_ids") for choice in canonical["choices"]]
            if not isinstance(prompt, list) or not all(isinstance(each, list) for each in told):
                return _LegAnswer(raw=raw, plan=None, answer=None, engine=engine)
            version = asked.place.policy_version
            choices = canonical["choices"]
            await self._calls.check_weights(engine, choices, policy_version=version, known=known)
            plan = self._plan(asked, prompt, leg)
            answer = await self._answer(plan, engine, request_id, leg, canonical)
            return _LegAnswer(raw=raw, plan=plan, answer=answer, engine=engine)

    async def _answer(
        self, plan: Plan, engine: Engine, request_id: RequestId, leg: Leg, canonical: Body
    ) -> Answer:
        expected = plan.expected(request_id, may_name_files=not engine.spills)
        answer = read_answer(canonical, expected)
        if leg == "prefill" and [len(c.token_ids) > 1 for c in answer.choices] != [False]:
            raise MalformedAnswer("choices", "must be one, of one token, in a prefill leg")
        if self._spill is None or plan.run_id is None or answer.is_by_handle:
            return answer
        return await self._spill.spilled(plan, leg, request_id, answer)

    def _body(
        self,
        asked: _Asked,
        engine: Engine,
        request_id: RequestId,
        leg: Leg,
        prefill: _LegAnswer | None,
    ) -> Body:
        place = asked.place
        ask = Ask(
            request_id=request_id,
            injection=injection_for(engine, place.policy_version, place.run_id),
            prompt_start=0,
        )
        body = engine.dialect.openai_train(asked.body, asked.call.path, ask)
        if leg == "prefill":
            return engine.dialect.openai_prefill(body)
        if leg == "decode":
            assert prefill is not None, "decode follows prefill"
            return engine.dialect.openai_decode(body, prefill.raw)
        return body

    def _plan(self, asked: _Asked, prompt: list[Any], leg: Leg) -> Plan:
        """The plan of a generate request for the same tokens. Raises MalformedAnswer."""
        if not prompt or not set(map(type, prompt)) <= {int}:
            raise MalformedAnswer("prompt_token_ids", "must be token ids, at least one")
        params: Body = {name: asked.body.get(name) for name in _SAMPLING}
        params["max_tokens"] = tokens_max(asked.body)
        call = Call(
            body={"sampling_params": params},
            lazy_prompt=Prompt.of(prompt),
            kind="train",
            request_id=asked.request_id,
            session_id=asked.call.session_id,
            policy_version=asked.place.policy_version,
            headers=asked.call.headers,
        )
        return self._generate.plan_at(asked.place, call)

    def _shown(self, asked: _Asked, leg: _LegAnswer, outcome: Outcome | None) -> Body:
        """The engine's answer as the client gets it, under the id that its turn is kept under."""
        shown = leg.engine.dialect.openai_shown(leg.raw, asked.body)
        shown = {**shown, "id": asked.request_id}
        if shown.get("kv_transfer_params") is not None:
            shown["kv_transfer_params"] = None
        if outcome is None:
            log.warning("openai_train_without_token_ids", session_id=asked.call.session_id)
            return shown
        rows = {choice["index"]: choice for choice in outcome.body["choices"]}
        shown["choices"] = [
            {**choice, "routed_experts": rows[choice["index"]].get("routed_experts")}
            if choice.get("routed_experts") is not None
            else choice
            for choice in shown["choices"]
        ]
        named = ("payload_segments", "payload_model", "routed_experts_start")
        return shown | {name: outcome.body[name] for name in named if name in outcome.body}

    @contextmanager
    def _files_of(self, asked: _Asked, ids: AttemptIds) -> Iterator[None]:
        has_succeeded = False
        try:
            yield
            has_succeeded = True
        finally:
            if not has_succeeded and asked.place.run_id is not None:
                every: tuple[Leg, ...] = ("whole", "prefill", "decode")
                self._janitor.discard(
                    policy_version=asked.place.policy_version,
                    request_ids=[ids.of(leg) for leg in every],
                    reason="losing_attempt",
                )

    def _drop(self, asked: _Asked, *, files: AbstractSet[str], reason: str) -> None:
        self._janitor.discard(policy_version=asked.place.policy_version, files=files, reason=reason)


def tokens_max(body: Body) -> int | None:
    """The limit of a request, by either of its names."""
    limit = body.get("max_completion_tokens")
    return body.get("max_tokens") if limit is None else limit
