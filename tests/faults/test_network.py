"""Ranks behind links with faults: each micro batch once, in order, and progress when faults end."""

import contextlib
import gc
import socket
import threading
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sideband.feed.rank import RankFeed
from tests.faults.network import FaultyLink, faulty_link
from tests.faults.seeds import Chance
from tests.faults.test_filesystem import GRID, Seen, steps_of, truth
from tests.unit.feed.live import LiveFeed, in_parallel, live_feed, plan_of, read_all

CALM_AFTER_S = 2.5
PEER_TIMEOUT_S = 0.6  # of both sides: a half-open link is noticed after it
LONG_S = 40.0


def behind(feed: LiveFeed, link: FaultyLink, dp: int, cp: int, root: Path) -> RankFeed:
    """A rank that knows the feed by the link's address."""
    rank = RankFeed(
        link.endpoint,
        dp_rank=dp,
        cp_rank=cp,
        payload_root=root,
        threads=2,
        step_timeout_s=LONG_S,
        join_timeout_s=LONG_S,
        commit_timeout_s=LONG_S,
        peer_timeout_s=PEER_TIMEOUT_S,
    )
    feed.ranks.append(rank)
    return rank


def port_of(feed: LiveFeed) -> int:
    port = urlsplit(feed.bound).port
    assert port is not None
    return port


@pytest.mark.timeout(120)
def test_a_bad_network_loses_and_repeats_nothing(chance: Chance, tmp_path: Path) -> None:
    root = tmp_path / "root"
    inline, by_handle = steps_of(root)
    expected = truth(inline, root)
    rates = {"split": 0.3, "delay": 0.2, "reset": 0.03, "half_open": 0.02, "refuse": 0.1}
    with (
        live_feed(plan_of(by_handle[0], peer_timeout_s=PEER_TIMEOUT_S)) as feed,
        faulty_link(chance, port_of(feed), rates) as link,
    ):
        for step in by_handle:
            feed.put(step)
        feed.do(lambda server: server.end())
        calm = threading.Timer(CALM_AFTER_S, link.calm)
        calm.start()
        ranks = [behind(feed, link, dp, cp, root) for dp, cp in GRID]
        seen = in_parallel([partial(read_all, rank) for rank in ranks])
        feed.until(lambda delivery: delivery.is_drained)
        calm.cancel()
        calm.join()
        in_parallel([rank.close for rank in ranks])
    assert seen == expected
    assert chance.injected


def take(rank: RankFeed, steps: int) -> Seen:
    """The digests of so many steps, committed."""
    seen: Seen = []
    for step in rank:
        seen += [(batch.step, batch.index, batch.digest()) for batch in step]
        step.commit()
        steps -= 1
        if not steps:
            break
    return seen


@pytest.mark.timeout(120)
def test_a_split_holds_everybody_up_and_heals(tmp_path: Path) -> None:
    """One rank is cut off: the others wait, and nobody gets ahead or anything twice."""
    root = tmp_path / "root"
    inline, by_handle = steps_of(root)
    expected = truth(inline, root)
    with (
        live_feed(plan_of(by_handle[0], peer_timeout_s=PEER_TIMEOUT_S)) as feed,
        faulty_link(Chance(0), port_of(feed), {}) as link,
    ):
        feed.put(by_handle[0])
        cut_off = behind(feed, link, 1, 1, root)
        others = [
            feed.rank(dp, cp, payload_root=root, step_timeout_s=LONG_S) for dp, cp in GRID[:3]
        ]
        ranks = [*others, cut_off]
        first = in_parallel([partial(take, rank, 1) for rank in ranks])
        link.split()
        feed.until(lambda delivery: delivery.ranks[3].connection is None)
        for step in by_handle[1:]:
            feed.put(step)
        feed.do(lambda server: server.end())
        healing = threading.Timer(1.0, link.heal)
        healing.start()
        rest = in_parallel([partial(read_all, rank) for rank in ranks])
        healing.join()
        feed.until(lambda delivery: delivery.is_drained)
    assert [one + more for one, more in zip(first, rest, strict=True)] == expected


@pytest.mark.parametrize("is_target_there", [True, False])
def test_a_link_that_closes_leaves_no_connection_open(is_target_there: bool) -> None:
    """Whatever it was accepting, or had yet to reach; an open one is a warning, and so an error."""
    with socket.socket() as target:
        target.bind(("127.0.0.1", 0))
        if is_target_there:
            target.listen()
        for late in range(40):
            with faulty_link(Chance(late), target.getsockname()[1], {}) as link:
                clients = [socket.socket() for _ in range(1 + late % 5)]
                for client in clients:
                    client.settimeout(LONG_S)
                    with contextlib.suppress(ConnectionResetError):
                        client.connect(("127.0.0.1", link.port))
            for client in clients:
                with client, contextlib.suppress(ConnectionResetError, BrokenPipeError):
                    client.sendall(b"?")
                    assert client.recv(1) == b""
    gc.collect()
