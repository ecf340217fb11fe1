"""Takes a delivered rollout in: reads it, looks at its files, decides, commits."""

import asyncio
from collections.abc import Awaitable, Callable

from services.kit.problems import Problem
from services.orchestrator import collecting
from services.orchestrator.checking import with_files_checked
from services.orchestrator.collecting import Delivery
from services.orchestrator.errors import REFUSALS, RETRY_SOON, TooManyRollouts
from services.orchestrator.intake import IntakeRules, read
from services.orchestrator.limits import READ_INLINE_BYTES_MAX
from services.orchestrator.reading import LargeRollout
from services.orchestrator.records import Lease, LeaseState, Rollout
from services.orchestrator.service import Orchestrator
from services.orchestrator.wire import RolloutWire
from sideband.ids import RolloutId

Reading = Callable[[Lease | None, IntakeRules], Awaitable[Delivery]]


async def deliver(
    service: Orchestrator, wire: RolloutWire, size_bytes: int, *, digest: str | None = None
) -> Rollout:
    """Take a finished rollout in. Idempotent by id and content, or by id and ``digest``.

    Raises RolloutRefused, RolloutConflict, LeaseUnknown, TooManyRollouts, StorageFull, and what
    every change of the service does.
    """

    async def reading(lease: Lease | None, rules: IntakeRules) -> Delivery:
        if size_bytes <= READ_INLINE_BYTES_MAX:
            return read(wire, lease, rules, digest)
        return await asyncio.to_thread(read, wire, lease, rules, digest)

    return await _take_in(service, RolloutId(wire.rollout_id), reading)


async def deliver_large(
    service: Orchestrator, large: LargeRollout, *, digest: str | None = None
) -> Rollout:
    """The same of a rollout that a reader has. Raises ReaderLost too."""

    async def reading(lease: Lease | None, rules: IntakeRules) -> Delivery:
        return await large.read(lease, rules, digest)

    return await _take_in(service, RolloutId(large.wire.rollout_id), reading)


async def _take_in(service: Orchestrator, rollout_id: RolloutId, reading: Reading) -> Rollout:
    service.journal.admit()
    book = service.book
    lease = book.lease_of_rollout(rollout_id)
    is_open = lease is not None and lease.state is LeaseState.OPEN
    if is_open and len(book.held) >= book.rules.rollouts_held_max:
        raise TooManyRollouts("The trainer is behind.", headers=RETRY_SOON)
    if is_open:
        service.room.admit_delivery(book)
    delivery = await reading(lease if is_open else None, service.intake_rules)
    if collecting.known(book, delivery.rollout_id, delivery.digest) is None:
        delivery = await _checked(service, delivery)
    before = collecting.known(book, delivery.rollout_id, delivery.digest)
    with service.decision() as change:
        outcome = collecting.deliver(book, change, delivery, service.clock_s())
    await service.commit(change)
    if isinstance(outcome, Problem):
        raise outcome
    if before is None:
        service.metrics.delivered(outcome)
        service.deliveries.note(outcome)
    if outcome.refusal is not None:
        raise REFUSALS[outcome.refusal](outcome.detail, rollout_id=outcome.rollout_id)
    return outcome


async def _checked(service: Orchestrator, delivery: Delivery) -> Delivery:
    if service.files is None or not service.settings.check_files:
        return delivery
    return await with_files_checked(
        delivery, service.files, service.book.retention, wait_s=service.settings.file_wait_s
    )
