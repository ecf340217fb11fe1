"""Keeps answered train requests: records what a client is given, and stores it encoded."""

import asyncio
from collections.abc import Callable, Collection
from typing import Final

from services.inference_proxy.kept import KeptTurns
from services.inference_proxy.kept_turn import KeptTurn
from services.inference_proxy.long_json import Parts
from services.inference_proxy.planning import Plan
from services.inference_proxy.recording import (
    EncodedChoice,
    TurnChoice,
    TurnRecord,
    UnreadChoice,
)
from sideband.ids import RunId

EXPIRY_S: Final = 10.0  # how late a turn may go that nobody asks for


class Keeper:
    """``run_id`` names the run of turns for which nothing is written."""

    def __init__(
        self, turns: KeptTurns, *, run_id: str | None, clock_s: Callable[[], float]
    ) -> None:
        self.turns, self._clock_s = turns, clock_s
        self._run_id = None if run_id is None else RunId(run_id)

    def keeps(self, plan: Plan) -> bool:
        """Whether this request's turn is to be kept."""
        return plan.is_train and self.turns.is_on

    def record(self, plan: Plan) -> TurnRecord | None:
        """A record to be filled with a stream's events, if its turn is to be kept."""
        return TurnRecord() if self.keeps(plan) else None

    def unread(self, plan: Plan, answer: Parts, indices: Collection[int]) -> KeptTurn:
        """The turn of a whole answer, as the client gets it with the engine's log probabilities."""
        call = plan.call
        call.lazy_prompt.settle()
        choices: dict[int, TurnChoice] = {
            index: UnreadChoice(
                index=index,
                choice_count=len(indices),
                answer=answer,
                request_id=call.request_id,
                prompt=call.lazy_prompt,
                params=call.body["sampling_params"],
            )
            for index in indices
        }
        return self._turn(plan, choices)

    def encoded(self, plan: Plan, record: TurnRecord) -> KeptTurn:
        """The turn of a record. Slow for large turns; changes nothing."""
        call = plan.call
        turns = record.encoded(call.request_id, plan.prompt, call.body["sampling_params"])
        return self._turn(plan, {index: EncodedChoice(turn) for index, turn in turns.items()})

    def _turn(self, plan: Plan, choices: dict[int, TurnChoice]) -> KeptTurn:
        return KeptTurn(
            request_id=plan.call.request_id,
            session_id=plan.call.session_id,
            run_id=plan.run_id or self._run_id,
            prompt=plan.call.lazy_prompt,
            choices=choices,
            at_s=self._clock_s(),
        )

    async def run(self) -> None:
        """Let old turns go also when nothing happens, until cancelled."""
        while True:
            self.turns.expire()
            await asyncio.sleep(EXPIRY_S)
