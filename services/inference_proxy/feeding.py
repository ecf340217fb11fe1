"""From an engine's events to the relay's: read by the dialect, their rows in a file if need be.

The rows of a stream come in parts (masks with their tokens, routing with a choice's last event).
When the proxy writes the file, they are taken out and kept until every choice has ended; the event
that ends the last one then names the file, as it would if the engine had written it.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from services.inference_proxy.answers import (
    MalformedAnswer,
    read_layer_ids,
    read_process,
    read_routed_experts,
    read_token_ids,
)
from services.inference_proxy.attempts import Opened
from services.inference_proxy.events import read_event
from services.inference_proxy.long_json import Parts, TooMuchBeside, size_of
from services.inference_proxy.offload import offload
from services.inference_proxy.planning import Plan
from services.inference_proxy.reading import read_part
from services.inference_proxy.relay import StreamRelay
from services.inference_proxy.sampled import check_weights
from services.inference_proxy.spill import InlineChoice, Spill, without_rows
from sideband.engines.forms import RoutingValue
from sideband.engines.inline import decode_mask_logprobs, decode_sampling_mask
from sideband.engines.vllm.processes import ENGINE_PROCESS
from sideband.errors import InvalidInput
from sideband.masks.rows import MaskRows, ScoreRows

Json = dict[str, Any]


class EventFeed:
    """The events of one stream, none sampled by weights older than version ``at_least``.

    ``confirm`` is called before the event that completes it, if none has shown the weights.
    """

    def __init__(
        self,
        relay: StreamRelay,
        opened: Opened,
        plan: Plan,
        spill: Spill | None,
        *,
        at_least: int,
        confirm: Callable[[], Awaitable[None]],
    ) -> None:
        self._relay = relay
        self._known, self._confirm, self._must_confirm = opened.known, confirm, plan.is_train
        self._engine, self._at_least = opened.engine, at_least
        self._reader = opened.engine.dialect.events()
        self._spill: StreamSpill | None = None
        if spill is not None and opened.engine.spills and plan.run_id is not None:
            self._spill = StreamSpill(spill, opened, plan)

    async def parts(self, event: Parts) -> list[bytes]:
        """What the client gets for one event.

        Raises MalformedAnswer, UpstreamError, SpillFailed, RootNotReady.
        """
        parts = await self._parts(event)
        if self._must_confirm and self._relay.is_complete:
            self._must_confirm = False
            await self._confirm()
        return parts

    async def _parts(self, event: Parts) -> list[bytes]:
        if self._spill is None:
            return await offload(lambda: self._taken(event), size_bytes=size_of(event))
        body = await offload(lambda: self._read(event), size_bytes=size_of(event))
        if body is None:
            return self._relay.take_other(event)
        body = await self._spill.without_rows(body, size_bytes=size_of(event))
        return self._relay.take_body(body)

    def _taken(self, event: Parts) -> list[bytes]:
        body = self._read(event)
        return self._relay.take_other(event) if body is None else self._relay.take_body(body)

    def _read(self, event: Parts) -> Json | None:
        try:
            body = read_event(event)
        except TooMuchBeside as exc:
            raise MalformedAnswer("event", str(exc)) from exc
        if body is None or "error" in body:
            return body
        body = read_part(self._reader, body)
        process = read_process(body)
        if check_weights(
            self._engine,
            body.get("choices"),
            at_least=self._at_least,
            known=self._known,
            process=process,
        ):
            self._must_confirm = False
        if process is None:
            return body
        return {name: value for name, value in body.items() if name != ENGINE_PROCESS}


class StreamSpill:
    """Takes the rows out of a stream's events."""

    def __init__(self, spill: Spill, opened: Opened, plan: Plan) -> None:
        self._spill, self._opened, self._plan = spill, opened, plan
        self._choices = {index: _Gathered() for index in range(plan.choices)}
        self._layer_ids: tuple[int, ...] | None = None

    async def without_rows(self, body: Json, *, size_bytes: int) -> Json:
        """The event by handle: the one that ends the last choice names the file."""
        choices = body.get("choices")
        if body.get("payload_segments") is not None:
            raise MalformedAnswer("payload_segments", "came without a payload_dir")
        if not isinstance(choices, list) or not choices:
            return body
        had_ended = self._has_ended
        await offload(self._gathering(body), size_bytes=size_bytes)
        body = {**body, "choices": [without_rows(choice) for choice in choices]}
        body.pop("routed_layer_ids", None)
        if had_ended or not self._has_ended:
            return body
        async with self._spill.room(size_bytes):
            report = await self._spill.write(
                self._plan,
                self._opened.leg,
                self._opened.request_id,
                [gathered.inline(index) for index, gathered in self._choices.items()],
                layer_ids=self._layer_ids,
            )
        self._choices.clear()
        return {**body, **self._spill.members(report)}

    @property
    def _has_ended(self) -> bool:
        return all(gathered.has_ended for gathered in self._choices.values())

    def _gathering(self, body: Json) -> Callable[[], None]:
        def gather() -> None:
            layer_ids = read_layer_ids(body.get("routed_layer_ids"))
            self._layer_ids = layer_ids or self._layer_ids
            for choice in body["choices"]:
                index = choice.get("index") if isinstance(choice, dict) else None
                if index not in self._choices:
                    rule = f"must be objects with an index in [0, {self._plan.choices})"
                    raise MalformedAnswer("choices", rule)
                self._choices[index].take(choice, index, vocab_size=self._spill.model.vocab_size)

        return gather


class _Gathered:
    """The rows of one choice so far."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._masks: list[MaskRows] = []
        self._scores: list[ScoreRows] = []
        self._routed_experts: RoutingValue | None = None
        self.has_ended = False

    def take(self, choice: Json, index: int, *, vocab_size: int) -> None:
        if self.has_ended:
            raise MalformedAnswer(f"choices.{index}", "goes on after its end")
        token_ids = read_token_ids(choice, index)
        self._token_ids += token_ids
        try:
            masks = decode_sampling_mask(choice.get("sampling_mask"), vocab_size=vocab_size)
        except InvalidInput as exc:
            raise MalformedAnswer(f"choices.{index}.sampling_mask", str(exc)) from exc
        if masks is not None:
            if len(masks) != len(token_ids):  # another part could make up for it, all shifted
                rule = f"has {len(masks)} rows for {len(token_ids)} tokens"
                raise MalformedAnswer(f"choices.{index}.sampling_mask", rule)
            self._masks.append(masks)
        self._take_scores(choice, index, masks)
        routed = read_routed_experts(choice, index)
        if routed is not None and self._routed_experts is not None:
            raise MalformedAnswer(f"choices.{index}", "its rows came twice")
        self._routed_experts = self._routed_experts if routed is None else routed
        self.has_ended = choice.get("finish_reason") is not None

    def _take_scores(self, choice: Json, index: int, masks: MaskRows | None) -> None:
        try:
            logprobs_M = decode_mask_logprobs(choice.get("sampling_mask_logprobs"), masks)
        except InvalidInput as exc:
            raise MalformedAnswer(f"choices.{index}.sampling_mask_logprobs", str(exc)) from exc
        if logprobs_M is not None and masks is not None:
            self._scores.append(ScoreRows(masks.starts_N, logprobs_M))

    def inline(self, index: int) -> InlineChoice:
        return InlineChoice(
            index=index,
            token_ids=self._token_ids,
            routed_experts=self._routed_experts,
            sampling_mask=MaskRows.concatenate(self._masks) if self._masks else None,
            sampling_mask_logprobs=ScoreRows.concatenate(self._scores) if self._scores else None,
        )
