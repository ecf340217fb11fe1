"""A stream of events on its way to the client: what is passed on, changed or held back. Pure.

Events of an engine go on one by one. The event that carries the rows (the last of a choice) is
rewritten: rows of a pair are merged into it, and rows that do not begin at 0 say where they begin.
When prefill wrote a file and decode's last event names none, that event is held until the stream
ends or names one, so that the rows come once and last.
"""

from collections.abc import Iterable
from typing import Any

from services.inference_proxy.answers import (
    Answer,
    Choice,
    MalformedAnswer,
    check_segments,
    read_layer_ids,
    read_model,
    read_routed_experts,
    read_segments,
    read_token_ids,
)
from services.inference_proxy.assembly import Range, from_one, merge_legs
from services.inference_proxy.events import data_of, is_end, read_event, write_event
from services.inference_proxy.logprob_forms import in_form
from services.inference_proxy.long_json import Parts
from services.inference_proxy.planning import Plan
from services.inference_proxy.recording import TurnRecord
from sideband.engines.forms import RoutingValue
from sideband.ids import RequestId


class StreamRelay:
    """One stream's state. ``take`` raises MalformedAnswer; the stream is then over."""

    def __init__(
        self,
        plan: Plan,
        request_id: RequestId,
        prefill: Answer | None,
        record: TurnRecord | None = None,
    ) -> None:
        self._plan, self._prefill, self._record = plan, prefill, record
        self._expected = plan.expected(request_id)
        self._finished: set[int] = set()
        self._held: list[dict[str, Any]] = []
        self._has_rows: set[int] = set()
        self._has_inline = False
        self.token_ids: dict[int, list[int]] = {}
        self.ranges: dict[int, list[Range]] = {}
        self.files: set[str] = set()
        self.has_failed = False

    @property
    def is_complete(self) -> bool:
        """Every choice has ended, without an error."""
        return len(self._finished) >= self._plan.choices and not self.has_failed

    @property
    def form(self) -> str:
        """handle, inline or none: how the rows travelled."""
        if self.files:
            return "handle"
        return "inline" if self._has_inline else "none"

    @property
    def files_dropped(self) -> set[str]:
        """Files of the prefill leg that the client was not told of."""
        return (self._prefill.files if self._prefill else set()) - self.files

    def take(self, event: Parts) -> list[bytes]:
        """What the client gets for one event of the engine."""
        body = read_event(event)
        return self.take_other(event) if body is None else self.take_body(body)

    def take_other(self, event: Parts) -> list[bytes]:
        """The same for an event that is no JSON object."""
        data = data_of(event)
        is_done = data is not None and is_end(data)
        if data is not None and not is_done:
            raise MalformedAnswer("event", "must be a JSON object")  # never passed on unread
        released = self.end() if is_done else []
        return [*released, *event, b"\n\n"]

    def take_body(self, body: dict[str, Any]) -> list[bytes]:
        """The same for the JSON object of an event, as vLLM sends it."""
        if "error" in body:
            self.has_failed = True
            return [*write_event(body)]
        body = self._rewritten(body)
        if self._held or self._must_hold(body):
            self._held.append(body)
            return self.end() if body.get("payload_segments") is not None else []
        return [*self._written(body)]

    def end(self) -> list[bytes]:
        """The events held back, prefill's rows in the one that ended the choice."""
        held, self._held = self._held, []
        if held and not self._has_rows:
            held[0] = self._with_pair_rows(held[0], held[0]["choices"][0]["index"], None, {})
        return [part for body in held for part in self._written(body)]

    def _written(self, body: dict[str, Any]) -> Parts:
        if self._record is not None:
            self._record.take(body)
        return write_event(body)

    def _must_hold(self, body: dict[str, Any]) -> bool:
        return (
            self._prefill is not None
            and bool(self._prefill.choices[0].segments)
            and bool(self._finished)
            and not self._has_rows
            and bool(body.get("choices"))
        )

    def _rewritten(self, body: dict[str, Any]) -> dict[str, Any]:
        choices = body.get("choices") or []
        if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
            raise MalformedAnswer("choices", "must be a list of objects")
        for choice in choices:
            self._count(choice)
        body = {**body, "request_id": self._plan.call.request_id}
        if self._plan.call.logprob_form != "engine" and choices:
            choices = in_form(choices, self._plan.call.logprob_form)
            body["choices"] = choices
        if body.get("kv_transfer_params") is not None:
            body["kv_transfer_params"] = None
        segments = read_segments(body.get("payload_segments"))
        by_index = {c["index"]: read_routed_experts(c, c["index"]) for c in choices}
        for index in sorted({*segments, *by_index}):
            text, is_last = by_index.get(index), index in self._finished
            is_due = text is not None or index in segments
            if self._prefill is not None and self._prefill.is_inline and is_last:
                is_due = is_due or index not in self._has_rows
            if is_due:
                body = self._with_rows(body, index, text, segments)
        return body

    def _count(self, choice: dict[str, Any]) -> None:
        index = choice.get("index")
        if type(index) is not int or not 0 <= index < self._plan.choices:
            raise MalformedAnswer("choices.index", f"must lie in [0, {self._plan.choices})")
        self.token_ids.setdefault(index, []).extend(read_token_ids(choice, index))
        if choice.get("finish_reason") is not None:
            self._finished.add(index)

    def _with_rows(
        self,
        body: dict[str, Any],
        index: int,
        text: RoutingValue | None,
        segments: dict[int, Any],
    ) -> dict[str, Any]:
        """``body`` with the rows of choice ``index``, which has all its tokens by now."""
        if index in self._has_rows:
            raise MalformedAnswer(f"choices.{index}", "its rows came twice")
        if self._prefill is not None:
            return self._with_pair_rows(body, index, text, segments)
        choice = self._choice(index, text, segments)
        self._has_rows.add(index)
        answer = _answer(body, [choice])
        outcome = from_one(
            answer,
            request_id=self._plan.call.request_id,
            prompt_tokens=self._plan.prompt_tokens,
            prompt_start=self._plan.prompt_start,
            reads_rows=self._plan.is_train,
        )
        self.ranges[index] = outcome.ranges[index]
        self.files |= outcome.files
        self._has_inline |= outcome.has_inline
        starts = outcome.body.get("routed_experts_start")
        if starts:
            body = {**body, "routed_experts_start": starts}
        return {**body, "choices": outcome.body["choices"]} if "choices" in body else body

    def _with_pair_rows(
        self,
        body: dict[str, Any],
        index: int,
        text: RoutingValue | None,
        segments: dict[int, Any],
    ) -> dict[str, Any]:
        assert self._prefill is not None
        choice = self._choice(index, text, segments)
        self._has_rows.add(index)
        merged = merge_legs(
            self._prefill,
            _answer(body, [choice]),
            choice,
            prompt_tokens=self._plan.prompt_tokens,
            prompt_start=self._plan.prompt_start,
        )
        self.ranges[index] = merged.ranges
        self.files |= merged.files
        self._has_inline |= merged.text is not None
        choices = [
            {**raw, "routed_experts": merged.text} if raw["index"] == index else raw
            for raw in body.get("choices") or []
        ]
        if merged.text is not None and not any(raw["index"] == index for raw in choices):
            raise MalformedAnswer(f"choices.{index}", "its rows came without it")
        return {**body, "choices": choices, **merged.members}

    def _choice(self, index: int, text: RoutingValue | None, segments: dict[int, Any]) -> Choice:
        token_ids = self.token_ids.get(index, [])
        choice = Choice(
            index=index,
            token_ids=token_ids,
            routed_experts=text,
            segments=segments.get(index, ()),
        )
        check_segments(choice.segments, len(token_ids), self._expected)
        return choice


def _answer(body: dict[str, Any], choices: Iterable[Choice]) -> Answer:
    return Answer(
        body=body,
        choices=tuple(choices),
        model=read_model(body.get("payload_model")),
        layer_ids=read_layer_ids(body.get("routed_layer_ids")),
        is_by_handle=body.get("payload_segments") is not None,
    )
