"""Which policy versions the engines have served, and since when. Pure decisions on a ``Book``."""

from services.orchestrator import stepping
from services.orchestrator.book import Book
from services.orchestrator.history import PolicyRecord, PolicySource
from services.orchestrator.records import Change
from services.orchestrator.return_errors import LineageConflict


def report(
    book: Book,
    change: Change,
    policy_version: int,
    *,
    source: PolicySource,
    now_s: float,
    lineage: int | None = None,
) -> None:
    """As ``stepping.apply_policy``; what is news is remembered, the oldest beyond the bound not.

    Raises LineageConflict for a lineage that is not the run's.
    """
    if lineage is not None and lineage != book.lineage:
        raise LineageConflict(f"The run's lineage is {book.lineage}.", lineage=book.lineage)
    stepping.apply_policy(book, change, policy_version, lineage=lineage)
    known = book.policies[-1] if book.policies else None
    is_known = known is not None and (known.policy_version, known.lineage) == (
        policy_version,
        book.lineage,
    )
    if is_known or book.policy_version != policy_version:
        return
    step = book.steps.get(policy_version)
    record = PolicyRecord(
        number=0 if known is None else known.number + 1,
        policy_version=policy_version,
        lineage=book.lineage,
        applied_s=now_s,
        trained_s=None if step is None else step.acknowledged_s,
        source=source,
    )
    book.policies.append(record)
    change.policies.append(record)
    while len(book.policies) > book.rules.history_max:
        change.policies_forgotten.append(book.policies.popleft().number)
