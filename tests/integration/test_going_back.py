"""A trainer restarts from an earlier checkpoint: its ranks get the same steps again, bitwise."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from sideband.feed.errors import RankRefused, StepFailed
from sideband.feed.rank import RankFeed
from tests.integration.test_real_answers import CONFIG, roll_out
from tests.integration.way import WAIT_S, Way, running_way
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.test_recorded import SINGLE, recorded, replay

STEPS = 4
Seen = list[tuple[int, int, str]]


@contextmanager
def trainer(way: Way, **options: Any) -> Iterator[list[RankFeed]]:
    """All context-parallel ranks of one trainer process group."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                RankFeed(
                    way.endpoint,
                    dp_rank=0,
                    cp_rank=cp_rank,
                    payload_root=way.root,
                    threads=2,
                    step_timeout_s=WAIT_S,
                    **options,
                )
            )
            for cp_rank in range(way.cp_size)
        ]


def consume(feed: RankFeed, steps: int) -> Seen:
    """The next steps, committed: every array of every micro batch by its digest."""
    seen = []
    for step in islice(feed, steps):
        seen += [(batch.step, batch.index, batch.digest()) for batch in step]
        step.commit()
    return seen


async def all_consume(ranks: list[RankFeed], steps: int) -> list[Seen]:
    return list(await asyncio.gather(*(asyncio.to_thread(consume, rank, steps) for rank in ranks)))


async def until(way: Way, path: str, **facts: Any) -> None:
    """Wait until the orchestrator says so."""
    async with asyncio.timeout(WAIT_S):
        while True:
            view = (await way.orchestrator.get(path)).json()
            if facts.items() <= view.items():
                return
            await asyncio.sleep(0.02)


async def report(way: Way, version: int, **more: Any) -> None:
    answer = await way.proxy.http.post(
        "/v1/policy-version", json={"policy_version": version, **more}
    )
    assert answer.status_code == 200, answer.text


async def test_a_trainer_that_goes_back_consumes_the_same_steps_again_bitwise(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    engine = StubEngine()
    async with running_way(
        {"c0": engine},
        root=root,
        model_config=CONFIG,
        cp_size=2,
        seq_len=2048,
        step_rollouts=1,
        steps_ahead_max=STEPS,
        applied_steps_kept=STEPS - 1,
        feed_poll_s=0.02,
        proxy_poll_s=0.05,
    ) as way:
        for name in SINGLE[:STEPS]:
            engine.script.append(replay(recorded(f"{name}.response"), root))
            await roll_out(way, name, recorded(f"{name}.request"))
        with trainer(way) as before:
            first = await all_consume(before, STEPS)
            stale = {"run_id": before[0].run_id, "lineage": 0, "step": STEPS}
            await report(way, STEPS)
            await until(way, "/v1/steps/1", state="closed")
            await until(way, "/v1/policy-version", policy_version=STEPS)
            record = await way.orchestrator.post(
                "/v1/admin/go-back", json={"step": 1, "lineage": 1}
            )
            assert record.json()["steps_again"] == [2, 3, 4], record.text
            for rank in before:
                with pytest.raises(StepFailed, match="went back to step 1"):
                    await asyncio.to_thread(rank.next_micro_batch)
        with trainer(way, committed_step=STEPS) as unaware:
            for rank in unaware:
                with pytest.raises(RankRefused, match=r"went_back: .* went back to step 1"):
                    await asyncio.to_thread(rank.next_micro_batch)
        with trainer(way, committed_step=1) as after:
            second = await all_consume(after, STEPS - 1)
        await until(way, "/v1/steps/4", state="acknowledged")
        with trainer(way, resume=stale) as of_before:  # its number was reached again
            for rank in of_before:
                with pytest.raises(RankRefused, match="went_back: holds step 4 of lineage 0"):
                    await asyncio.to_thread(rank.next_micro_batch)
        refused = await way.orchestrator.post(
            "/v1/leases", json={"rollout_id": "n", "group_id": "n", "group_size": 1}
        )
        assert refused.json()["code"] == "policy_unknown", "the engines serve v4 of before"
        await report(way, 1, force=True)
        await until(way, "/v1/policy-version", policy_version=1)
        await report(way, STEPS)
        await until(way, "/v1/policy-version", policy_version=STEPS)
    assert len(second[0]) == STEPS - 1
    assert second == [[seen for seen in rank if seen[0] > 1] for rank in first]
