"""Rollouts handed in by reference: request ids or a session, with rewards only.

Clients that drop what they do not know of an answer cannot deliver it. The proxy has kept each
turn; here they are fetched, and the rollout is then taken in as if the client had sent them. The
proxy may let them go once the rollout is durable. A rollout by reference is the same one again when
its references and rewards are the same: what it refers to is fetched once.
"""

import asyncio
import hashlib

import structlog

from services.kit.readers.held import HeldBody, held_body
from services.kit.turns import TurnWire
from services.orchestrator import collecting
from services.orchestrator.decoding import Undecodable, decode_turns
from services.orchestrator.delivering import deliver, deliver_large
from services.orchestrator.errors import RolloutRefused
from services.orchestrator.limits import READ_INLINE_BYTES_MAX
from services.orchestrator.proxy_client import ProxyCallFailed, ProxyClient, TurnsAsked
from services.orchestrator.reading import LargeRollout
from services.orchestrator.records import LeaseState, Rollout
from services.orchestrator.reference_errors import NoProxy, ProxyUnavailable, TurnsMissing
from services.orchestrator.service import Orchestrator
from services.orchestrator.wire import DeliveredWire, encode_rollout
from sideband.ids import RolloutId

log = structlog.get_logger(__name__)


async def deliver_by_reference(
    service: Orchestrator, proxy: ProxyClient | None, wire: DeliveredWire
) -> Rollout:
    """Take a rollout in whose turns the proxy has kept. Idempotent.

    Raises TurnsMissing (the lease stays open), ProxyUnavailable, NoProxy, ReadersBusy, and what
    ``deliver`` and ``deliver_large`` raise.
    """
    if proxy is None:
        raise NoProxy("The run has no proxy_url to fetch turns from: deliver the turns themselves.")
    rollout_id, asked = RolloutId(wire.rollout_id), asked_for(wire, service.book.rules.run_id)
    digest = hashlib.sha256(encode_rollout(wire)).hexdigest()
    lease = service.book.lease_of_rollout(rollout_id)
    is_open = lease is not None and lease.state is LeaseState.OPEN
    must_fetch = is_open and collecting.known(service.book, rollout_id, digest) is None
    try:
        with held_body(service.readers) as turns:
            if must_fetch:
                await _fetch(proxy, asked, turns, service.settings.body_bytes_max, wire)
            rollout = await _delivered(service, wire, turns, digest)
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


async def _fetch(
    proxy: ProxyClient, asked: TurnsAsked, turns: HeldBody, bytes_max: int, wire: DeliveredWire
) -> None:
    """Put the turns into ``turns``; none for work that failed and whose turns are gone too."""
    try:
        await proxy.fetch_turns(asked, turns, bytes_max=bytes_max)
    except TurnsMissing as problem:
        if wire.status == "completed":
            raise
        log.info("turns_of_failed_rollout_missing", rollout_id=wire.rollout_id, code=problem.code)
    except ProxyCallFailed as exc:
        raise ProxyUnavailable(str(exc)) from exc


async def _delivered(
    service: Orchestrator, wire: DeliveredWire, turns: HeldBody, digest: str
) -> Rollout:
    size_bytes = turns.size_bytes
    try:
        if turns.is_large:
            async with service.readers.job() as job:
                large = await LargeRollout.of_turns(job, wire, turns.parts)
                return await deliver_large(service, large, digest=digest)
        content = turns.whole()
        if not content:
            found: list[TurnWire] = []
        elif size_bytes <= READ_INLINE_BYTES_MAX:
            found = decode_turns(content)
        else:
            found = await asyncio.to_thread(decode_turns, content)
    except Undecodable as exc:
        raise ProxyUnavailable(exc.detail) from exc
    return await deliver(service, wire.with_turns(found), size_bytes, digest=digest)
