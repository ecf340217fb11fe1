"""What the proxy must know about one kind of engine. A new dialect is one file with such a class.

Everything here is pure: bodies go in, bodies come out, nothing is changed in place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """Where an engine shall write the payload file of a request."""

    payload_dir: str
    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One leg of a request: what changes in the client's body."""

    request_id: str
    injection: Injection | None
    prompt_start: int  # leading prompt rows that are not asked for


class Dialect(Protocol):
    """How to ask one kind of engine, and how to read it."""

    name: str
    generate_path: str
    health_path: str
    # True when decode takes prefill's token as its first one instead of sampling it itself.
    decode_continues_prefill: bool

    def whole(self, body: Body, ask: Ask) -> Body:
        """The request as one engine answers it alone."""

    def prefill(self, body: Body, ask: Ask) -> Body:
        """The prefill leg: one token, not streamed, its KV cache kept for a decode engine."""

    def decode(self, body: Body, ask: Ask, prefill_answer: Mapping[str, Any]) -> Body:
        """The decode leg, told where prefill left the KV cache."""

    def openai_prefill(self, body: Body) -> Body:
        """The prefill leg of an OpenAI request."""

    def openai_decode(self, body: Body, prefill_answer: Mapping[str, Any]) -> Body:
        """The decode leg of an OpenAI request."""

    def is_mask_refusal(self, body: Body, status: int, error: object) -> bool:
        """Whether an error means that the engine returns masks and cannot for this request."""
