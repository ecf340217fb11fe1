"""Carries out the orphan sweep (retention rule 3): ``sweep.py`` says what is an orphan."""

from services.orchestrator.book import Book
from services.orchestrator.errors import NoPayloadRoot
from services.orchestrator.lifecycle import Phase
from services.orchestrator.service import Orchestrator
from services.orchestrator.sweep import SweepRules, VersionPlan, orphaned_versions


def sweep_rules(book: Book) -> SweepRules:
    """What decides which versions are orphaned, at this moment."""
    return SweepRules(
        step=book.next_step - 1,
        max_off_policy_steps=book.rules.max_off_policy_steps,
        oldest_live=book.oldest_live(),
        has_ended=book.run.phase is Phase.ENDED,
    )


async def sweep(service: Orchestrator, *, dry_run: bool) -> list[VersionPlan]:
    """Look at every version, and delete the orphans unless ``dry_run``: what is, or would be gone.

    Raises NoPayloadRoot, PayloadError, LedgerUnavailable.
    """
    files, book = service.files, service.book
    if files is None:
        raise NoPayloadRoot("The run has no payload root.")
    versions = await files.call(files.root.versions)
    plans = []
    for version in orphaned_versions(versions, sweep_rules(book)):
        plan = await files.planned(version, book.retention.is_held)
        if plan is None:
            continue
        # While files were listed nothing new can have come to refer to them: a version is this
        # old only when no lease for it is open, and none is given any more.
        if not dry_run and version in orphaned_versions([version], sweep_rules(book)):
            await service.settled()  # what let go of these files must not be forgotten again
            if not await files.sweep_version(plan):
                continue
            if plan.is_whole:
                with service.decision() as change:
                    book.retention.forget(version)
                    change.versions_forgotten.append(version)
                await service.commit(change)
        plans.append(plan)
    return plans
