"""The law of resuming: after any history, what a ledger kept makes a book that decides alike."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis.stateful import rule

from services.orchestrator.records import Change
from services.orchestrator.restoring import restore
from tests.services.orchestrator.dump import dump
from tests.services.orchestrator.histories import SeededHistory
from tests.services.orchestrator.plain_ledger import PlainLedger
from tests.services.orchestrator.test_book import RULES, History


class DurableHistory(History):
    """Any history of the book, every decision committed to a ledger beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PlainLedger()

    def decided(self, change: Change) -> None:
        super().decided(change)
        self.ledger.apply([change])

    @rule()
    def crash(self) -> None:
        """The process dies; what goes on is what the ledger had."""
        records = self.ledger.records()
        assert records is not None
        assert set(records.files) == self.deleted, "given up, whether deleted yet or not"
        restored, change = restore(records, self.book.rules)
        assert not change, "the ledger knows all of it"
        live = dump(self.book)
        for name, found in dump(restored).items():
            assert found == live[name], name
        self.book = restored

    def teardown(self) -> None:
        if hasattr(self, "book"):
            self.crash()
        super().teardown()


class ShortHistory(DurableHistory):
    """With next to no memory of what has ended, ids are forgotten all the time."""

    book_rules = replace(RULES, history_max=2)

    def teardown(self) -> None:
        """What a drain leaves is the business of the long history."""
        if hasattr(self, "book"):
            self.crash()


@pytest.mark.parametrize("seed", [2, 4, 6])
def test_a_step_that_came_again_without_some_holds_the_same_after_a_restart(seed: int) -> None:
    history = SeededHistory(seed, replace(RULES, steps_kept=2), returns=1)
    ledger = PlainLedger()
    for change in history.changes(200):
        ledger.apply([change])
        records = ledger.records()
        assert records is not None
        assert dump(restore(records, history.book.rules)[0]) == dump(history.book)
    assert len([record for record in history.book.returns if record.steps_reduced]) > 1


TestDurableHistory = pytest.mark.timeout(300)(
    DurableHistory.TestCase
)  # long histories, busy machines
TestDurableHistory.settings = settings(stateful_step_count=40)
TestShortHistory = pytest.mark.timeout(300)(ShortHistory.TestCase)  # long histories, busy machines
TestShortHistory.settings = settings(stateful_step_count=40)
