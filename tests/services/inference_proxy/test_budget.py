"""The bound on bytes that are held at the same time."""

import asyncio

import pytest

from services.inference_proxy.budget import ByteBudget


async def settled() -> None:
    """Let everything that can go on go on."""
    for _ in range(5):
        await asyncio.sleep(0)


class Holder:
    """Claims, and holds until it is told to let go."""

    def __init__(self, budget: ByteBudget, size_bytes: int) -> None:
        self.has_it = False
        self.release = asyncio.Event()
        self.task = asyncio.create_task(self._hold(budget, size_bytes))

    async def _hold(self, budget: ByteBudget, size_bytes: int) -> None:
        async with budget.claim(size_bytes):
            self.has_it = True
            await self.release.wait()

    async def let_go(self) -> None:
        self.release.set()
        await self.task
        await settled()


async def test_claims_beyond_the_bound_wait_in_order() -> None:
    budget = ByteBudget(10)
    first, large, small = Holder(budget, 6), Holder(budget, 8), Holder(budget, 1)
    await settled()
    # The small one would fit, but then a large one could wait for ever.
    assert [h.has_it for h in (first, large, small)] == [True, False, False]
    await first.let_go()
    assert [h.has_it for h in (large, small)] == [True, True]
    assert budget.held_bytes == 9
    await large.let_go()
    await small.let_go()
    assert budget.held_bytes == 0


async def test_more_than_everything_waits_to_be_alone() -> None:
    budget = ByteBudget(10)
    small, huge = Holder(budget, 1), Holder(budget, 1000)
    await settled()
    assert not huge.has_it
    await small.let_go()
    assert huge.has_it
    await huge.let_go()
    assert budget.held_bytes == 0


@pytest.mark.parametrize("is_served_first", [False, True])
async def test_a_cancelled_wait_gives_its_place_up(is_served_first: bool) -> None:
    budget = ByteBudget(10)
    first, waiting, last = Holder(budget, 10), Holder(budget, 7), Holder(budget, 4)
    await settled()
    if is_served_first:  # in the same turn of the loop: served, and cancelled before it runs
        first.release.set()
        await asyncio.sleep(0)
    waiting.task.cancel()
    await settled()
    assert not waiting.has_it
    await first.let_go()
    assert last.has_it
    await last.let_go()
    assert budget.held_bytes == 0
