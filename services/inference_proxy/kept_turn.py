"""One kept train turn, and turns that were looked up.

Errors: TurnProblem (``turn_problems``).
"""

from dataclasses import dataclass

from msgspec import Struct

from services.inference_proxy.long_json import Parts
from services.inference_proxy.prompts import Prompt
from services.inference_proxy.recording import TurnChoice
from services.inference_proxy.turn_problems import TurnIncomplete, TurnProblem
from sideband.ids import RequestId, RunId, SessionId


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRef:
    """One choice of one request."""

    request_id: RequestId
    choice: int = 0


class KeptTurn(Struct, kw_only=True, eq=False, gc=False):
    """One answered request. Nothing in it refers back, so the collector need not look at it."""

    request_id: RequestId
    session_id: SessionId | None
    run_id: RunId | None
    prompt: Prompt
    choices: dict[int, TurnChoice]  # those that were not released
    at_s: float

    @property
    def size_bytes(self) -> int:
        """What keeping it keeps."""
        return sum(choice.size_bytes for choice in self.choices.values())


@dataclass(frozen=True, slots=True)
class Found:
    """Turns that were looked up, and why the next one cannot be given, if one cannot."""

    turns: list[tuple[RequestId, TurnChoice]]
    problem: TurnProblem | None = None

    @property
    def size_bytes(self) -> int:
        """What has to be read."""
        return sum(choice.size_bytes for _, choice in self.turns)

    def encoded(self) -> list[Parts]:
        """The turns, in order. Slow when large. Raises a TurnProblem for the first fault."""
        found: list[Parts] = []
        for request_id, choice in self.turns:
            turn = choice.encoded()
            if turn is None:
                what = "was sampled without log probabilities"
                raise TurnIncomplete(what, request_id=request_id)
            found.append(turn)
        if self.problem is not None:
            raise self.problem
        return found
