"""A session is discarded, with all that it wrote, only when nobody who shares it may train."""

from dataclasses import replace

from services.orchestrator import collecting, leasing, stepping
from services.orchestrator.book import Book
from services.orchestrator.collecting import Delivery
from services.orchestrator.leasing import LeaseRequest
from services.orchestrator.records import Change, Lease
from sideband.ids import GroupId, LeaseId, RolloutId, SessionId
from tests.services.orchestrator.test_book import RULES, file_of, sample_of


class Run:
    """A book at v0 that remembers next to nothing of what has ended."""

    def __init__(self) -> None:
        self.book = Book(replace(RULES, history_max=1))
        stepping.apply_policy(self.book, Change(), 0)

    def lease(self, name: str, session: str | None = None) -> Lease:
        asked = LeaseRequest(
            rollout_id=RolloutId(name),
            group_id=GroupId(name),
            group_size=1,
            env_name="",
            session_id=None if session is None else SessionId(session),
        )
        return leasing.take(self.book, Change(), asked, LeaseId(f"lease-{name}"), 0.0)

    def deliver(self, name: str) -> None:
        """One that may train at once."""
        files = {file_of(name, 0)}
        delivery = Delivery(
            rollout_id=RolloutId(name),
            digest=name,
            reward=1.0,
            samples=(sample_of(RolloutId(name), files),),
            files=frozenset(files),
            files_trained=frozenset(files),
        )
        collecting.deliver(self.book, Change(), delivery, 0.0)

    def discarded_by_abort_of(self, name: str) -> list[SessionId]:
        change = Change()
        leasing.abort(self.book, change, LeaseId(f"lease-{name}"), 0.0)
        return change.discard_sessions


def test_a_choice_that_may_train_keeps_its_session_however_many_leases_ended_since() -> None:
    run = Run()
    run.lease("a", "s")
    run.lease("b", "s")
    run.deliver("a")
    for number in range(5):
        run.lease(f"other-{number}")
        run.discarded_by_abort_of(f"other-{number}")
    assert RolloutId("a") in run.book.held
    assert run.discarded_by_abort_of("b") == [], "what choice a is trained on lies there too"
