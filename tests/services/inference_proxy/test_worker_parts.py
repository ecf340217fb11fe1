"""Parts of several workers by themselves: parcels, what holds for all, and merged answers."""

import os
import socket

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from services.inference_proxy.admission import Gate
from services.inference_proxy.building import build_book
from services.inference_proxy.config import EngineSettings, ProxySettings
from services.inference_proxy.engines import EngineBook
from services.inference_proxy.identity import Said, Weights
from services.inference_proxy.schemas import EngineView, SessionView
from services.inference_proxy.views import engine_views
from services.inference_proxy.workers.merging import (
    merged_engines,
    merged_metrics,
    merged_sessions,
)
from services.inference_proxy.workers.parcels import (
    CALL,
    INLINE_BYTES_MAX,
    LONG,
    STARTED,
    Inbox,
    Outbox,
    Parcel,
    read,
    stop_reading,
)
from services.inference_proxy.workers.state import FollowingBook, adopt, restore, state_of
from services.kit.counting import Counts
from tests.services.inference_proxy.harness import until

ENGINES = tuple(EngineSettings(name=name, url=f"http://{name}") for name in ("e0", "e1"))


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


async def test_parcels_arrive_in_order_also_when_many_do_not_fit() -> None:
    inbox, count = Inbox.create(), 600
    outbox, taken = Outbox(inbox), list[bytes]()
    client, server = socket.socketpair()

    def take(parcel: Parcel) -> None:
        taken.append(parcel.received())
        parcel.close()

    with client, server, inbox.taking, inbox.sending:
        expected = [b"%d" % number + b"x" * 4096 for number in range(count)]
        for received in expected:
            outbox.post(Parcel.connection(server.fileno(), received))
        assert len(expected) * 4096 > inbox.sending.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        read(inbox, take)
        await until(lambda: len(taken) == count)
        stop_reading(inbox)
        assert taken == expected


async def test_a_connection_goes_on_in_the_hands_of_the_one_that_took_it() -> None:
    for size in (0, 10, INLINE_BYTES_MAX, INLINE_BYTES_MAX + 1, 1 << 20):
        inbox = Inbox.create()
        client, server = socket.socketpair()
        with client, inbox.taking, inbox.sending:
            received = os.urandom(size)
            with server:
                Outbox(inbox).post(Parcel.connection(server.fileno(), received))
            parcel = inbox.take()  # the sender's end is closed, the connection is not
            assert parcel is not None
            assert parcel.received() == received
            descriptors = list(parcel.descriptors)
            with socket.socket(fileno=parcel.descriptors.pop(0)) as taken:
                taken.sendall(b"here")
                assert client.recv(16) == b"here"
            parcel.close()
            assert not any(map(is_open, descriptors))
            assert client.recv(16) == b""
            assert inbox.take() is None


async def test_a_parcel_whose_descriptors_did_not_fit_is_lost_and_nothing_else() -> None:
    inbox = Inbox.create()
    outbox, (client, server) = Outbox(inbox), socket.socketpair()
    with client, server, inbox.taking, inbox.sending:
        held = [os.dup(server.fileno()) for _ in range(2)]
        for data, descriptors in ((LONG, held[:1]), (CALL, []), (STARTED + b"\0", held[1:])):
            outbox.post(Parcel(data, list(descriptors)))
        outbox.post(Parcel(STARTED + b"\1", []))
        open_before = len(os.listdir("/proc/self/fd"))
        parcel = inbox.take()
        assert parcel is not None
        assert parcel.data == STARTED + b"\1"
        assert len(os.listdir("/proc/self/fd")) == open_before


def book_of(kind: type[EngineBook]) -> EngineBook:
    book = build_book(ProxySettings(engines=ENGINES), None, kind)
    for engine in book:
        book.told(engine, Said(identity=None), run_id=None, known=engine.weights, doubts=0)
        book.probed(engine, now_s=0.0)
    return book


def test_what_the_leader_says_holds_in_a_follower_and_in_one_that_begins() -> None:
    leader, gate = book_of(EngineBook), Gate()
    leader.report(3)
    leader.hold("e1", "by hand")
    gate.pause()
    state = state_of(leader, gate, is_settled=True, number=1)
    follower, new = book_of(FollowingBook), build_book(ProxySettings(engines=ENGINES), None)
    assert isinstance(follower, FollowingBook)
    follower_gate, new_gate = Gate(), Gate()
    assert adopt(state, follower, follower_gate) == []
    restore(state, new, new_gate)
    for book, its in ((follower, follower_gate), (new, new_gate)):
        assert (its.state, book.applied) == ("paused", 3)
        views = engine_views(book)
        assert [(v.state, v.policy_version) for v in views] == [("healthy", 3), ("held", 3)]
    assert state_of(new, new_gate, is_settled=True, number=1) == state
    leader.release("e1")
    returned = adopt(state_of(leader, gate, is_settled=True, number=2), follower, follower_gate)
    assert [engine.name for engine in returned] == ["e1"]


