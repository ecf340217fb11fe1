"""Keeps answered train requests: records what a client is given, and stores it encoded."""

import asyncio
from collections.abc import Callable
from typing import Final

from xxhash import xxh3_64_intdigest

from services.inference_proxy.kept import KeptTurn, KeptTurns
from services.inference_proxy.planning import Plan
from services.inference_proxy.recording import TurnRecord
from sideband.ids import RunId

EXPIRY_S: Final = 10.0  # how late a turn may go that nobody asks for


class Keeper:
    """``run_id`` names the run of turns for which nothing is written."""

    def __init__(
        self, turns: KeptTurns, *, run_id: str | None, clock_s: Callable[[], float]
    ) -> None:
        self.turns, self._clock_s = turns, clock_s
        self._run_id = None if run_id is None else RunId(run_id)

    def record(self, plan: Plan) -> TurnRecord | None:
        """A record to be filled, if this request's turn is to be kept."""
        return TurnRecord() if plan.is_train and self.turns.is_on else None

    def encoded(self, plan: Plan, record: TurnRecord) -> KeptTurn:
        """The turn as it is kept. Slow for large turns; changes nothing."""
        call = plan.call
        return KeptTurn(
            request_id=call.request_id,
            session_id=call.session_id,
            run_id=plan.run_id or self._run_id,
            prompt_digest=xxh3_64_intdigest(plan.prompt.tobytes()),
            choices=record.encoded(call.request_id, plan.prompt, call.body["sampling_params"]),
            at_s=self._clock_s(),
        )

    async def run(self) -> None:
        """Let old turns go also when nothing happens, until cancelled."""
        while True:
            self.turns.expire()
            await asyncio.sleep(EXPIRY_S)
