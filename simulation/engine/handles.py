"""Answers by handle: where a request may write, and its one payload file."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from sideband.errors import SidebandError
from sideband.ids import RequestId, RunId, check_id
from sideband.model import ModelShape
from sideband.payload import ChoicePayload, MaskColumn, PayloadRoot, RoutingRows, write_payload
from sideband.payload.durable import DurableFolders
from sideband.payload.encodings import Encodings
from simulation.engine.outcomes import Outcome
from simulation.engine.wire import BadRequest, SamplingParams

_FOLDER: Final = re.compile(r"v(0|[1-9][0-9]{0,8})")
_DURABLE: Final = DurableFolders()  # the root is opened for each request, what was synced is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where one request's file goes: a version folder of this engine's own root."""

    root: PayloadRoot
    policy_version: int


def find_target(params: SamplingParams, root: Path | None) -> Target | None:
    """The target that the proxy injected, or None for an inline answer.

    The folder must be a version folder right below this engine's own root, and the root must
    belong to the run that the request names. Raises BadRequest.
    """
    extra = params.extra_args or {}
    wanted = extra.get("payload_dir")
    if wanted is None:
        return None
    if root is None:
        raise BadRequest("payload_dir: this engine has no payload root")
    if not isinstance(wanted, str) or "\x00" in wanted:
        raise BadRequest("payload_dir must be a path")
    folder = Path(wanted)
    match = _FOLDER.fullmatch(folder.name)
    if folder.parent != root or match is None:
        raise BadRequest(f"payload_dir must be v<k> in this engine's payload root, got {wanted}")
    run_id = extra.get("payload_run_id")
    try:
        opened = PayloadRoot.open(
            root,
            run_id=None if run_id is None else RunId(check_id("payload_run_id", run_id)),
            durable=_DURABLE,
        )
    except SidebandError as exc:
        raise BadRequest(f"payload_run_id: {exc}") from exc
    return Target(root=opened, policy_version=int(match[1]))


def write_outcomes(
    target: Target,
    request_id: str,
    model: ModelShape,
    outcomes: Sequence[Outcome],
    encodings: Encodings,
) -> dict[str, Any]:
    """Write the request's file; the answer's top-level fields that name it. Blocks."""
    choices = [_payload_of(outcome) for outcome in outcomes]
    report = write_payload(
        target.root,
        policy_version=target.policy_version,
        request_id=RequestId(check_id("request_id", request_id)),
        model=model,
        choices=choices,
        encodings=encodings,
    )
    return {
        "payload_segments": {
            str(outcome.index): msgspec.to_builtins(report.segments.get(outcome.index, ()))
            for outcome in outcomes
        },
        "payload_model": msgspec.to_builtins(model),
    }


def _payload_of(outcome: Outcome) -> ChoicePayload:
    masks = None
    if len(outcome.masks):
        masks = MaskColumn(
            pos=outcome.prompt_tokens,
            masks=outcome.masks,
            sampled_token_ids_N=outcome.token_ids_C,
            logprobs_M=None if outcome.scores is None else outcome.scores.values_M,
        )
    routing = None
    if len(outcome.routing_NLK):
        routing = RoutingRows(pos=outcome.rows_start, rows_NLK=outcome.routing_NLK)
    return ChoicePayload(choice=outcome.index, routing=routing, masks=masks)
