"""Problems of the proxy: the only place that gives our errors an HTTP status.

::

    Problem (services.kit.problems)
    ├── BodyRefused 400          payload_dir_refused, kv_transfer_refused, choices_refused,
    │                            truncation_refused, prompt_start_refused, parameter_refused,
    │                            prompts_refused, echo_refused
    ├── SamplingRefused 400      the engine returns masks and cannot for this sampling
    ├── EngineRefusedRequest 4xx what the engine says about the request
    ├── UnknownEngineProblem 404, UnknownSession 404
    ├── UnknownTurn 404          turn_unknown
    ├── TurnUnavailable 409      turn_running, turn_of_other_run, turn_ambiguous, turn_incomplete
    ├── TurnIsGone 410           turn_expired, turn_released, turn_too_large, turn_discarded
    ├── VersionConflict 409      a session at another version, or a report that goes back
    ├── WeightUpdateRunning 409  another update is being applied
    ├── SessionGone 409          the session was deleted while the request ran
    ├── TooManyValues 413        JSON that takes too long to parse
    ├── ClientLeft 499           nobody reads it
    ├── UpstreamFailed 502       every attempt failed
    ├── AnswerRefused 502        an answer that cannot belong to its request
    ├── NoEngineServes 503       no_engine, engine_busy
    ├── VersionUnknown 503       the version on record was not learnt yet
    ├── NotAdmitted 503, PayloadRootNotReady 503, PayloadNotWritten 503
    └── DeadlineExceeded 504
"""

from collections.abc import Mapping
from types import TracebackType
from typing import Final

from services.inference_proxy.admission import NotTaken
from services.inference_proxy.answers import MalformedAnswer
from services.inference_proxy.attempts import MaskRefusal
from services.inference_proxy.book_errors import UnknownEngine, VersionBackwards
from services.inference_proxy.calls import NoEngine
from services.inference_proxy.dialects.base import UntranslatableParameter
from services.inference_proxy.payloads import RootNotReady
from services.inference_proxy.refusals import Refused
from services.inference_proxy.request_errors import (
    BodyRefused,
    EngineRefusedRequest,
    SamplingRefused,
    TooManyValues,
)
from services.inference_proxy.sessions import VersionChanged
from services.inference_proxy.spill import SpillFailed
from services.inference_proxy.turn_problems import (
    TurnAmbiguous,
    TurnGone,
    TurnIncomplete,
    TurnOfOtherRun,
    TurnProblem,
    TurnRunning,
    TurnUnknown,
)
from services.inference_proxy.upstream import EngineBusy, EngineRefused, UpstreamError
from services.inference_proxy.wanted import ClientGone, DeadlinePassed, SessionDiscarded
from services.inference_proxy.weights import UpdateFailed, UpdateRunning
from services.kit.problems import InvalidRequest, Problem
from sideband.errors import InvalidId

RETRY_LATER: Final = {"Retry-After": "1"}
# The proxy's own token or route was refused: nothing that a client could change.
_OUR_FAULT: Final = frozenset({401, 403, 405, 407})


class UnknownEngineProblem(Problem):
    """No engine of that name."""

    status, code, title = 404, "unknown_engine", "Unknown engine"


class UnknownSession(Problem):
    """No session of that id."""

    status, code, title = 404, "unknown_session", "Unknown session"


class UnknownTurn(Problem):
    """No kept turn of that id, or none of that session."""

    status, code, title = 404, "turn_unknown", "Unknown turn"


class TurnUnavailable(Problem):
    """A turn that is known and cannot be given: it runs, is another run's, or nobody can say which
    of two requests is meant, or there is nothing to train on.
    """

    status, code, title = 409, "turn_running", "Turn cannot be given"


class TurnIsGone(Problem):
    """The turn was kept and is no more."""

    status, code, title = 410, "turn_expired", "Turn gone"


class VersionConflict(Problem):
    """Two policy versions where there must be one."""

    status, code, title = 409, "policy_version_conflict", "Policy version conflict"


class VersionUnknown(Problem):
    """The orchestrator has not told yet which policy version is on record."""

    status, code, title = 503, "policy_version_unknown", "Policy version unknown"


class WeightUpdateRunning(Problem):
    """Another update is being applied."""

    status, code, title = 409, "weight_update_running", "Weight update running"


class SessionGone(Problem):
    """The session was deleted while the request ran."""

    status, code, title = 409, "session_discarded", "Session discarded"


class ClientLeft(Problem):
    """The client closed its connection; the engine was told."""

    status, code, title = 499, "client_left", "Client left"


class UpstreamFailed(Problem):
    """Every attempt at an engine failed."""

    status, code, title = 502, "upstream_failed", "Engine failed"


class AnswerRefused(Problem):
    """An engine's answer that cannot belong to its request."""

    status, code, title = 502, "engine_answer_malformed", "Engine answer malformed"


class NoEngineServes(Problem):
    """No engine takes requests now."""

    status, code, title = 503, "no_engine", "No engine serves"


class NotAdmitted(Problem):
    """Paused or draining."""

    status, code, title = 503, "not_admitted", "Takes no requests"