def test_a_worker_that_begins_in_the_middle_asks_engines_what_they_are() -> None:
    state = state_of(book_of(EngineBook), Gate(), is_settled=True, number=1)
    new = build_book(ProxySettings(engines=ENGINES), None)
    restore(state, new, Gate())
    for run_id in (None, "run-1"):
        assert [new.must_ask(engine, run_id=run_id) for engine in new] == [True, True]
    for engine in new:
        new.told(engine, Said(identity=None), run_id=None, known=engine.weights, doubts=0)
    assert [new.must_ask(engine, run_id=None) for engine in new] == [False, False]


def test_a_report_reaches_a_worker_that_alone_found_older_weights() -> None:
    leader, gate, follower = book_of(EngineBook), Gate(), book_of(FollowingBook)
    assert isinstance(follower, FollowingBook)
    leader.report(3)
    before = state_of(leader, gate, is_settled=True, number=1)
    adopt(before, follower, Gate())
    engine = follower.get("e0")
    follower.behind(engine, Weights(policy_version=0, is_named=True), known=engine.weights)
    assert not follower.is_serving(engine)
    leader.report(3, ["e0"])  # it has them again; to the leader it always had
    after = state_of(leader, gate, is_settled=True, number=2)
    assert not after.says_the_same(before)
    adopt(after, follower, Gate())
    assert follower.is_serving(engine)


def test_an_engine_brought_back_by_hand_is_brought_back_where_it_was_ejected() -> None:
    leader, gate, follower = book_of(EngineBook), Gate(), book_of(FollowingBook)
    assert isinstance(follower, FollowingBook)
    follower.failed(follower.get("e0"), "nothing listens", now_s=0.0, is_dead=True)
    assert adopt(state_of(leader, gate, is_settled=True, number=1), follower, Gate()) == []
    assert follower.get("e0").health.state == "ejected"  # its own finding stands
    leader.release("e0")
    state = state_of(leader, gate, is_settled=True, number=2)
    assert [engine.name for engine in adopt(state, follower, Gate())] == ["e0"]
    assert adopt(state, follower, Gate()) == []  # once


def test_a_follower_changes_what_is_applied_by_nothing_of_its_own() -> None:
    follower = book_of(FollowingBook)
    assert isinstance(follower, FollowingBook)
    leader = book_of(EngineBook)
    leader.report(4, ["e0"])
    adopt(state_of(leader, Gate(), is_settled=True, number=1), follower, Gate())
    for book, applied in ((leader, 4), (follower, 0)):
        book.failed(book.get("e1"), "nothing listens", now_s=0.0, is_dead=True)
        assert book.applied == applied


def test_engines_of_all_workers_are_summed_and_one_that_is_out_anywhere_shows() -> None:
    first = engine_views(book_of(EngineBook))
    second = [
        view.model_copy(
            update={
                "in_flight": 2,
                "requests_total": 5,
                "failures": number,
                "state": "ejected" if number else "healthy",
                "is_serving": not number,
            }
        )
        for number, view in enumerate(first)
    ]
    merged = merged_engines([first, second])

    def facts(view: EngineView) -> tuple[object, ...]:
        return (view.name, view.state, view.is_serving, view.in_flight, view.requests_total)

    assert [facts(view) for view in merged] == [
        ("e0", "healthy", True, 2, 5),
        ("e1", "ejected", False, 2, 5),
    ]
    assert merged[1].failures == 1


def test_the_latest_sessions_of_each_worker_come_last() -> None:
    def views(*names: str) -> list[SessionView]:
        rest = {"turns_delivered": 0, "branches": 0, "tokens": 0, "files": 0, "in_flight": 0}
        return [SessionView(session_id=name, policy_version=0, **rest) for name in names]

    merged = merged_sessions([views("a", "b", "c"), views("x")], limit=3)
    assert [view.session_id for view in merged] == ["b", "x", "c"]
    assert len(merged_sessions([views("a", "b", "c"), views("x")], limit=10)) == 4
    assert merged_sessions([[], []], limit=3) == []


def test_metrics_of_all_workers_are_told_apart_by_a_label() -> None:
    def text(amount: float) -> bytes:
        registry = CollectorRegistry()
        Counts("proxy_a_total", "A.", ("kind",), registry=registry).add("train", amount=amount)
        Gauge("proxy_b", "B.", registry=registry).set(amount)
        return generate_latest(registry)

    merged = merged_metrics([(0, text(1.0)), (1, text(2.5))]).decode()
    families = {each.name: each for each in text_string_to_metric_families(merged)}
    assert {name: each.type for name, each in families.items()} == {
        "proxy_a": "counter",
        "proxy_b": "gauge",
    }
    samples = [(s.name, s.labels, s.value) for s in families["proxy_a"].samples]
    assert samples == [
        ("proxy_a_total", {"kind": "train", "worker": "0"}, 1.0),
        ("proxy_a_total", {"kind": "train", "worker": "1"}, 2.5),
    ]
    assert [s.value for s in families["proxy_b"].samples] == [1.0, 2.5]


def test_settings_are_shared_out_and_one_worker_has_all() -> None:
    whole = ProxySettings(workers=1, connections_max=7, kept_turns_max=0)
    assert whole.share() is whole
    part = ProxySettings(workers=4, connections_max=7, kept_turns_max=0, sessions_max=2).share()
    assert (part.connections_max, part.kept_turns_max, part.sessions_max) == (1, 0, 1)
    assert part.spill_bytes_max == whole.spill_bytes_max // 4
