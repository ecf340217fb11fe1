"""The trainer goes back, the end is taken back, the feed is another process."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from sideband.feed.codec import encode_step
from sideband.feed.outgoing import OutgoingStep, outgoing_step
from tests.services.trainer_feed.serving import (
    BINARY,
    WAIT_S,
    put,
    rank,
    read_closed,
    running,
    step_of,
)


async def test_a_step_meant_for_another_process_of_the_feed_is_not_taken() -> None:
    async with running() as (client, _):
        before = (await client.get("/v1/steps")).json()["feed_instance"]
        receipt = await put(client, step_of(1), **{"sideband-feed-instance": before})
        assert receipt.status_code == 201
        assert receipt.json()["feed_instance"] == before
    async with running() as (client, _):
        answer = await put(client, step_of(2), **{"sideband-feed-instance": before})
        assert answer.status_code == 412
        assert answer.json()["code"] == "feed_restarted"
        held = (await client.get("/v1/steps")).json()
        assert held["steps"] == []
        assert answer.json()["feed_instance"] == held["feed_instance"] != before
        assert (await client.get("/v1/acknowledgements")).json()["feed_instance"] != before
        assert (await put(client, step_of(1))).status_code == 201


async def test_the_trainer_goes_back_once_for_each_lineage() -> None:
    async with running() as (client, _):
        for number in (1, 2, 3):
            assert (await put(client, step_of(number))).status_code == 201
        before = (await client.get("/v1/steps")).json()
        assert before["lineage"] == 0
        told = {"lineage": 1, "step": 1, "last_step": 3}
        answer = await client.put("/v1/lineage", json=told)
        assert answer.status_code == 200
        assert answer.json()["steps_dropped"] == [2, 3]
        on_its_way = await put(
            client, step_of(4), **{"sideband-feed-instance": before["feed_instance"]}
        )
        assert on_its_way.status_code == 412, "it was meant for what is not held any more"
        again = await client.put("/v1/lineage", json=told)
        assert again.json() == {**answer.json(), "steps_dropped": []}
        assert (await client.get("/v1/acknowledgements")).json()["lineage"] == 1
        other = await client.put("/v1/lineage", json={**told, "step": 2})
        assert (other.status_code, other.json()["code"]) == (409, "lineage_conflict")
        wrong = await client.put("/v1/lineage", json={**told, "last_step": 0})
        assert wrong.status_code == 422
        assert (await put(client, step_of(2))).status_code == 201


async def test_a_new_feed_whose_ranks_are_ahead_of_the_orchestrator_goes_on() -> None:
    async with running() as (client, endpoint):
        with rank(endpoint, 0, committed_step=3), rank(endpoint, 1, committed_step=3):
            async with asyncio.timeout(WAIT_S):
                while (await client.get("/v1/ranks")).json()["waiting_for"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert (await put(client, step_of(1))).status_code == 201
            held = (await client.get("/v1/steps")).json()
            assert (held["steps"], held["last_step"]) == ([], 1)
            said = (await client.get("/v1/acknowledgements")).json()
            assert said["committed_step"] == 3, "so 2 and 3 are never sent"
            assert (await put(client, step_of(4))).status_code == 201
            held = (await client.get("/v1/steps")).json()
            assert [step["step"] for step in held["steps"]] == [4]


async def test_only_the_process_that_is_meant_ends() -> None:
    async with running() as (client, _):
        instance = (await client.get("/v1/steps")).json()["feed_instance"]
        refused = await client.post("/v1/end", headers={"sideband-feed-instance": "another"})
        assert (refused.status_code, refused.json()["code"]) == (412, "feed_restarted")
        assert (await put(client, step_of(1))).status_code == 201
        meant = await client.post("/v1/end", headers={"sideband-feed-instance": instance})
        assert meant.json()["state"] == "ending"


async def test_a_step_that_is_read_while_the_trainer_goes_back_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, may_go_on = threading.Event(), threading.Event()

    def slow(body: bytes, *, lineage: int) -> OutgoingStep:
        began.set()
        assert may_go_on.wait(WAIT_S)
        return outgoing_step(body, lineage=lineage)

    async with running() as (client, _):
        assert (await put(client, step_of(1))).status_code == 201
        held = (await client.get("/v1/steps")).json()
        monkeypatch.setattr("sideband.feed.server.outgoing_step", slow)
        sending = asyncio.create_task(
            put(client, step_of(2), **{"sideband-feed-instance": held["feed_instance"]})
        )
        assert await asyncio.to_thread(began.wait, WAIT_S)
        told = {"lineage": 1, "step": 1, "last_step": 1}
        assert (await client.put("/v1/lineage", json=told)).status_code == 200
        may_go_on.set()
        answer = await sending
        assert (answer.status_code, answer.json()["code"]) == (412, "feed_restarted")
        assert answer.json()["detail"] == "step 2: came in lineage 0, the run is at lineage 1"
        assert (await client.get("/v1/steps")).json()["last_step"] == 1
        assert (await put(client, step_of(2))).status_code == 201


@pytest.mark.parametrize("names_process", [True, False])
async def test_a_step_that_comes_while_the_trainer_goes_back_is_not_taken(
    names_process: bool,
) -> None:
    began, may_go_on, body = asyncio.Event(), asyncio.Event(), encode_step(step_of(2))

    async def slow() -> AsyncIterator[bytes]:
        yield body[:100]
        began.set()
        await may_go_on.wait()
        yield body[100:]

    async with running() as (client, _):
        assert (await put(client, step_of(1))).status_code == 201
        instance = (await client.get("/v1/steps")).json()["feed_instance"]
        named = {"sideband-feed-instance": instance} if names_process else {}
        sending = asyncio.create_task(
            client.put("/v1/steps/2", content=slow(), headers={**BINARY, **named})
        )
        async with asyncio.timeout(WAIT_S):
            await began.wait()
        told = {"lineage": 1, "step": 1, "last_step": 1}
        assert (await client.put("/v1/lineage", json=told)).status_code == 200
        may_go_on.set()
        answer = await sending
        assert (answer.status_code, answer.json()["code"]) == (412, "feed_restarted")
        assert (await client.get("/v1/steps")).json()["last_step"] == 1
        assert (await put(client, step_of(2))).status_code == 201


async def test_the_end_is_taken_back_and_new_ranks_go_on() -> None:
    async with running() as (client, endpoint):
        assert (await put(client, step_of(1))).status_code == 201
        await client.post("/v1/end")
        first = await asyncio.gather(*(asyncio.to_thread(read_closed, endpoint, r) for r in (0, 1)))
        refused = await put(client, step_of(2))
        assert (refused.status_code, refused.json()["code"]) == (409, "feed_ended")
        assert (await client.delete("/v1/end")).json()["state"] == "streaming"
        assert (await put(client, step_of(2))).status_code == 201
        await client.post("/v1/end")
        second = await asyncio.gather(
            *(asyncio.to_thread(read_closed, endpoint, r) for r in (0, 1))
        )
        assert {step for rank in first for step, *_ in rank} == {1}
        assert {step for rank in second for step, *_ in rank} == {2}