class PayloadRootNotReady(Problem):
    """The payload root is configured and cannot be used yet."""

    status, code, title = 503, "payload_root_not_ready", "Payload root not ready"


class PayloadNotWritten(Problem):
    """The proxy could not write the payload file; no token of the answer is lost to training."""

    status, code, title = 503, "payload_not_written", "Payload file not written"


class DeadlineExceeded(Problem):
    """The request's deadline over all attempts passed."""

    status, code, title = 504, "deadline_exceeded", "Deadline exceeded"


def problem_of(error: Exception) -> Problem:
    """The problem that one of OWN_ERRORS stands for."""
    if isinstance(error, Refused):
        return BodyRefused(str(error), code=error.code, field=error.field)
    if isinstance(error, InvalidId):
        return InvalidRequest(str(error))
    if isinstance(error, EngineRefused) and error.status not in _OUR_FAULT:
        return EngineRefusedRequest(str(error), status=error.status, engine=error.engine)
    if isinstance(error, EngineBusy):
        return NoEngineServes(str(error), code="engine_busy", headers=RETRY_LATER)
    if isinstance(error, UpstreamError):
        return UpstreamFailed(str(error), engine=error.engine, headers=RETRY_LATER)
    if isinstance(error, MalformedAnswer):
        return AnswerRefused(str(error), part=error.part)
    if isinstance(error, UntranslatableParameter):
        rule = f"{error}; no engine that serves has it"
        return BodyRefused(rule, code="parameter_refused", field=error.field)
    if isinstance(error, VersionChanged):
        return VersionConflict(str(error), pinned=error.pinned, asked=error.asked)
    if isinstance(error, VersionBackwards):
        return VersionConflict(str(error), known=error.known, reported=error.reported)
    if isinstance(error, TurnProblem):
        return _turn_problem(error)
    if isinstance(error, MaskRefusal):
        return SamplingRefused(
            "The engine returns sampling masks, so it needs temperature > 0 and top_k > 0 "
            "(greedy is top_k = 1)."
        )
    for kind, problem, headers in _PLAIN:
        if isinstance(error, kind):
            return problem(str(error) or problem.title, headers=headers)
    raise AssertionError(f"no problem for {type(error).__name__}")


def _turn_problem(error: TurnProblem) -> Problem:
    kind: type[Problem] = TurnUnavailable
    code, headers = _TURN_CODES.get(type(error)), None
    if isinstance(error, TurnGone):
        kind, code = TurnIsGone, f"turn_{error.reason}"
    elif isinstance(error, TurnUnknown):
        kind = UnknownTurn
    elif isinstance(error, TurnRunning):
        headers = RETRY_LATER
    facts = {"request_id": error.request_id, "session_id": error.session_id}
    problem = kind(str(error), code=code, headers=headers)
    problem.facts = {name: value for name, value in facts.items() if value is not None}
    return problem


_TURN_CODES: Final[Mapping[type[TurnProblem], str]] = {
    TurnRunning: "turn_running",
    TurnOfOtherRun: "turn_of_other_run",
    TurnAmbiguous: "turn_ambiguous",
    TurnIncomplete: "turn_incomplete",
}
TURN_PROBLEMS: tuple[type[Problem], ...] = (UnknownTurn, TurnUnavailable, TurnIsGone)

_PLAIN: tuple[tuple[type[Exception], type[Problem], dict[str, str] | None], ...] = (
    (NoEngine, NoEngineServes, RETRY_LATER),
    (NotTaken, NotAdmitted, RETRY_LATER),
    (RootNotReady, PayloadRootNotReady, RETRY_LATER),
    (SpillFailed, PayloadNotWritten, RETRY_LATER),
    (UnknownEngine, UnknownEngineProblem, None),
    (UpdateRunning, WeightUpdateRunning, RETRY_LATER),
    (UpdateFailed, UpstreamFailed, None),
    (ClientGone, ClientLeft, None),
    (SessionDiscarded, SessionGone, None),
    (DeadlinePassed, DeadlineExceeded, None),
)
GENERATE_PROBLEMS: tuple[type[Problem], ...] = (
    BodyRefused,
    TooManyValues,
    SamplingRefused,
    EngineRefusedRequest,
    VersionConflict,
    SessionGone,
    ClientLeft,
    UpstreamFailed,
    AnswerRefused,
    NoEngineServes,
    NotAdmitted,
    PayloadRootNotReady,
    PayloadNotWritten,
    DeadlineExceeded,
)
OPENAI_PROBLEMS = GENERATE_PROBLEMS  # but that an engine's refusal comes in its own form


OWN_ERRORS: tuple[type[Exception], ...] = (
    Refused,
    InvalidId,
    UpstreamError,
    MalformedAnswer,
    VersionChanged,
    VersionBackwards,
    MaskRefusal,
    TurnProblem,
    UntranslatableParameter,
    *(kind for kind, _, _ in _PLAIN),
)


class as_problems:  # a function to whoever uses it
    """Raise our own errors as problems; anything else is a bug and goes on."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and isinstance(error, OWN_ERRORS):
            raise problem_of(error) from error
