"""The orchestrator dies between any two steps of its loop, again and again: nothing is lost.

Deaths come between turns of the event loop: before and after every await, and around each write
of the ledger, which fails by itself now and then, sometimes after it has kept what it was given.
In every second seed the trainer goes back to earlier checkpoints, by request and by the settings of
a start, which come again with every crash: its steps come again bitwise.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from unittest.mock import patch

import pytest
import structlog

from services.orchestrator.ledger import LedgerFailed
from tests.faults.simulated_orchestrator import Process
from tests.faults.simulated_world import CrashingLoop, Dead, World, inline
from tests.survived import note

SEEDS = 200
PIECES = 10  # tests, so that they spread over workers and time out one by one
LIVES_MAX = 400
CRASHES_MAX = 8


def live_through(seed: int) -> World:
    """One run to its end, with crashes. The world afterwards."""
    world = World(seed)
    for _ in range(LIVES_MAX):
        loop = CrashingLoop()
        loop.set_exception_handler(lambda *_: None)
        if world.crashes < CRASHES_MAX:
            loop.turns_left = world.random.choice([5, 20, 60, 150, 400]) + world.random.randrange(
                40
            )
        try:
            loop.run_until_complete(Process(world).run())
        except Dead:
            world.crashes += 1
        except LedgerFailed:
            pass  # the term ended by itself: the next one begins
        else:
            return world
        finally:
            bury(loop, world)
    raise AssertionError(f"seed {seed}: no end after {LIVES_MAX} lives")


def bury(loop: CrashingLoop, world: World) -> None:
    """What is left of the process ends, and reaches nothing."""
    world.is_dead, loop.turns_left = True, -1

    async def end() -> None:
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    ending = loop.create_task(end())
    while not ending.done():
        with contextlib.suppress(RuntimeError):  # stopped by what was left of the first run
            loop.run_until_complete(ending)
    loop.close()
    world.is_dead = False


def check(seed: int, world: World) -> None:
    """The promises, against the truth that the environment and the ranks saw."""
    accepted = {name for name, state in world.acknowledged.items() if state == "accepted"}
    assert set(world.acknowledged) == set(world.names), f"seed {seed}: everything was answered"
    assert accepted == set(world.names) - world.bad
    assert world.trained == Counter(dict.fromkeys(accepted, 1)), f"seed {seed}: each exactly once"
    assert world.committed == max(world.steps), f"seed {seed}: every step was trained"
    assert not world.disk, f"seed {seed}: files are left: {sorted(world.disk)[:3]}"
    records = world.ledger.records()
    assert records is not None
    assert not any(records.files.values()), f"seed {seed}: deletions are pending"
    assert not world.ledger.bodies, f"seed {seed}: samples are kept that nobody needs"
    starts = Counter(record.start_id for record in records.returns if record.start_id is not None)
    assert set(starts.values()) <= {1}, f"seed {seed}: a start goes back once"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("piece", range(PIECES))
def test_nothing_is_lost_trained_twice_or_left_behind(
    piece: int, request: pytest.FixtureRequest
) -> None:
    logging.disable(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        with patch("asyncio.to_thread", inline):
            crashes, returns, starts = 0, 0, 0
            for seed in range(piece, SEEDS, PIECES):
                world = live_through(seed)
                check(seed, world)
                crashes += world.crashes
                returns += world.returns
                starts += world.starts
            assert crashes > SEEDS // PIECES, "the seeds do crash"
            assert returns > SEEDS // PIECES or piece % 2, "the trainer does go back"
            assert starts > SEEDS // PIECES // 2 or piece % 2, "also with a start"
        counts = {"crashes": crashes, "returns": returns, "starts": starts}
        note(request.node, "simulated lives", range(piece, SEEDS, PIECES), counts)
    finally:
        structlog.reset_defaults()
        logging.disable(logging.NOTSET)
