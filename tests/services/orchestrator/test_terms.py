"""A failed commit is a 503, never hidden and never built upon; nothing is shown too early."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.kit.background import Crash
from services.orchestrator import ending, leasing
from services.orchestrator.app import describe
from services.orchestrator.errors import LedgerUnavailable
from services.orchestrator.ledger import LeadershipLost, Ledger, LedgerError, LedgerFailed
from services.orchestrator.records import Change
from services.orchestrator.service import Orchestrator
from services.orchestrator.sweep import VersionPlan, orphaned_versions
from services.orchestrator.sweeping import sweep, sweep_rules
from services.orchestrator.terms import Terms
from tests.services.orchestrator.plain_ledger import PlainLedger
from tests.services.orchestrator.support import (
    Bench,
    assert_problem,
    files_of,
    orchestrator,
    plain_turn,
)

RETRY_S = 30.0
LEASE = {"rollout_id": "r0", "group_id": "r0", "group_size": 1}


class FaultyLedger(PlainLedger):
    """Fails, hangs or waits when a test says so."""

    is_durable = True

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[LedgerError] = []
        self.commits = 0
        self.is_lost_after = False  # it fails after it has kept what it was given
        self.gate, self.is_asked = asyncio.Event(), asyncio.Event()
        self.gate.set()

    async def commit(self, changes: Sequence[Change]) -> None:
        self.is_asked.set()
        await self.gate.wait()
        if self.errors and any(changes):
            error = self.errors.pop(0)
            if self.is_lost_after:
                self.apply(changes)
            raise error
        self.commits += any(changes)
        self.apply(changes)


@asynccontextmanager
async def bench_on(tmp_path: Path, ledger: FaultyLedger, **settings: Any) -> AsyncIterator[Bench]:
    # Nothing is committed but what a test asks for: the version stays, time stands still.
    async with orchestrator(
        tmp_path,
        by_handle=False,
        ledger=ledger,
        with_proxy=False,
        initial_policy_version=0,
        step_rollouts=9,
        **settings,
    ) as bench:
        yield bench


async def retried(bench: Bench, path: str, body: dict[str, Any]) -> httpx.Response:
    """As a client does: again after a 503, until the service is back.

    Waits between terms grow to seconds, and a busy machine adds to them: bounded by time.
    """
    async with asyncio.timeout(RETRY_S):
        while (answer := await bench.http.post(path, json=body)).status_code == 503:
            assert answer.headers["retry-after"]
            await asyncio.sleep(0.02)
    return answer


@pytest.mark.parametrize("is_lost_after", [False, True])
async def test_a_failed_commit_is_a_503_and_the_run_is_read_again(
    tmp_path: Path, is_lost_after: bool
) -> None:
    ledger = FaultyLedger()
    async with bench_on(tmp_path, ledger) as bench:
        ledger.errors, ledger.is_lost_after = [LedgerFailed("the disk is full")], is_lost_after
        answer = await bench.http.post("/v1/leases", json=LEASE)
        problem = assert_problem(answer, 503, "ledger_unavailable")
        assert problem["detail"]
        answer = await retried(bench, "/v1/leases", LEASE)
        assert answer.status_code == 200
        assert answer.json()["index"] == 0, "the failed one was kept whole, or not at all"
        assert bench.service.book.next_lease_index == 1
        assert await bench.metric("orchestrator_terms_total") == 2


async def test_what_waits_behind_a_failed_commit_fails_with_it(tmp_path: Path) -> None:
    ledger = FaultyLedger()
    async with bench_on(tmp_path, ledger) as bench:
        ledger.gate.clear()
        ledger.errors = [LedgerFailed("as told")]
        bodies = [{**LEASE, "rollout_id": f"r{n}", "group_id": f"r{n}"} for n in range(5)]
        ledger.is_asked.clear()
        asked = [asyncio.create_task(bench.http.post("/v1/leases", json=bodies[0]))]
        await ledger.is_asked.wait()  # the first is on its way to the disk
        asked += [asyncio.create_task(bench.http.post("/v1/leases", json=b)) for b in bodies[1:]]
        await bench.until(lambda: bench.service.journal.pending == 5, "all wait")
        ledger.gate.set()
        for answer in await asyncio.gather(*asked):
            assert_problem(answer, 503, "ledger_unavailable")
        for number, body in enumerate(bodies):
            answer = await retried(bench, "/v1/leases", body)
            assert answer.json()["index"] == number


async def test_a_commit_that_hangs_has_failed(tmp_path: Path) -> None:
    ledger = FaultyLedger()
    async with bench_on(tmp_path, ledger, ledger_commit_timeout_s=0.5) as bench:
        ledger.gate.clear()
        answer = await bench.http.post("/v1/leases", json=LEASE)
        assert_problem(answer, 503, "ledger_unavailable")
        ledger.gate.set()
        assert (await retried(bench, "/v1/leases", LEASE)).status_code == 200


async def test_while_the_ledger_is_away_every_answer_is_a_503_and_it_is_not_ready(
    tmp_path: Path,
) -> None:
    ledger = FaultyLedger()
    async with bench_on(tmp_path, ledger) as bench:
        ledger.errors = [LedgerFailed("away")] * 3  # the change of a new term fails too
        await bench.http.post("/v1/leases", json=LEASE)
        assert_problem(await bench.http.get("/v1/run"), 503, "ledger_unavailable")
        assert_problem(await bench.http.get("/readyz"), 503, "not_ready")
        assert (await bench.http.get("/healthz")).status_code == 200
        assert (await retried(bench, "/v1/leases", LEASE)).status_code == 200


CHANGES: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/v1/leases", {**LEASE, "rollout_id": "new", "group_id": "new"}),
    ("POST", "/v1/leases/{lease_id}/renew", {"files": []}),
    ("DELETE", "/v1/leases/{lease_id}", None),
    ("POST", "/v1/rollouts", {"rollout_id": "r1", "status": "failed"}),
    ("DELETE", "/v1/rollouts/r0", None),
    ("PUT", "/v1/policy-version", {"policy_version": 1}),
    ("POST", "/v1/admin/pause", None),
    ("POST", "/v1/admin/resume", None),
    ("POST", "/v1/admin/drain", None),
    ("POST", "/v1/admin/go-back", {"step": 0}),
]


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
async def test_no_change_is_answered_before_it_is_durable(
    tmp_path: Path, method: str, path: str, body: dict[str, Any] | None
) -> None:
    ledger = FaultyLedger()
    async with bench_on(tmp_path, ledger, lease_timeout_s=600.0) as bench:
        await bench.lease("r0")
        await bench.deliver("r0", plain_turn("r0.t0", [1, 2], [3]))
        lease_id = (await bench.lease("r1"))["lease_id"]
        if path.endswith("/resume"):
            await bench.http.post("/v1/admin/pause")
        commits = ledger.commits
        ledger.errors = [LedgerFailed("as told")]
        answer = await bench.http.request(method, path.format(lease_id=lease_id), json=body)
        assert_problem(answer, 503, "ledger_unavailable")
        assert ledger.commits == commits, "nothing was kept"


async def test_every_request_that_changes_something_is_tried() -> None:
    document = describe().openapi()["paths"]
    changing = {
        (method.upper(), path)
        for path, operations in document.items()
        for method in operations
        if method != "get"
    }
    tried = {(method, path.replace("/r0", "/{rollout_id}")) for method, path, _ in CHANGES}
    # A sweep changes nothing that is decided, and a run is reopened through the feed.
    assert changing - tried == {("POST", "/v1/admin/sweep"), ("POST", "/v1/admin/reopen")}


async def test_a_repeat_and_a_view_wait_for_what_they_show(tmp_path: Path) -> None:
    ledger = FaultyLedger()
    async with bench_on(tmp_path, ledger) as bench:
        await bench.lease("r0")
        ledger.gate.clear()
        turn = plain_turn("r0.t0", [1, 2], [3])
        asked = [
            asyncio.create_task(bench.deliver("r0", turn)),
            asyncio.create_task(bench.deliver("r0", turn)),
            asyncio.create_task(bench.http.get("/v1/rollouts/r0")),
            asyncio.create_task(bench.http.get("/v1/run")),
            asyncio.create_task(bench.http.post("/v1/leases", json=LEASE)),
        ]
        await bench.until(lambda: "r0" in bench.service.book.rollouts, "it is decided")
        await asyncio.sleep(0.05)
        shown = [task for task in asked if task.done()]
        # A view that was asked for before the decision may be out; it shows nothing of it.
        assert all(task.result().status_code == 404 for task in shown)
        ledger.gate.set()
        answers = await asyncio.gather(*asked)
        assert {answer.status_code for answer in answers[:2]} == {202}
        assert answers[0].text == answers[1].text


async def test_a_client_that_leaves_does_not_take_its_change_back(tmp_path: Path) -> None:
    ledger = FaultyLedger()
    async with bench_on(tmp_path, ledger) as bench:
        ledger.gate.clear()
        asked = asyncio.create_task(bench.http.post("/v1/leases", json=LEASE))
        await bench.until(lambda: bench.service.journal.pending == 1, "it is decided")
        asked.cancel()
        ledger.gate.set()
        await bench.service.settled()
        records = ledger.records()
        assert records is not None
        assert [lease.rollout_id for lease in records.leases] == ["r0"]


async def test_too_much_that_waits_for_the_ledger_is_refused_before_it_is_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.orchestrator.journal.CHANGES_WAITING_MAX", 2)
    ledger = FaultyLedger()
    async with bench_on(tmp_path, ledger, tick_s=60) as bench:
        ledger.gate.clear()
        bodies = [{**LEASE, "rollout_id": f"r{n}", "group_id": f"r{n}"} for n in range(3)]
        asked = []
        for count, body in enumerate(bodies, start=1):
            asked.append(asyncio.create_task(bench.http.post("/v1/leases", json=body)))
            await bench.until(lambda n=count: bench.service.journal.pending == n, "it waits")  # type: ignore[misc]
        late = {**LEASE, "rollout_id": "late", "group_id": "late"}
        answer = await bench.http.post("/v1/leases", json=late)
        assert_problem(answer, 503, "ledger_behind")
        assert answer.headers["retry-after"]
        assert "late" not in bench.service.book.lease_of
        ledger.gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        assert (await bench.http.post("/v1/leases", json=late)).status_code == 200


async def test_a_decision_that_breaks_half_way_is_not_built_upon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = FaultyLedger()
    async with bench_on(tmp_path, ledger) as bench:
        lease = await bench.lease("r0")
        renew = leasing.renew

        def broken(book: Any, *arguments: Any) -> Any:
            renew(book, *arguments)
            raise RuntimeError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(leasing, "renew", broken)
            ledger.saved_s = bench.clock.now_s = bench.clock.now_s + 50  # no time is lost
            url = f"/v1/leases/{lease['lease_id']}/renew"
            assert_problem(await bench.http.post(url, json={}), 500, "internal_error")
        answer = await retried(bench, "/v1/leases", LEASE)
        assert answer.json()["deadline_s"] == lease["deadline_s"], "the half is gone"


async def test_a_process_that_was_overtaken_says_who_leads(tmp_path: Path) -> None:
    ledger = FaultyLedger()
    async with bench_on(tmp_path, ledger, ledger_lease_s=0.5) as bench:
        await bench.lease("other")
        ledger.errors = [LeadershipLost("http://other:8200")] * 3
        answer = await bench.http.post("/v1/leases", json=LEASE)
        assert answer.status_code == 503
        answer = await bench.http.get("/v1/run")
        problem = assert_problem(answer, 503, "not_leading")
        assert problem["leader"] == "http://other:8200"
        assert answer.headers["retry-after"]
        answer = await retried(bench, "/v1/leases", LEASE)
        assert answer.status_code == 200
        assert answer.json()["index"] == 1, "it stood by, and wiped nothing"


async def test_the_sweep_deletes_nothing_that_an_unwritten_decision_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit fails: the lease is open again, and needs its file."""
    ledger = FaultyLedger()
    async with orchestrator(
        tmp_path, ledger=ledger, with_proxy=False, initial_policy_version=0
    ) as bench:
        lease = await bench.lease("r0")
        turn = await bench.write("r0.t0", [1, 2], [3])
        renewed = await bench.http.post(
            f"/v1/leases/{lease['lease_id']}/renew", json={"files": sorted(files_of(turn))}
        )
        assert renewed.status_code == 200, renewed.text
        service, is_planned = bench.service, asyncio.Event()
        assert service.files is not None
        planned = service.files.planned

        async def noted(*asked: Any) -> VersionPlan | None:
            plan = await planned(*asked)
            is_planned.set()
            return plan

        monkeypatch.setattr(service.files, "planned", noted)
        ledger.gate.clear()
        ledger.errors.append(LedgerFailed("as told"))
        with service.decision() as change:
            ended = service.book.run.ended("as told")
            ending.set_run(service.book, change, ended, service.clock_s())
        ending_run = asyncio.create_task(service.commit(change))
        assert orphaned_versions([0], sweep_rules(service.book)) == [0]
        sweeping = asyncio.create_task(sweep(service, dry_run=False))
        await is_planned.wait()
        ledger.gate.set()
        for task in (ending_run, sweeping):
            with pytest.raises(LedgerUnavailable):
                await task
        again = (await retried(bench, "/v1/leases", LEASE)).json()
        assert (again["lease_id"], again["state"]) == (lease["lease_id"], "open")
        assert bench.on_disk() == files_of(turn)


async def test_what_another_one_led_is_never_begun_anew() -> None:
    """Whatever the settings of the one that stood by say of the start."""
    first_terms: list[bool] = []
    others = [LeadershipLost("the other")]

    @asynccontextmanager
    async def open_ledger() -> AsyncIterator[FaultyLedger]:
        if others:
            raise others.pop()
        yield FaultyLedger()

    @asynccontextmanager
    async def serve(_ledger: Ledger, is_first: bool) -> AsyncIterator[Orchestrator]:
        first_terms.append(is_first)
        raise LedgerFailed("as told")
        yield

    terms = Terms(open_ledger, serve, standby_poll_s=0.001, crash=Crash())
    async with terms.running():
        async with asyncio.timeout(RETRY_S):
            while not first_terms:  # noqa: ASYNC110 - what is waited for sets no event
                await asyncio.sleep(0.001)
    assert first_terms == [False]
