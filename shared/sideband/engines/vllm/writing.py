"""From what was taken off a request to its payload file, and to the members of its answer."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from sideband.engines.inline import choice_payload
from sideband.engines.vllm.asks import Target
from sideband.engines.vllm.errors import RowsUnfit
from sideband.engines.vllm.takes import Taken
from sideband.errors import InvalidInput
from sideband.model import ModelShape
from sideband.payload import ChoicePayload, WriteReport, write_payload
from sideband.payload.encodings import Encodings
from sideband.routing.rows import RowArray

ABORTED = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What positions follow from."""

    target: Target
    model: ModelShape
    encodings: Encodings
    prompt_tokens: int
    prompt_start: int  # leading prompt rows that were not asked for
    choices: Sequence[Taken]


class Write:
    """One file, written in a thread by ``run``; ``abandon`` may come at any time from another.

    After both, no file is left: whichever comes last deletes it.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._lock = threading.Lock()
        self._report: WriteReport | None = None
        self._is_abandoned = False

    def run(self) -> WriteReport:
        """Write, sync, publish. Blocks. Raises RowsUnfit, PayloadError, InvalidInput."""
        request = self._request
        report = write_payload(
            request.target.root,
            policy_version=request.target.policy_version,
            request_id=request.target.request_id,
            model=request.model,
            choices=[choice_of(taken, request) for taken in request.choices],
            encodings=request.encodings,
        )
        with self._lock:
            self._report = report
            is_abandoned = self._is_abandoned
        if is_abandoned:
            self._delete(report)
        return report

    def abandon(self) -> None:
        """Nobody will hear of the file. Blocks when it is there already: use a thread."""
        with self._lock:
            self._is_abandoned = True
            report = self._report
        if report is not None:
            self._delete(report)

    def _delete(self, report: WriteReport) -> None:
        if report.file is not None:
            self._request.target.root.delete(report.file)


def choice_of(taken: Taken, request: Request) -> ChoicePayload:
    """One choice as it is written. Raises RowsUnfit.

    An aborted choice may have ended between its tokens and their rows: what does not fit is then
    left out, and its tokens are answered without replay.
    """
    try:
        return _choice(taken, request, taken.routing_NLK, taken.masks)
    except InvalidInput as exc:
        if taken.finish_reason != ABORTED:
            raise RowsUnfit(taken.index, str(exc)) from exc
        return _choice(taken, request, None, None)


def _choice(
    taken: Taken, request: Request, routing_NLK: RowArray | None, masks: list[list[int]] | None
) -> ChoicePayload:
    return choice_payload(
        routing_NLK,
        masks,
        layer_ids=None,
        prompt_tokens=request.prompt_tokens,
        completion_token_ids=np.asarray(taken.token_ids, np.int32),
        prompt_start=request.prompt_start,
        model=request.model,
        choice=taken.index,
    )


def handle_members(report: WriteReport, model: ModelShape) -> dict[str, Any]:
    """What an answer by handle carries at its top level."""
    segments = {
        str(choice): list(msgspec.to_builtins(found)) for choice, found in report.segments.items()
    }
    return {"payload_segments": segments, "payload_model": msgspec.to_builtins(model)}
