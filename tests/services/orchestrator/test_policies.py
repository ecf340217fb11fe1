"""Past policy versions: which, since when, from which step, by whose word."""

from pathlib import Path
from typing import Any

from services.orchestrator import policies
from services.orchestrator.book import Book
from services.orchestrator.records import Change
from tests.services.orchestrator.support import Bench
from tests.services.orchestrator.test_book import RULES
from tests.services.orchestrator.test_going_back import collect, go_back
from tests.services.orchestrator.test_resume import World


async def listed(bench: Bench) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await bench.http.get("/v1/policy-versions")).json()[
        "policy_versions"
    ]
    return found


async def test_versions_are_listed_with_their_times_over_a_restart(tmp_path: Path) -> None:
    world = World(tmp_path, with_proxy=False, applied_steps_kept=2)
    async with world.life(initial_policy_version=0) as bench:
        await collect(bench, "a")
        await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
        bench.feed.commit(1)
        await bench.until(
            lambda: bench.service.book.steps[1].acknowledged_s is not None, "it is committed"
        )
        world.clock.now_s = 1060.0
        for _ in range(2):  # the same version again is no news
            await bench.http.put("/v1/policy-version", json={"policy_version": 1})
        await go_back(bench, 0)
        world.clock.now_s = 1100.0
        await bench.http.put("/v1/policy-version", json={"policy_version": 1})  # of before
        await bench.http.put("/v1/policy-version", json={"policy_version": 0})
        before = await listed(bench)
    facts = [
        (one["number"], one["policy_version"], one["lineage"], one["applied_s"], one["trained_s"])
        for one in before
    ]
    assert facts == [
        (0, 0, 0, 1000.0, None),
        (1, 1, 0, 1060.0, 1000.0),
        (2, 0, 1, 1100.0, None),
    ]
    assert [one["source"] for one in before] == ["setting", "push", "push"]
    async with world.life(initial_policy_version=0) as bench:
        assert await listed(bench) == before


async def test_what_the_proxy_answers_is_told_apart_and_no_news_after_a_restart(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    for _ in range(2):
        async with world.life() as bench:
            found = await listed(bench)
            assert [(one["policy_version"], one["source"]) for one in found] == [(0, "poll")]


def test_the_oldest_are_forgotten_beyond_the_bound() -> None:
    book, change = Book(RULES), Change()
    count = RULES.history_max + 3
    for version in range(count):
        policies.report(book, change, version, source="push", now_s=1.0 * version)
    assert len(book.policies) == RULES.history_max
    assert change.policies_forgotten == [0, 1, 2]
    assert book.policies[-1].number == count - 1
