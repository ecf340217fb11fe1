"""What the proxy must know about one kind of engine. A new dialect is one file: a module with a
function ``make(model)`` that gives such an object, named by the ``dialect`` setting of an engine.

Inside the proxy a request is a body of the generate route, and an answer is what vLLM 0.32 answers
on it. A dialect says how its engine is asked for that, and makes that of what its engine answers.
Everything here is pure: bodies go in, bodies come out, nothing is changed in place. Of a
large answer ``logprobs`` and kept sets are ``msgspec.Raw``, JSON that nobody has read yet, and long
strings are ``LongText``, the parts in which they came.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from msgspec import Struct

Body = dict[str, Any]


class Injection(Struct, frozen=True, kw_only=True):
    """Where an engine shall write the payload file of a request."""

    payload_dir: str
    run_id: str


class Ask(Struct, frozen=True, kw_only=True):
    """One leg of a request: what changes in the client's body."""

    request_id: str
    injection: Injection | None
    prompt_start: int  # leading prompt rows that are not asked for
    wants_rows: bool = True  # an engine that is asked request by request need not send others


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """New weights for every engine, from a folder that they all see or by their own transfer."""

    policy_version: int
    running: Literal["wait", "keep", "abort"]  # what becomes of requests that run
    weights_path: str | None = None
    update_info: Mapping[str, Any] | None = None
    force: bool = False  # older weights, on purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall:
    """One POST. ``refusal``: an answer that holds these bytes is none, whatever its status."""

    path: str
    body: Mapping[str, Any] | None = None
    refusal: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSteps:
    """What to call for an update, step by step; ``abandon`` ends what runs on a failed engine."""

    pause: tuple[EngineCall, ...]
    update: tuple[EngineCall, ...]
    resume: tuple[EngineCall, ...]
    abandon: tuple[EngineCall, ...]


class UntranslatableParameter(Exception):
    """A request asks for something that this kind of engine does not have."""

    def __init__(self, field: str, rule: str) -> None:
        self.field, self.rule = field, rule
        super().__init__(f"{field}: {rule}")


class UnreadableAnswer(Exception):
    """An engine's answer that is none of its dialect; ``part`` says where."""

    def __init__(self, part: str, rule: str) -> None:
        self.part, self.rule = part, rule
        super().__init__(f"{part}: {rule}")


class EventReader(Protocol):
    """The events of one stream, in order."""

    def read(self, event: Body) -> Body:
        """The event as vLLM sends it. Raises UnreadableAnswer, InvalidInput."""


class Dialect(Protocol):
    """How to ask one kind of engine, and how to read it."""

    name: str
    generate_path: str
    health_path: str
    # Where the engine says what it is; None for a kind that never does.
    identity_path: str | None
    # True when decode takes prefill's token as its first one instead of sampling it itself.
    decode_continues_prefill: bool

    def whole(self, body: Body, ask: Ask) -> Body:
        """The request as one engine answers it alone. Raises UntranslatableParameter."""

    def prefill(self, body: Body, ask: Ask) -> Body:
        """The prefill leg: one token, not streamed, its KV cache kept for a decode engine."""

    def decode(self, body: Body, ask: Ask, prefill_answer: Mapping[str, Any]) -> Body:
        """The decode leg, told where prefill left the KV cache."""

    def read(self, answer: object) -> object:
        """An answer to any of them as vLLM gives it; ``answer`` is parsed JSON of any kind.

        A choice's ``routed_experts`` may be an array. Raises UnreadableAnswer, InvalidInput.
        """

    def events(self) -> EventReader:
        """A reader for one stream."""

    def openai_train(self, body: Body, path: str, ask: Ask) -> Body:
        """An OpenAI request whose answer can be trained on: with token ids, log probabilities and
        rows. Raises UntranslatableParameter.
        """

    def openai_prefill(self, body: Body) -> Body:
        """The prefill leg of an OpenAI request."""

    def openai_decode(self, body: Body, prefill_answer: Mapping[str, Any]) -> Body:
        """The decode leg of an OpenAI request, never asked for rows of the prompt."""

    def read_openai(self, answer: object, path: str) -> object:
        """An answer to ``openai_train`` as the generate route gives it, with ``prompt_token_ids``.

        Without token ids these are None. Raises UnreadableAnswer, InvalidInput.
        """

    def openai_shown(self, answer: Body, asked: Body) -> Body:
        """The answer to ``openai_train`` without what the client did not ask for in ``asked``."""

    def is_mask_refusal(self, body: Body, status: int, error: object) -> bool:
        """Whether an error means that the engine returns masks and cannot for this request."""

    def weight_steps(self, update: WeightUpdate) -> WeightSteps:
        """How to bring new weights to it. Raises UntranslatableParameter when it cannot."""
