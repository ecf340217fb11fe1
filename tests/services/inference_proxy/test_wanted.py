"""The scope around a request: it ends by leaving, by discard, by deadline, or not at all."""

import asyncio
from typing import Any

import pytest

from services.inference_proxy.sessions import Session
from services.inference_proxy.wanted import (
    ClientGone,
    DeadlinePassed,
    SessionDiscarded,
    while_wanted,
)
from services.kit.server import PlainCaller
from sideband.ids import SessionId


async def never() -> Any:
    await asyncio.Event().wait()


async def gone_soon() -> Any:
    await asyncio.sleep(0.01)
    return {"type": "http.disconnect"}


async def gone_now() -> Any:
    return {"type": "http.disconnect"}


@pytest.mark.parametrize("receive", [gone_soon, gone_now])
async def test_leaving_cancels_the_body(receive: Any) -> None:
    cleaned_up = False

    async def body() -> None:
        nonlocal cleaned_up
        async with while_wanted(PlainCaller(receive), deadline_s=5):
            try:
                await never()
            finally:
                await asyncio.sleep(0)  # clean-up may wait
                cleaned_up = True

    with pytest.raises(ClientGone):
        await body()
    assert cleaned_up


async def test_a_deadline_and_a_discard_say_which_they_were() -> None:
    with pytest.raises(DeadlinePassed):
        async with while_wanted(PlainCaller(never), deadline_s=0.01):
            await never()
    session = Session(session_id=SessionId("s"), policy_version=0)

    asyncio.get_running_loop().call_later(0.01, lambda: [t() for t in session.on_discard])
    with pytest.raises(SessionDiscarded):
        async with while_wanted(PlainCaller(never), deadline_s=5, session=session):
            await never()
    assert session.on_discard == set()


async def test_what_is_done_stays_done_even_if_the_client_leaves_right_then() -> None:
    left = asyncio.Event()

    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    for _ in range(50):
        left.clear()
        result = None
        async with while_wanted(PlainCaller(receive), deadline_s=5):
            await asyncio.sleep(0)
            left.set()
            result = 1
        assert result == 1


async def test_other_timeouts_and_errors_pass_through() -> None:
    with pytest.raises(TimeoutError):
        async with while_wanted(PlainCaller(never), deadline_s=5), asyncio.timeout(0.01):
            await never()
    with pytest.raises(KeyError):
        async with while_wanted(PlainCaller(never), deadline_s=5):
            raise KeyError


async def test_a_cancelled_request_stays_cancelled() -> None:
    async def body() -> None:
        async with while_wanted(PlainCaller(never), deadline_s=5):
            await never()

    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
