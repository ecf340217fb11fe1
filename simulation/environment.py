"""The environment: runs planned rollouts against the proxy, several at a time.

With an orchestrator each rollout is leased first and delivered at its end; without one it is only
recorded, and its policy version is 0.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import numpy as np
import orjson

from simulation.bodies import Json, encode, rollout_body, turn_body
from simulation.plan import RolloutPlan, TurnPlan, next_prompt

ABORT_AFTER_S: Final = 0.02  # within the first turn of a rollout that is given up
RETRY_WAIT_S: Final = 0.1
RETRIES_MAX: Final = 600  # a paused orchestrator, or a proxy whose engines restart


class RequestRefused(Exception):
    """A service answered with an error that asking again does not mend."""

    def __init__(self, what: str, answer: httpx.Response) -> None:
        super().__init__(f"{what}: {answer.status_code} {answer.text[:500]}")


@dataclass(slots=True, kw_only=True)
class Traffic:
    """What the environment sent and got."""

    turns: int = 0
    evaluations: int = 0
    evaluations_wrong: int = 0  # not inline, or without rows
    answer_bytes: int = 0
    rollout_bytes: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Environment:
    """Runs rollouts. ``bodies`` holds each finished one as it is delivered."""

    client: httpx.AsyncClient
    proxy_url: str
    orchestrator_url: str | None
    vocab_size: int
    concurrency: int = 10
    evaluates: bool = False  # one eval request per group beside the training ones
    headers: dict[str, str] = field(default_factory=dict)  # credentials of the services
    is_stubborn: bool = False  # asks again when a service dies, until it is back
    on_rollout: Callable[[], None] = lambda: None
    traffic: Traffic = field(default_factory=Traffic)
    bodies: dict[str, Json] = field(default_factory=dict)

    async def run(self, plans: Sequence[RolloutPlan]) -> None:
        """All rollouts, started in order. Raises RequestRefused and httpx errors."""
        slots = asyncio.Semaphore(self.concurrency)

        async def one(plan: RolloutPlan) -> None:
            async with slots:
                if self.evaluates and plan.rollout_id.endswith(".r0"):
                    await self._evaluate(plan)
                await self._rollout(plan)
                self.on_rollout()

        try:
            async with asyncio.TaskGroup() as group:
                for plan in plans:
                    group.create_task(one(plan))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # one cause is enough to stop

    async def _rollout(self, plan: RolloutPlan) -> None:
        lease = await self._lease(plan)
        if lease.get("state", "open") != "open":
            return  # an environment that died had ended it
        if self.is_stubborn:
            # Not its files: what died may have delivered them a moment ago. The sweep has the rest.
            await self._forget_session(plan, deletes_files=False)
        turns: list[Json] = []
        sequence = plan.prompt_ids
        for number, turn in enumerate(plan.turns):
            prompt = next_prompt(sequence, turn, vocab_size=self.vocab_size)
            request_id = f"{plan.rollout_id}.t{number}"
            work = self._generate(plan, turn, request_id, prompt.tolist(), lease)
            if plan.ending == "aborted" and number == len(plan.turns) - 1:
                await self._abort(work, plan, lease)
                return
            content = await work
            self.traffic.turns += 1
            self.traffic.answer_bytes += len(content)
            answer = joined_events(content) if turn.is_streamed else orjson.loads(content)
            turns.append(turn_body(request_id, prompt.tolist(), plan, answer))
            completion = np.array(turns[-1]["completion_token_ids"], np.int32)
            sequence = np.concatenate([prompt, completion])
        await self._deliver(plan, rollout_body(plan, turns))

    async def _lease(self, plan: RolloutPlan) -> Json:
        if self.orchestrator_url is None:
            return {"policy_version": 0}
        body = {
            "rollout_id": plan.rollout_id,
            "group_id": plan.group_id,
            "group_size": plan.group_size,
            "env_name": plan.env_name,
            "session_id": plan.rollout_id,
        }
        answer = await self._ask("POST", f"{self.orchestrator_url}/v1/leases", json=body)
        lease: Json = answer.json()
        return lease

    async def _generate(
        self,
        plan: RolloutPlan,
        turn: TurnPlan,
        request_id: str,
        prompt_ids: list[int],
        lease: Json,
    ) -> bytes:
        body = self._body(plan, turn, request_id, prompt_ids)
        headers = {
            **self.headers,
            "X-Sideband-Kind": "train",
            "X-Sideband-Session": plan.rollout_id,
            "X-Sideband-Policy-Version": str(lease["policy_version"]),
        }
        url = f"{self.proxy_url}/inference/v1/generate"
        answer = await self._ask("POST", url, json=body, headers=headers)
        return answer.content

    @staticmethod
    def _body(plan: RolloutPlan, turn: TurnPlan, request_id: str, prompt_ids: list[int]) -> Json:
        return {
            "request_id": request_id,
            "token_ids": prompt_ids,
            "sampling_params": {
                "max_tokens": turn.tokens_max,
                "temperature": plan.temperature,
                "top_k": plan.top_k,
                "top_p": 1.0,
                "seed": plan.sampling_seed,
                "logprobs": 0,
                **({"extra_args": {"sampling_mask_logprobs": True}} if plan.asks_scores else {}),
            },
            "stream": turn.is_streamed,
        }

    async def _evaluate(self, plan: RolloutPlan) -> None:
        """An eval request stays inline, also in a run whose training goes by handle."""
        body = self._body(plan, plan.turns[0], f"{plan.rollout_id}.eval", plan.prompt_ids.tolist())
        headers = {**self.headers, "X-Sideband-Kind": "eval"}
        url = f"{self.proxy_url}/inference/v1/generate"
        content = (await self._ask("POST", url, json=body, headers=headers)).content
        is_streamed = plan.turns[0].is_streamed
        answer = joined_events(content) if is_streamed else orjson.loads(content)
        choice = answer["choices"][0]
        is_right = (
            "payload_segments" not in answer
            and choice.get("routed_experts") is not None
            and choice.get("sampling_mask") is not None
        )
        self.traffic.evaluations += 1
        self.traffic.evaluations_wrong += not is_right

    async def _abort(
        self, work: Coroutine[Any, Any, bytes], plan: RolloutPlan, lease: Json
    ) -> None:
        """Go away in the middle of a request, then give the rollout up."""
        task = asyncio.ensure_future(work)
        await asyncio.wait({task}, timeout=ABORT_AFTER_S)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if self.orchestrator_url is not None:
            url = f"{self.orchestrator_url}/v1/leases/{lease['lease_id']}"
            await self._ask("DELETE", url)
        else:
            await self._forget_session(plan)

    async def _forget_session(self, plan: RolloutPlan, *, deletes_files: bool = True) -> None:
        """What an earlier attempt at the rollout was given: its rows are to be asked for again."""
        query = "?delete_files=true" if deletes_files else ""
        url = f"{self.proxy_url}/v1/sessions/{plan.rollout_id}{query}"
        await self._ask("DELETE", url, fine={404})

    async def _deliver(self, plan: RolloutPlan, body: Json) -> None:
        self.bodies[plan.rollout_id] = body
        content, kind = encode(body, is_binary=plan.is_binary)
        self.traffic.rollout_bytes += len(content)
        if self.orchestrator_url is not None:
            url = f"{self.orchestrator_url}/v1/rollouts"
            headers = {**self.headers, "content-type": kind}
            fine = {409} if self.is_stubborn else frozenset[int]()
            answer = await self._ask("POST", url, fine=fine, content=content, headers=headers)
            # What an environment sent as it died may have arrived after all; then that one counts.
            if answer.status_code == 409 and answer.json()["code"] != "rollout_conflict":
                raise RequestRefused(f"POST {url}", answer)

    async def _ask(
        self, method: str, url: str, *, fine: AbstractSet[int] = frozenset(), **options: Any
    ) -> httpx.Response:
        """One call, again while the service says that it will be able to later."""
        options.setdefault("headers", self.headers)
        later = {429, 502, 503, 504} if self.is_stubborn else {429, 503}
        for attempt in range(RETRIES_MAX):
            try:
                answer = await self.client.request(method, url, **options)
            except httpx.TransportError:
                if not self.is_stubborn or attempt == RETRIES_MAX - 1:
                    raise
            else:
                if answer.status_code not in later and not is_cut_short(answer):
                    break
            await asyncio.sleep(RETRY_WAIT_S)
        if not answer.is_success and answer.status_code not in fine:
            raise RequestRefused(f"{method} {url}", answer)
        return answer


def is_cut_short(answer: httpx.Response) -> bool:
    """Whether a stream ended before its end: its engine died."""
    is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
    return is_stream and not answer.content.rstrip().endswith(b"[DONE]")


def joined_events(content: bytes) -> Json:
    """A streamed answer as the whole one that it is the parts of."""
    whole: Json = {"choices": [{"token_ids": [], "logprobs": {"content": []}}]}
    choice = whole["choices"][0]
    masks: list[list[int]] = []
    scores: list[list[float | None]] = []
    for line in content.splitlines():
        if not line.startswith(b"data: {"):
            continue
        event: Json = orjson.loads(line[6:])
        whole |= {name: value for name, value in event.items() if name != "choices"}
        for part in event["choices"]:
            choice["token_ids"] += part["token_ids"]
            choice["logprobs"]["content"] += part["logprobs"]["content"]
            masks += part.get("sampling_mask") or []
            scores += part.get("sampling_mask_logprobs") or []
            ends = ("finish_reason", "routed_experts", "weight_versions")
            choice |= {name: part[name] for name in ends if part.get(name) is not None}
    choice["sampling_mask"] = masks or None
    choice["sampling_mask_logprobs"] = scores or None
    return whole


@contextlib.asynccontextmanager
async def http_client() -> AsyncIterator[httpx.AsyncClient]:
    """A client with deadlines and without the environment's proxies."""
    limits = httpx.Limits(max_connections=256, keepalive_expiry=2.0)
    async with httpx.AsyncClient(timeout=120.0, limits=limits, trust_env=False) as client:
        yield client
