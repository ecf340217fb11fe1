"""How the feed starts: its settings, its address, its keys."""

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from services.trainer_feed.app import create_app
from sideband.feed.errors import BadKeyFile, FeedTimeout
from sideband.feed.keys import RankKeys, make_keys, read_pair
from tests.services.trainer_feed.serving import put, rank, running, settings, step_of


async def test_readiness_follows_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    has_broken = asyncio.Event()

    async def broken(_: object) -> None:
        await has_broken.wait()
        raise RuntimeError("a bug")

    monkeypatch.setattr("services.trainer_feed.app.watch_loop", broken)
    app = create_app(settings())
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://feed") as client:
            assert (await client.get("/readyz")).status_code == 200
            has_broken.set()
            async with asyncio.timeout(5):
                while not app.crash.has_happened:  # noqa: ASYNC110 - state is polled
                    await asyncio.sleep(0.005)
            assert (await client.get("/readyz")).json()["reasons"] == ["a background task crashed"]


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
