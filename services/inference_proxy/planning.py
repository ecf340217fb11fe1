"""What a request will ask of the engines, decided once and kept over its attempts."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from services.inference_proxy.answers import Expected
from services.inference_proxy.dialects.base import Ask, Injection
from services.inference_proxy.engine import Engine
from services.inference_proxy.logprob_forms import LogprobForm
from services.inference_proxy.prompts import Prompt
from services.inference_proxy.refusals import Kind
from services.inference_proxy.request_ids import AttemptIds, Leg, upstream_base
from services.inference_proxy.sessions import Session, Tokens
from sideband.ids import RequestId, RunId, SessionId


class Call(Struct, frozen=True, kw_only=True):
    """A client's request, checked. ``body`` is its JSON and is never changed in place."""

    body: dict[str, Any]
    lazy_prompt: Prompt  # what ``body`` says under token_ids, where it may be raw JSON
    kind: Kind
    request_id: RequestId
    session_id: SessionId | None
    policy_version: int | None  # what the client asks for
    headers: Sequence[tuple[str, str]]
    logprob_form: LogprobForm = "engine"

    @property
    def prompt(self) -> Tokens:
        """The prompt's values, which cost something the first time."""
        return self.lazy_prompt.tokens

    @property
    def is_stream(self) -> bool:
        """Whether the client wants server-sent events."""
        return bool(self.body.get("stream"))


class Plan(Struct, frozen=True, kw_only=True):
    """The same for every attempt: version, session, first row wanted, where files go."""

    call: Call
    policy_version: int
    session: Session | None
    prompt_start: int
    run_id: RunId | None  # set when files shall be written
    base_id: str

    @property
    def prompt(self) -> Tokens:
        """The prompt's values."""
        return self.call.prompt

    @property
    def prompt_tokens(self) -> int:
        """P."""
        return len(self.call.lazy_prompt)

    @property
    def is_train(self) -> bool:
        """Whether somebody will train on it."""
        return self.call.kind == "train"

    @property
    def choices(self) -> int:
        """n."""
        return self.call.body["sampling_params"].get("n") or 1

    @property
    def wants_one_token(self) -> bool:
        """Then a prefill leg is the whole answer."""
        return bool(self.call.body["sampling_params"].get("max_tokens") == 1)

    def expected(self, request_id: RequestId, *, may_name_files: bool = True) -> Expected:
        """What the answer to an upstream request must agree with."""
        return Expected(
            prompt_tokens=self.prompt_tokens,
            policy_version=self.policy_version,
            run_id=self.run_id if may_name_files else None,
            request_id=request_id,
            choices=self.choices,
        )

    def ids(self, attempt: int) -> AttemptIds:
        """Fresh upstream ids of one attempt, from 1 on."""
        return AttemptIds(self.base_id, attempt)

    def ask(self, engine: Engine, ids: AttemptIds, leg: Leg) -> Ask:
        """How one engine is asked for one leg. Decode is never asked for prompt rows: a real
        engine can die when asked for rows of tokens that it loaded from outside.
        """
        return Ask(
            request_id=ids.of(leg),
            injection=injection_for(engine, self.policy_version, self.run_id),
            prompt_start=self.prompt_tokens if leg == "decode" else self.prompt_start,
            wants_rows=self.call.kind != "eval",
        )


class Place(Struct, frozen=True, kw_only=True):
    """Where a train request belongs, known before its prompt is."""

    session: Session | None
    policy_version: int
    run_id: RunId | None  # set when files shall be written


def injection_for(engine: Engine, policy_version: int, run_id: RunId | None) -> Injection | None:
    """Where an engine shall write; None for one that writes nothing."""
    if run_id is None or engine.spills:
        return None
    assert engine.payload_mount is not None, "a payload root gives every engine a mount"
    folder = f"{engine.payload_mount.rstrip('/')}/v{policy_version}"
    return Injection(payload_dir=folder, run_id=run_id)


def make_plan(
    call: Call,
    *,
    session: Session | None,
    policy_version: int,
    run_id: RunId | None,
) -> Plan:
    """The plan of a request. A session's own start replaces the client's: the proxy knows which
    rows were delivered.
    """
    if session is not None:
        start = session.prompt_start(call.prompt)
    else:
        start = call.body["sampling_params"].get("routed_experts_prompt_start") or 0
    return Plan(
        call=call,
        policy_version=policy_version,
        session=session,
        prompt_start=start,
        run_id=run_id,
        base_id=upstream_base(call.request_id),
    )
