"""What an engine says of itself (``GET /inference/v1/sideband``), and whether that fits: pure.

::

    Misfit              the engine does not serve; ``code`` is stable
    ├── model_mismatch      another model than the proxy's configuration, or than its siblings
    ├── run_mismatch        its payload root belongs to another run, or to none
    ├── by_handle_refused   rows are expected in files that it does not write
    └── identity_unreadable an answer that is none of ours

An engine without the route (stock vLLM, SGLang) has no identity and is taken as it is. Beside it
stands by what the engine's process is told from another one (``Said.process``).
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import msgspec

from services.inference_proxy.limits import POLICY_VERSION_MAX
from sideband.errors import InvalidInput
from sideband.model import ModelShape

ProcessName = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
MisfitCode = Literal["model_mismatch", "run_mismatch", "by_handle_refused", "identity_unreadable"]


class EngineIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The plugin's answer; members that a later plugin adds are ignored.

    ``policy_version`` is the number that the engine's weights are named by, null when they have
    kept the name of their start. ``payload_model`` is null when the plugin does not know the model.
    ``engine_process`` is another one after each start of the engine, and in all its answers.
    """

    is_by_handle: bool
    why_not: str | None = None
    run_id: str | None = None
    payload_model: ModelShape | None = None
    policy_version: int | None = None
    engine_process: ProcessName | None = None
    findings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What an engine must fit. None: nothing is known to compare with."""

    is_by_handle: bool  # it shall write the rows of train requests itself
    run_id: str | None
    model: ModelShape | None
    model_of: str  # who says so, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """Why an engine does not serve although it is healthy."""

    code: MisfitCode
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


def read_identity(content: bytes) -> EngineIdentity | Misfit:
    """The body of the route's answer."""
    try:
        identity = msgspec.json.decode(content, type=EngineIdentity)
        if identity.payload_model is not None:
            identity.payload_model.check()
    except (msgspec.MsgspecError, UnicodeDecodeError, InvalidInput) as exc:
        return Misfit(code="identity_unreadable", message=str(exc)[:300])
    version = identity.policy_version
    if version is not None and not 0 <= version <= POLICY_VERSION_MAX:
        message = f"policy_version is {version}: must lie in [0, {POLICY_VERSION_MAX}]"
        return Misfit(code="identity_unreadable", message=message)
    return identity


def misfit_of(identity: EngineIdentity, expected: Expected) -> Misfit | None:
    """Why the engine must not serve here; None when it may."""
    if expected.is_by_handle and not identity.is_by_handle:
        reason = identity.why_not or "it gives no reason"
        return Misfit(code="by_handle_refused", message=f"it writes no rows: {reason[:300]}")
    if expected.is_by_handle and expected.run_id not in {None, identity.run_id}:
        found = "no run yet" if identity.run_id is None else f"run {identity.run_id}"
        message = f"its payload root has {found}, the proxy's has run {expected.run_id}"
        return Misfit(code="run_mismatch", message=message[:300])
    model = identity.payload_model
    if None not in (model, expected.model) and model != expected.model:
        message = f"it serves {model}, {expected.model_of} {expected.model}"
        return Misfit(code="model_mismatch", message=message)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What an engine says when it is asked. ``identity`` is None without the route.

    ``process`` is a word that is another one after each start of the engine; None from one that
    gives no such sign.
    """

    identity: EngineIdentity | Misfit | None
    process: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The policy version of an engine's weights, and how it is known.

    ``is_named``: the engine itself named it. ``is_reported``: somebody reported it to this proxy.
    ``process`` has them, and no other; None as long as the engine gave no sign of it.
    """

    policy_version: int
    is_named: bool = False
    is_reported: bool = False
    process: str | None = None

    def are_of_another(self, process: str | None) -> bool:
        """Whether ``process``, which the engine is now, surely does not have them."""
        return self.process not in {None, process}


def weights_of(said: Said, known: Weights, *, at_start: int, had_route: bool = False) -> Weights:
    """What an engine runs, once it has said so.

    Another process than the one that had ``known`` has the weights of its start; so has, where the
    process of ``known`` never showed, one without the route that ``had_route``. So has an engine
    that can name its weights and names none, unless others were reported since, or it named some
    before.
    """
    assert not isinstance(said.identity, Misfit), "what is not legible says nothing"
    has_route = said.identity is not None
    if said.identity is not None and said.identity.policy_version is not None:
        version = said.identity.policy_version
        return Weights(policy_version=version, is_named=True, process=said.process)
    has_lost_it = had_route and not has_route and known.process is None  # else the process tells
    is_another = known.are_of_another(said.process) or has_lost_it
    if is_another or (has_route and (known.is_named or not known.is_reported)):
        return Weights(policy_version=at_start, process=said.process)
    return known if known.process == said.process else replace(known, process=said.process)
