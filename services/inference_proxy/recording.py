"""A train turn as a trainer needs it, recorded from the answer that went to the client: pure.

Clients drop answer fields that they do not know. What they drop is in the record, choice by choice:
tokens, log probabilities, and the rows in the form in which they were answered.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from msgspec import Struct

from services.inference_proxy.long_json import Parts, read_long, size_of
from services.inference_proxy.prompts import Prompt
from services.inference_proxy.raw import parsed_answer
from services.inference_proxy.sessions import Tokens
from services.inference_proxy.slices import opened
from services.inference_proxy.turn_parts import packed_turn
from services.kit.turns import TurnWire
from sideband.engines.forms import RoutingText
from sideband.ids import RequestId
from sideband.model import ModelShape
from sideband.segments import PayloadSegment


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Segments(msgspec.Struct):
    segments: list[PayloadSegment]


_DIGITS_MAX: Final = 10  # of a number below 2**31; Python reads no number of thousands
_LOGPROBS: Final = msgspec.json.Decoder(_Logprobs)


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_aligned: bool = True  # each token has a log probability, and a kept set where any came
    masks: list[list[int]] = field(default_factory=list)
    has_masks: bool = False
    kept_count: int = 0
    scores: list[list[float | None]] | None = None
    versions: Sequence[Mapping[str, Any]] | None = None
    routed_experts: RoutingText | None = None
    rows_start: int = 0
    segments: list[PayloadSegment] | None = None


class TurnRecord:
    """Takes a whole answer, or the events of a stream one by one."""

    def __init__(self) -> None:
        self._choices: dict[int, _Choice] = {}
        self._model: ModelShape | None = None
        self._layer_ids: list[int] | None = None

    def take(self, body: Mapping[str, Any]) -> None:
        """An answer, or a part of one, as the client gets it: checked before."""
        for raw in body.get("choices") or ():
            choice = self._choices.setdefault(raw["index"], _Choice())
            token_ids, logprobs = raw.get("token_ids") or (), logprobs_of(raw.get("logprobs"))
            choice.token_ids += token_ids
            choice.logprobs += logprobs
            # Part by part: two parts that make up for each other would shift all between them.
            choice.is_aligned &= len(logprobs) == len(token_ids)
            if raw.get("sampling_mask") is not None:
                masks = opened(raw["sampling_mask"])
                choice.is_aligned &= len(masks) == len(token_ids)
                choice.masks += masks
                choice.kept_count += sum(map(len, masks))
                choice.has_masks = True
            if raw.get("sampling_mask_logprobs") is not None:
                choice.scores = [*(choice.scores or ()), *opened(raw["sampling_mask_logprobs"])]
            choice.versions = raw.get("weight_versions") or choice.versions
            choice.routed_experts = raw.get("routed_experts") or choice.routed_experts
        for index, start in (body.get("routed_experts_start") or {}).items():
            self._choices.setdefault(int(index), _Choice()).rows_start = start
        for index, segments in (body.get("payload_segments") or {}).items():
            read = msgspec.convert({"segments": segments}, _Segments).segments
            self._choices.setdefault(int(index), _Choice()).segments = read
        if body.get("payload_model") is not None:
            self._model = msgspec.convert(body["payload_model"], ModelShape)
        self._layer_ids = body.get("routed_layer_ids") or self._layer_ids

    @property
    def values(self) -> int:
        """About how many values ``encoded`` has to write: tokens, and ids of kept sets."""
        choices = self._choices.values()
        return sum(2 * len(choice.token_ids) + choice.kept_count for choice in choices)

    def encoded(
        self,
        request_id: RequestId,
        prompt: Tokens,
        params: Mapping[str, Any],
        *,
        choice_count: int | None = None,
    ) -> dict[int, Parts | None]:
        """Each choice as the msgpack of a ``TurnWire``; None for one without log probabilities, or
        of which a part had other numbers of them, or of kept sets, than of tokens.

        ``params`` are the client's sampling parameters: what it leaves out counts as vLLM's
        defaults (temperature 1, top-p 1, no top-k). The answer had ``choice_count`` choices, by
        default those that were taken.
        """
        prompt_bytes = np.asarray(prompt, "<i4").tobytes()
        top_k = params.get("top_k")
        found: dict[int, Parts | None] = {}
        for index, choice in self._choices.items():
            if not choice.is_aligned:
                found[index] = None
                continue
            has_inline = choice.routed_experts is not None
            turn = TurnWire(
                request_id=request_id,
                prompt_token_ids=prompt_bytes,
                completion_token_ids=np.asarray(choice.token_ids, "<i4").tobytes(),
                logprobs=_float32(choice.logprobs),
                temperature=_number(params.get("temperature")),
                top_p=_number(params.get("top_p")),
                top_k=top_k if top_k is not None and top_k > 0 else None,
                choice_count=choice_count or len(self._choices),
                payload_segments=choice.segments,
                payload_model=self._model,
                routed_layer_ids=self._layer_ids if has_inline else None,
                routed_experts_prompt_start=choice.rows_start if has_inline else 0,
                sampling_mask=choice.masks if choice.has_masks else None,
                sampling_mask_logprobs=choice.scores,
                weight_versions=versions_of(choice.versions, len(choice.token_ids)),
            )
            found[index] = packed_turn(turn, choice.routed_experts)
        return found


class TurnChoice(Protocol):
    """One choice of an answered request, as it is kept."""

    @property
    def size_bytes(self) -> int:
        """What keeping it keeps."""

    def encoded(self) -> Parts | None:
        """The msgpack of a ``TurnWire``; None without log probabilities. Slow for large ones."""


@dataclass(frozen=True, slots=True)
class EncodedChoice:
    """A choice whose turn was encoded already."""

    turn: Parts | None

    @property
    def size_bytes(self) -> int:
        """Of the turn."""
        return size_of(self.turn or ())

    def encoded(self) -> Parts | None:
        """The turn."""
        return self.turn


class UnreadChoice(Struct, frozen=True, kw_only=True, gc=False):
    """A choice of a whole answer, kept as the client got it: most are never asked for."""

    index: int
    choice_count: int
    answer: Parts  # shared by the choices, as is the prompt
    request_id: RequestId
    prompt: Prompt
    params: Mapping[str, Any]

    @property
    def size_bytes(self) -> int:
        """Its share."""
        return (size_of(self.answer) + self.prompt.size_bytes) // self.choice_count

    def encoded(self) -> Parts | None:
        """The turn, read from the answer."""
        # Whatever it has beside: it was written from answers that were bounded, perhaps from two.
        body: Any = read_long(self.answer, parsed_answer, beside_bytes_max=sys.maxsize)
        record = TurnRecord()
        own = [choice for choice in body["choices"] if choice["index"] == self.index]
        record.take({**body, "choices": own})
        turns = record.encoded(
            self.request_id, self.prompt.tokens, self.params, choice_count=self.choice_count
        )
        return turns[self.index]


def logprobs_of(logprobs: object) -> list[float]:
    """The sampled tokens' log probabilities, in either form; those that are none are left out."""
    if logprobs is None:
        return []
    if isinstance(logprobs, msgspec.Raw):
        try:
            return [entry.logprob for entry in _LOGPROBS.decode(logprobs).content]
        except msgspec.MsgspecError:
            return []
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list):
        return []
    values = [entry.get("logprob") for entry in content if isinstance(entry, dict)]
    return [value for value in values if isinstance(value, (int, float))]


def versions_of(spans: Sequence[Mapping[str, Any]] | None, tokens: int) -> bytes | None:
    """The policy version of each token, where ``weight_versions`` names all of them by numbers."""
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        return None
    versions: list[int] = []
    for span in spans:
        version, start, end = (span.get(name) for name in ("version", "start", "end"))
        is_next = type(start) is int and type(end) is int and start == len(versions) <= end
        name = str(version)
        if not is_next or end > tokens or not name.isdecimal() or len(name) > _DIGITS_MAX:
            return None
        versions += [int(name)] * (end - start)
    is_whole = len(versions) == tokens and all(version < 1 << 31 for version in versions)
    return np.asarray(versions, "<i4").tobytes() if is_whole else None


def _float32(values: list[float]) -> bytes:
    with np.errstate(over="ignore"):  # becomes infinite, and is refused where it is handed in
        return np.asarray(values, "<f4").tobytes()


def _number(value: float | None) -> float:
    return 1.0 if value is None else float(value)
