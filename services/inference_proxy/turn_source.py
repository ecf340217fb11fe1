"""Where a hand-in gets its turns: from this process, which keeps them, or from several."""

from typing import Protocol

from msgspec import Struct

from services.inference_proxy.kept import KeptTurns
from services.inference_proxy.kept_turn import Found, TurnRef
from services.inference_proxy.long_json import Parts
from services.inference_proxy.offload import offload
from sideband.ids import RunId, SessionId


class TurnsWanted(Struct, frozen=True, kw_only=True):
    """One ``choice`` of all turns of a session, or ``refs``."""

    session_id: SessionId | None
    choice: int
    refs: list[TurnRef]
    run_id: RunId | None


class TurnSource(Protocol):
    """What the endpoints ask."""

    async def fetch(self, wanted: TurnsWanted) -> list[Parts]:
        """The turns, encoded, in order. Raises a TurnProblem for the first that cannot be given."""

    async def release(self, wanted: TurnsWanted) -> int:
        """Let them go; how many choices went. Idempotent."""


class OwnTurns:
    """The turns that this process keeps."""

    def __init__(self, turns: KeptTurns) -> None:
        self.turns = turns

    async def fetch(self, wanted: TurnsWanted) -> list[Parts]:
        """The turns, encoded, in order. Raises a TurnProblem for the first that cannot be given."""
        found = self._found(wanted)
        return await offload(found.encoded, size_bytes=found.size_bytes)

    async def release(self, wanted: TurnsWanted) -> int:
        """Let them go; how many choices went. Idempotent."""
        if wanted.session_id is not None:
            return self.turns.release_session(wanted.session_id, choice=wanted.choice)
        return self.turns.release(wanted.refs)

    def _found(self, wanted: TurnsWanted) -> Found:
        run_id = wanted.run_id
        if wanted.session_id is not None:
            return self.turns.find_session(wanted.session_id, choice=wanted.choice, run_id=run_id)
        return self.turns.find(wanted.refs, run_id=run_id)
