"""Two orchestrators on one PostgreSQL ledger: one leads, the other takes over within 10 s."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import postgres
from tests.faults.processes import Orchestrator, orchestrator, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
TAKEOVER_S = 10.0  # the promise


@pytest.fixture(scope="module")
def ledger_url() -> Iterator[str]:
    with postgres.server() as url:
        yield url


def assert_stands_by(standby: Orchestrator, leader: Orchestrator) -> None:
    for answer in (standby.lease("x"), standby.ask("GET", "/v1/run")):
        assert answer.status_code == 503, answer.text
        assert answer.json()["code"] == "not_leading"
        assert answer.json()["leader"] == leader.url
        assert answer.headers["retry-after"]
    assert standby.ask("GET", "/readyz").status_code == 503
    assert standby.is_alive()


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
def test_the_other_takes_over_and_nothing_that_was_answered_is_lost(
    ledger_url: str, tmp_path: Path, death: signal.Signals
) -> None:
    run_id = f"takeover-{death.name}"
    # Both are told to begin afresh: only the one that is first to lead may.
    with (
        orchestrator(tmp_path, ledger_url, run_id=run_id, start="fresh") as first,
        orchestrator(tmp_path, ledger_url, run_id=run_id, start="fresh") as second,
    ):
        until(lambda: first.is_alive() and second.is_alive(), "both answer")
        until(lambda: first.is_ready() or second.is_ready(), "one leads")
        leader, standby = (first, second) if first.is_ready() else (second, first)
        assert_stands_by(standby, leader)
        leases = [leader.lease(f"r{n}") for n in range(20)]
        assert {answer.status_code for answer in leases} == {200}
        receipts = [leader.deliver(f"r{n}") for n in range(10)]
        assert {answer.status_code for answer in receipts} == {202}
        leader.signal(death)
        until(standby.is_ready, "the other leads", timeout_s=TAKEOVER_S)
        run = standby.ask("GET", "/v1/run").json()
        assert (run["leases_open"], run["rollouts_held"]) == (10, 10)
        for number, receipt in enumerate(receipts):
            assert standby.deliver(f"r{number}").json() == receipt.json()
        for number, lease in enumerate(leases[10:], start=10):
            assert standby.lease(f"r{number}").json()["lease_id"] == lease.json()["lease_id"]


def test_a_leader_that_slept_is_fenced_off(ledger_url: str, tmp_path: Path) -> None:
    with orchestrator(tmp_path, ledger_url, run_id="sleeper") as first:
        until(first.is_ready, "it leads")
        assert first.lease("before").status_code == 200
        with orchestrator(tmp_path, ledger_url, run_id="sleeper") as second:
            until(second.is_alive, "the other answers")
            assert_stands_by(second, first)
            first.signal(signal.SIGSTOP)
            until(second.is_ready, "the other leads", timeout_s=TAKEOVER_S)
            assert second.lease("after").status_code == 200
            first.signal(signal.SIGCONT)
            assert first.lease("late").status_code == 503, "what it decides is not kept"
            until(lambda: first.lease("late").json()["code"] == "not_leading", "it stands by")
            assert_stands_by(first, second)
            run = second.ask("GET", "/v1/run").json()
            assert run["leases_open"] == 2
            second.signal(signal.SIGKILL)
            until(first.is_ready, "and takes over again", timeout_s=TAKEOVER_S)
            leases = first.ask("GET", "/v1/leases").json()["leases"]
            assert [lease["rollout_id"] for lease in leases] == ["before", "after"]


def test_a_second_process_on_an_embedded_ledger_is_refused_by_name(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.sqlite3"
    with orchestrator(tmp_path, url) as first:
        until(first.is_ready, "it leads")
        assert first.lease("a").status_code == 200
        with orchestrator(tmp_path, url) as second:
            assert second.process.wait(timeout=60) != 0
            assert "open in another process" in second.log.read_text()
        first.signal(signal.SIGKILL)
        with orchestrator(tmp_path, url) as third:
            until(third.is_ready, "the next one goes on at once")
            assert third.ask("GET", "/v1/run").json()["leases_open"] == 1


def lineage_of(one: Orchestrator) -> object:
    """How often its run went back; None while it does not lead."""
    return one.ask("GET", "/v1/run").json().get("lineage")


def test_a_standby_of_an_older_start_neither_wipes_nor_goes_back(
    ledger_url: str, tmp_path: Path
) -> None:
    """The leader's trainer restarted under a newer id, and the standby still has the older one."""
    older: dict[str, Any] = {"run_id": "starts", "start_id": "job-1"}
    newer: dict[str, Any] = {"run_id": "starts", "start_id": "job-2", "resume_from_step": 0}
    with contextlib.ExitStack() as running:

        def started(**settings: Any) -> Orchestrator:
            return running.enter_context(orchestrator(tmp_path, ledger_url, **settings))

        first = started(start="fresh", **older)
        until(first.is_ready, "it leads")
        assert first.lease("kept").status_code == 200
        first.signal(signal.SIGKILL)
        second = started(**newer)
        until(lambda: second.is_alive() and lineage_of(second) == 1, "it went back")
        standby = started(start="fresh", **older)  # as its supervisor starts it again
        until(standby.is_alive, "it stands by")
        second.signal(signal.SIGKILL)
        until(lambda: lineage_of(standby) == 1, "it takes over, and goes on as job-2 left it")
        leases = standby.ask("GET", "/v1/leases").json()["leases"]
        assert [lease["rollout_id"] for lease in leases] == ["kept"]
        going_back = started(resume_from_step=0, **older)
        until(going_back.is_alive, "it stands by")
        standby.signal(signal.SIGKILL)
        until(lambda: going_back.process.poll() is not None, "it ends")
        assert b"Start job-2 has come since" in going_back.log.read_bytes()
