"""The feed service over HTTP with real ranks over ZMQ: steps in, acknowledgements out."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from services.trainer_feed.app import create_app
from services.trainer_feed.config import FeedSettings
from sideband.feed.codec import STEP_CONTENT_TYPE, Step, encode_step
from sideband.feed.committer import StepCommitter
from sideband.feed.errors import BadKeyFile, FeedTimeout
from sideband.feed.keys import RankKeys, make_keys, read_pair
from sideband.feed.outgoing import OutgoingStep, outgoing_step
from sideband.feed.rank import RankFeed
from sideband.ids import RunId
from tests.unit.feed.builders import make_step
from tests.unit.feed.live import read_all

BINARY = {"content-type": STEP_CONTENT_TYPE}
WAIT_S = 10.0


def settings(**changes: Any) -> FeedSettings:
    return FeedSettings(
        **{"run_id": "run-a", "endpoint": "tcp://127.0.0.1:*", "cp_size": 2, **changes}
    )


@asynccontextmanager
async def running(**changes: Any) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    app = create_app(settings(**changes))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://feed", timeout=WAIT_S
        ) as client:
            yield client, app.state.server.bound_endpoint


def step_of(number: int, **changes: Any) -> Step:
    return make_step(
        **{"step": number, "form": None, "model": None, "dp_size": 1, "cp_size": 2, **changes}
    )


async def put(client: httpx.AsyncClient, step: Step, **headers: str) -> httpx.Response:
    return await client.put(
        f"/v1/steps/{step.step}", content=encode_step(step), headers={**BINARY, **headers}
    )


def rank(endpoint: str, cp_rank: int, **options: Any) -> RankFeed:
    return RankFeed(
        endpoint, dp_rank=0, cp_rank=cp_rank, threads=2, step_timeout_s=WAIT_S, **options
    )


def train(endpoint: str, cp_rank: int) -> list[tuple[int, int, str]]:
    with rank(endpoint, cp_rank) as feed:
        return read_all(feed)


async def test_steps_go_in_over_http_and_are_acknowledged_by_every_rank() -> None:
    async with running() as (client, endpoint):
        assert (await put(client, step_of(1))).status_code == 201
        ranks = [asyncio.create_task(asyncio.to_thread(train, endpoint, cp)) for cp in range(2)]
        receipt = (await put(client, step_of(2))).json()
        assert receipt["is_new"]
        assert receipt["micro_batch_count"] == step_of(2).micro_batch_count
        assert (await client.post("/v1/end")).json()["state"] in {"ending", "drained"}
        drained = (await client.post("/v1/admin/drain", params={"timeout_s": WAIT_S})).json()
        assert drained == {
            "state": "drained",
            "steps_held": [],
            "waiting_for": [],
            "is_complete": True,
        }
        seen = await asyncio.gather(*ranks)
        assert {place[0] for place in seen[0]} == {1, 2}
        acknowledged = (await client.get("/v1/acknowledgements")).json()
        assert acknowledged["committed_step"] == 2
        assert acknowledged["ranks"] == [
            {"global_rank": 0, "committed_step": 2},
            {"global_rank": 1, "committed_step": 2},
        ]
        metrics = (await client.get("/metrics")).text
        assert "feed_steps_committed_total 2.0" in metrics
        assert "feed_committed_step 2.0" in metrics
        assert "feed_ranks_expected 2.0" in metrics
        assert re.search(r"feed_loop_delay_seconds_count [1-9]", metrics)


async def test_a_repeat_is_told_apart_from_another_content() -> None:
    async with running() as (client, _):
        assert (await put(client, step_of(1))).status_code == 201
        again = await put(client, step_of(1))
        assert (again.status_code, again.json()["is_new"]) == (200, False)
        other = await put(client, step_of(1, seq_len=64))
        assert (other.status_code, other.json()["code"]) == (409, "step_conflict")


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"run_id": RunId("run-b")}, 409, "other_run"),
        ({"dp_size": 2}, 409, "other_grid"),
        ({"cp_size": 4}, 409, "other_grid"),
        ({"layout": "zigzag"}, 409, "other_grid"),
        ({"step": 4}, 409, "step_out_of_order"),
    ],
)
async def test_a_step_that_does_not_fit_is_refused_by_name(
    changes: dict[str, Any], status: int, code: str
) -> None:
    async with running() as (client, _):
        await put(client, step_of(1))
        refused = await put(client, step_of(**{"number": 2, **changes}))
        assert (refused.status_code, refused.json()["code"]) == (status, code)
        assert refused.headers["content-type"] == "application/problem+json"
        assert [held["step"] for held in (await client.get("/v1/steps")).json()["steps"]] == [1]


async def test_a_body_that_is_no_step_names_the_element() -> None:
    async with running() as (client, _):
        body = encode_step(step_of(1))
        wrong = await client.put("/v1/steps/1", content=body, headers={"content-type": "a/b"})
        assert (wrong.status_code, wrong.json()["code"]) == (415, "wrong_content_type")
        torn = await client.put("/v1/steps/1", content=body[:-3], headers=BINARY)
        assert (torn.status_code, torn.json()["element"]) == (422, "body")
        newer = body.replace(b"sideband.step\x01", b"sideband.step\x02")
        later = await client.put("/v1/steps/1", content=newer, headers=BINARY)
        assert (later.status_code, later.json()["code"]) == (422, "unreadable_step")
        moved = await client.put("/v1/steps/2", content=body, headers=BINARY)
        assert (moved.status_code, moved.json()["element"]) == (422, "step")
        assert (await client.get("/v1/steps")).json()["steps"] == []


async def test_a_full_or_paused_feed_says_when_to_come_again() -> None:
    async with running(steps_held_max=1) as (client, _):
        assert (await client.post("/v1/admin/pause")).json()["state"] == "paused"
        paused = await put(client, step_of(1))
        assert (paused.status_code, paused.json()["code"]) == (503, "feed_paused")
        assert (await client.post("/v1/admin/resume")).json()["state"] == "waiting_for_ranks"
        assert (await put(client, step_of(1))).status_code == 201
        full = await put(client, step_of(2))
        assert (full.status_code, full.json()["code"]) == (503, "feed_full")
        assert full.headers["retry-after"] == "1"
        assert full.json()["steps_held"] == 1


async def test_past_its_quota_the_feed_names_the_rank_that_is_gone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with running(steps_held_max=1) as (client, endpoint):
        await put(client, step_of(1))
        present, gone = [await asyncio.to_thread(rank, endpoint, cp) for cp in range(2)]
        await asyncio.gather(*(asyncio.to_thread(r.next_micro_batch) for r in (present, gone)))
        full = (await put(client, step_of(2))).json()
        assert (full["status"], full["blocking"]) == (503, [])  # all are there: only slow
        await asyncio.to_thread(gone.close)
        for _ in range(2):
            full_again = await put(client, step_of(2))
            assert full_again.headers["retry-after"] == "1"
            assert full_again.json()["blocking"] == [1]
            assert "not there: rank 1" in full_again.json()["detail"]
        assert capsys.readouterr().out.count("intake_blocked") == 1  # one alarm, not one a try
        metrics = (await client.get("/metrics")).text
        assert "feed_intake_blocked_total 2.0" in metrics
        assert "feed_blocking_ranks 1.0" in metrics
        tasks = [asyncio.to_thread(commit_one, endpoint, cp) for cp in range(2)]
        await asyncio.gather(asyncio.to_thread(present.close), *tasks)
        assert (await put(client, step_of(2))).status_code == 201
        assert "feed_blocking_ranks 2.0" in (await client.get("/metrics")).text


def commit_one(endpoint: str, global_rank: int) -> None:
    with StepCommitter(endpoint, run_id="run-a", global_rank=global_rank) as committer:
        committer.commit(1)


async def test_nothing_follows_the_end() -> None:
    async with running() as (client, _):
        await put(client, step_of(1))
        assert (await client.post("/v1/end")).json()["state"] == "ending"
        late = await put(client, step_of(2))
        assert (late.status_code, late.json()["code"]) == (409, "feed_ended")


async def test_a_drain_ends_at_its_deadline_and_names_who_is_missing() -> None:
    async with running() as (client, endpoint):
        await put(client, step_of(1))
        one = await asyncio.to_thread(rank, endpoint, 0)
        try:
            drained = await client.post("/v1/admin/drain", params={"timeout_s": 0.3})
            assert drained.json()["is_complete"] is False
            assert drained.json()["waiting_for"] == [1]
            assert drained.json()["steps_held"] == [1]
        finally:
            await asyncio.to_thread(one.close)


async def test_ranks_and_steps_show_who_has_what() -> None:
    async with running() as (client, endpoint):
        await put(client, step_of(1))
        ranks = [await asyncio.to_thread(rank, endpoint, cp) for cp in range(2)]
        try:
            batches = await asyncio.gather(
                *(asyncio.to_thread(one.next_micro_batch) for one in ranks)
            )
            assert all(batch is not None for batch in batches)
            shown = (await client.get("/v1/ranks")).json()
            assert [one["is_connected"] for one in shown["ranks"]] == [True, True]
            assert [one["cp_rank"] for one in shown["ranks"]] == [0, 1]
            assert shown["ranks"][0]["delivered"][0] == 1 or shown["ranks"][0]["delivered"] == [
                2,
                0,
            ]
            step = (await client.get("/v1/steps/1")).json()
            assert step["uncommitted_ranks"] == [0, 1]
            assert (await client.get("/v1/steps/9")).json()["code"] == "unknown_step"
        finally:
            await asyncio.gather(*(asyncio.to_thread(one.close) for one in ranks))
        gone = (await client.get("/v1/ranks")).json()
        assert [one["is_connected"] for one in gone["ranks"]] == [False, False]
        assert gone["waiting_for"] == [0, 1]


async def test_a_failed_step_is_shown_with_rank_and_reason() -> None:
    async with running(cp_size=1) as (client, endpoint):
        await put(client, make_step(step=1, dp_size=1, cp_size=1))
        one = await asyncio.to_thread(rank, endpoint, 0)
        try:
            with pytest.raises(Exception, match="payload_root"):
                await asyncio.to_thread(one.next_micro_batch)
            await asyncio.to_thread(one.close)  # it leaves only when its failure is known
            acks = (await client.get("/v1/acknowledgements")).json()
            assert acks["failed"]["step"] == 1
            assert acks["failed"]["global_rank"] == 0
            assert "payload_root" in acks["failed"]["reason"]
            assert (await client.post("/v1/admin/resume")).json()["state"] == "failed"
            assert (await client.get("/metrics")).text.count("feed_steps_failed_total 1.0") == 1
        finally:
            await asyncio.to_thread(one.close)


async def test_readiness_follows_the_socket() -> None:
    app = create_app(settings())
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://feed") as client:
            assert (await client.get("/readyz")).status_code == 200
            app.state.background.cancel()
            await asyncio.wait({app.state.background})
            assert (await client.get("/readyz")).json()["reasons"] == ["the feed's socket crashed"]


async def test_an_address_in_use_ends_the_start() -> None:
    async with running() as (_, endpoint):
        app = create_app(settings(endpoint=endpoint))
        with pytest.raises(Exception, match="Address already in use"):
            async with app.router.lifespan_context(app):
                pass


@pytest.mark.parametrize(
    "changes",
    [
        {"endpoint": "http://x"},
        {"rank_count": 3},
        {"peer_timeout_s": 20, "rank_lost_fails_after_s": 5},
        {"run_id": "a/b"},
        {"run_id": ".."},
        {"steps_held_max": 0},
        {"endpoint": "tcp://0.0.0.0:5600"},
        {"endpoint": "tcp://*:5600"},
        {"curve_key_file": "feed.key_secret"},
        {"curve_ranks_dir": "ranks"},
    ],
)
def test_settings_out_of_range_fail_at_start(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        settings(**changes)


def test_beyond_loopback_the_feed_needs_keys_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    beyond = {"endpoint": "tcp://0.0.0.0:5600"}
    assert settings(**beyond, plain_beyond_loopback=True).keys() is None
    keys = settings(**beyond, **keys_in(tmp_path)).keys()
    assert keys is not None
    assert keys.ranks_dir == tmp_path / "ranks"


def keys_in(folder: Path) -> dict[str, Path]:
    make_keys(folder)
    return {"curve_key_file": folder / "feed.key_secret", "curve_ranks_dir": folder / "ranks"}


async def test_ranks_with_keys_are_fed_and_a_peer_without_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank_keys = RankKeys(feed_key=tmp_path / "feed.key", rank_key=tmp_path / "rank.key_secret")
    async with running(cp_size=1, **keys_in(tmp_path)) as (client, endpoint):
        await put(client, step_of(1, cp_size=1))
        with rank(endpoint, 0, join_timeout_s=0.5) as stranger:
            with pytest.raises(FeedTimeout, match="keys"):
                await asyncio.to_thread(stranger.next_micro_batch)
            assert (await client.get("/v1/ranks")).json()["ranks"][0]["instance"] is None
        with rank(endpoint, 0, keys=rank_keys) as own:
            batch = await asyncio.to_thread(own.next_micro_batch)
            assert batch is not None
        metrics = (await client.get("/metrics")).text
        assert re.search(r'feed_peers_denied_total\{reason="\w+"\} [1-9]', metrics)
        config = (await client.get("/v1/config")).text
    shown = capsys.readouterr()
    for name in ("feed", "rank"):
        secret = read_pair(tmp_path / f"{name}.key_secret").secret.decode()
        assert secret not in shown.out + shown.err + config + metrics


async def test_keys_that_others_may_read_end_the_start(tmp_path: Path) -> None:
    app = create_app(settings(**keys_in(tmp_path)))
    (tmp_path / "feed.key_secret").chmod(0o644)
    with pytest.raises(BadKeyFile, match="chmod 600"):
        async with app.router.lifespan_context(app):
            pass


def test_siblings_count_as_ranks_of_their_own() -> None:
    assert settings(dp_size=2, cp_size=2, rank_count=8).plan().rank_count == 8
    assert settings(dp_size=2, cp_size=2).plan().rank_count == 4


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


def read_closed(endpoint: str, cp_rank: int) -> list[tuple[int, int, str]]:
    with rank(endpoint, cp_rank) as feed:
        return read_all(feed)
