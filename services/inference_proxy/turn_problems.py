"""Why a kept turn cannot be given.

::

    TurnProblem                request_id or session_id
    ├── TurnUnknown            never heard of, or forgotten
    ├── TurnGone               expired, released, too large, or its session was discarded
    ├── TurnRunning            it is being answered
    ├── TurnOfOtherRun         another run's
    ├── TurnAmbiguous          two requests had the same id
    └── TurnIncomplete         sampled without log probabilities
"""

from collections.abc import Mapping
from typing import Final, Literal

GoneReason = Literal["expired", "released", "too_large", "discarded"]

_SAID: Final[Mapping[GoneReason, str]] = {
    "expired": "was kept for its time and went",
    "released": "was handed in and went",
    "too_large": "is larger than everything that may be kept",
    "discarded": "was discarded with its session",
}


class TurnProblem(Exception):
    """A turn that cannot be given."""

    def __init__(self, what: str, *, request_id: str | None, session_id: str | None = None) -> None:
        self.what, self.request_id, self.session_id = what, request_id, session_id
        name = f"session {session_id}" if request_id is None else f"request {request_id}"
        super().__init__(f"{name}: {what}")


class TurnUnknown(TurnProblem):
    """Never heard of, or forgotten."""


class TurnGone(TurnProblem):
    """It was kept and is no more; ``reason`` says why."""

    def __init__(
        self, reason: GoneReason, *, request_id: str | None, session_id: str | None = None
    ) -> None:
        self.reason: GoneReason = reason
        said = _SAID[reason] if request_id is not None else f"a turn of it {_SAID[reason]}"
        super().__init__(said, request_id=request_id, session_id=session_id)


class TurnRunning(TurnProblem):
    """It is being answered: ask again."""


class TurnOfOtherRun(TurnProblem):
    """Another run's."""


class TurnAmbiguous(TurnProblem):
    """Two requests had the same id: nobody can say which one is meant."""


class TurnIncomplete(TurnProblem):
    """Nothing to train on: it was sampled without log probabilities."""
