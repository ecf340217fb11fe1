"""Rollouts handed in by reference: request ids or a session, with rewards only.

Clients that drop what they do not know of an answer cannot deliver it. The proxy has kept each
turn; here they are fetched, and the rollout is then taken in as if the client had sent them. The
proxy may let them go once the rollout is durable. A rollout by reference is the same one again when
its references and rewards are the same: what it refers to is fetched once.
"""

import asyncio
import hashlib
from collections.abc import Sequence

import msgspec
import structlog

from services.kit.turns import TurnWire
from services.orchestrator import collecting
from services.orchestrator.errors import RolloutRefused
from services.orchestrator.limits import DECODE_INLINE_BYTES_MAX
from services.orchestrator.proxy_client import ProxyCallFailed, ProxyClient, TurnsAsked
from services.orchestrator.records import LeaseState, Rollout
from services.orchestrator.reference_errors import NoProxy, ProxyUnavailable, TurnsMissing
from services.orchestrator.service import Orchestrator
from services.orchestrator.wire import DeliveredWire, encode_rollout
from sideband.ids import RolloutId

log = structlog.get_logger(__name__)
_TURNS = msgspec.msgpack.Decoder(list[TurnWire])


async def deliver_by_reference(
    service: Orchestrator, proxy: ProxyClient | None, wire: DeliveredWire
) -> Rollout:
    """Take a rollout in whose turns the proxy has kept. Idempotent.

    Raises TurnsMissing (the lease stays open), ProxyUnavailable, NoProxy, and what ``deliver`` of
    the service raises.
    """
    if proxy is None:
        raise NoProxy("The run has no proxy_url to fetch turns from: deliver the turns themselves.")
    rollout_id, asked = RolloutId(wire.rollout_id), asked_for(wire, service.book.rules.run_id)
    digest = hashlib.sha256(encode_rollout(wire)).hexdigest()
    turns: Sequence[TurnWire] = ()
    size_bytes = 0
    lease = service.book.lease_of_rollout(rollout_id)
    is_open = lease is not None and lease.state is LeaseState.OPEN
    if is_open and collecting.known(service.book, rollout_id, digest) is None:
        turns, size_bytes = await _fetched(
            proxy, asked, bytes_max=service.settings.body_bytes_max, wire=wire
        )
    try:
        rollout = await service.deliver(wire.with_turns(turns), size_bytes, digest=digest)
    except RolloutRefused:  # it was recorded: nobody will ask for the turns again
        service.releases.add(asked)
        raise
    service.releases.add(asked)
    return rollout


def asked_for(wire: DeliveredWire, run_id: str) -> TurnsAsked:
    """What to ask the proxy for."""
    if wire.session_id is not None:
        return TurnsAsked(run_id=run_id, session_id=wire.session_id, choice=wire.choice)
    return TurnsAsked(run_id=run_id, turns=wire.turn_refs)


async def _fetched(
    proxy: ProxyClient, asked: TurnsAsked, *, bytes_max: int, wire: DeliveredWire
) -> tuple[Sequence[TurnWire], int]:
    """The turns and their bytes; none for work that failed and whose turns are gone too."""
    try:
        content = await proxy.fetch_turns(asked, bytes_max=bytes_max)
    except TurnsMissing as problem:
        if wire.status == "completed":
            raise
        log.info("turns_of_failed_rollout_missing", rollout_id=wire.rollout_id, code=problem.code)
        return (), 0
    except ProxyCallFailed as exc:
        raise ProxyUnavailable(str(exc)) from exc
    try:
        if len(content) <= DECODE_INLINE_BYTES_MAX:
            return _TURNS.decode(content), len(content)
        return await asyncio.to_thread(_TURNS.decode, content), len(content)
    except msgspec.MsgspecError as exc:
        raise ProxyUnavailable(f"turns: {exc}") from exc
