"""The decisions of the proxy without any HTTP: health, choice, versions, events, answers."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from services.inference_proxy.answers import Expected, MalformedAnswer, read_answer
from services.inference_proxy.book_errors import UnknownEngine, VersionBackwards
from services.inference_proxy.dialects.vllm import VllmDialect
from services.inference_proxy.engine import Engine
from services.inference_proxy.engines import EngineBook
from services.inference_proxy.events import EventSplitter, EventTooLarge, read_event
from services.inference_proxy.health import Health, HealthLimits
from services.inference_proxy.limits import ATTEMPTS_MAX
from services.inference_proxy.request_ids import AttemptIds, upstream_base
from services.inference_proxy.selection import choose
from sideband.ids import RequestId, RunId, SessionId

LIMITS = HealthLimits(failures_max=3, returns_min=2, backoff_s=10.0, backoff_s_max=35.0)


def healthy() -> Health:
    return Health(limits=LIMITS).probe_succeeded(now_s=0.0)


def test_three_failures_in_a_row_eject_and_a_success_between_does_not() -> None:
    health = healthy()
    for _ in range(2):
        health = health.failed("x", now_s=1.0)
    health = health.request_succeeded()
    for _ in range(2):
        health = health.failed("x", now_s=1.0)
    assert health.state == "healthy"
    assert health.failed("x", now_s=1.0).state == "ejected"


def test_an_engine_that_answers_probes_and_fails_requests_goes_too() -> None:
    health = healthy()
    for _ in range(3):
        health = health.failed("x", now_s=1.0).probe_succeeded(now_s=1.0)
    assert health.state == "ejected"


def test_an_engine_too_busy_for_probes_stays_while_it_answers() -> None:
    health = healthy()
    for _ in range(9):
        health = health.failed("late", now_s=1.0, is_probe=True).request_succeeded()
    assert health.state == "healthy"
    for _ in range(3):
        health = health.failed("late", now_s=1.0, is_probe=True)
    assert health.state == "ejected"


def test_a_dead_engine_is_out_at_once_and_back_after_backoff_and_two_probes() -> None:
    health = healthy().failed("refused", now_s=100.0, is_dead=True)
    assert (health.state, health.reason) == ("ejected", "refused")
    for now_s in (101.0, 105.0, 109.9):
        health = health.probe_succeeded(now_s=now_s)
        assert health.state == "ejected"
    assert health.probe_succeeded(now_s=110.0).state == "healthy"


def test_a_failed_probe_starts_the_count_of_successes_again() -> None:
    health = healthy().failed("refused", now_s=0.0, is_dead=True)
    health = health.probe_succeeded(now_s=50.0).failed("again", now_s=51.0)
    assert health.probe_succeeded(now_s=52.0).state == "ejected"
    assert health.probe_succeeded(now_s=52.0).probe_succeeded(now_s=53.0).state == "healthy"


def test_each_ejection_in_a_row_doubles_the_backoff_up_to_its_bound() -> None:
    health, waits = healthy(), []
    for _ in range(4):
        health = health.failed("refused", now_s=0.0, is_dead=True)
        waits.append(health.until_s)
        for _ in range(2):
            health = health.probe_succeeded(now_s=health.until_s)
    assert waits == [10.0, 20.0, 35.0, 35.0]
    health = health.request_succeeded().failed("refused", now_s=0.0, is_dead=True)
    assert health.until_s == 10.0


def test_a_held_engine_ignores_probes_and_failures_until_released() -> None:
    health = healthy().hold("maintenance")
    assert health.probe_succeeded(now_s=9.0).failed("x", now_s=9.0) == health
    assert health.release().probe_succeeded(now_s=9.0).state == "healthy"


@given(st.lists(st.sampled_from(["ok", "fail", "dead", "probe"]), max_size=40))
def test_an_engine_that_answers_probes_always_comes_back(events: list[str]) -> None:
    health, now_s = healthy(), 0.0
    for event in events:
        now_s += 1.0
        if event == "ok":
            health = health.request_succeeded()
        elif event == "probe":
            health = health.probe_succeeded(now_s=now_s)
        else:
            health = health.failed(event, now_s=now_s, is_dead=event == "dead")
    now_s += LIMITS.backoff_s_max
    for _ in range(LIMITS.returns_min):
        health = health.probe_succeeded(now_s=now_s)
    assert health.state == "healthy"


names = st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=8, unique=True)


@given(names, st.text("xyz", min_size=1, max_size=8))
def test_only_the_sessions_of_an_engine_that_leaves_move(names: list[str], session: str) -> None:
    key = SessionId(session)
    home = choose(names, in_flight={}, session=key)
    assert home == choose(list(reversed(names)), in_flight=dict.fromkeys(names, 9), session=key)
    for gone in names:
        rest = [name for name in names if name != gone]
        if rest and gone != home:
            assert choose(rest, in_flight={}, session=key) == home


@given(names, st.data())
def test_others_go_where_least_is_in_flight(names: list[str], data: st.DataObject) -> None:
    in_flight = {name: data.draw(st.integers(0, 3)) for name in names}
    chosen = choose(names, in_flight=in_flight)
    assert chosen is not None
    assert in_flight[chosen] == min(in_flight.values())


def test_an_engine_that_failed_is_avoided_while_another_serves() -> None:
    assert choose(["a", "b"], in_flight={"b": 9}, avoid={"a"}) == "b"
    assert choose(["a"], in_flight={}, avoid={"a"}) == "a"
    assert choose([], in_flight={}) is None


def book(count: int = 2) -> EngineBook:
    engines = [
        Engine(
            name=f"e{i}",
            url="",
            role="colocated",
            payload_mount=None,
            health=healthy(),
            dialect=VllmDialect(),
        )
        for i in range(count)
    ]
    return EngineBook(engines)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["report", "fail", "probe", "hold", "release"]),
            st.integers(0, 2),
            st.integers(0, 5),
        ),
        max_size=30,
    )
)
def test_the_applied_version_never_goes_back_and_all_that_serve_have_it(
    steps: list[tuple[str, int, int]],
) -> None:
    engines, applied = book(3), 0
    for action, index, version in steps:
        name = f"e{index}"
        if action == "report":
            with contextlib.suppress(VersionBackwards):
                engines.report(version, [name])
        elif action == "fail":
            engines.failed(engines.get(name), "x", now_s=0.0, is_dead=True)
        elif action == "probe":
            engines.probed(engines.get(name), now_s=1e6)
        elif action == "hold":
            engines.hold(name, "x")
        else:
            engines.release(name)
        assert engines.applied >= applied
        applied = engines.applied
        assert all(e.policy_version >= applied for e in engines if engines.is_serving(e))


def test_a_report_changes_all_engines_named_or_none() -> None:
    engines = book()
    engines.report(4, ["e0"])
    with pytest.raises(VersionBackwards):
        engines.report(3)
    with pytest.raises(UnknownEngine):
        engines.report(9, ["e1", "e7"])
    assert [engine.policy_version for engine in engines] == [4, 0]


@given(st.lists(st.binary(min_size=1, max_size=12), max_size=6), st.data())
def test_events_are_the_same_however_the_bytes_are_cut(
    contents: list[bytes], data: st.DataObject
) -> None:
    clean = [c.replace(b"\n", b".").replace(b"\r", b".") for c in contents]
    events = [b"data: " + content for content in clean]
    end = data.draw(st.sampled_from([b"\n\n", b"\r\n\r\n"]))
    stream = b"".join(event + end for event in events)
    splitter, found = EventSplitter(bytes_max=1 << 20), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += list(splitter.feed(stream[:size]))
        stream = stream[size:]
    assert found == [(event,) for event in events]
    assert splitter.rest() == ()


def test_an_event_is_bounded() -> None:
    splitter = EventSplitter(bytes_max=10)
    with pytest.raises(EventTooLarge):
        list(splitter.feed(b"data: 123456"))


@pytest.mark.parametrize("event", [b"data: [DONE]", b": ping", b"event: x", b"data: {", b"data: 1"])
def test_what_is_no_object_is_not_read(event: bytes) -> None:
    assert read_event((event,)) is None


@given(st.text("abc._:-", min_size=1, max_size=128), st.integers(1, ATTEMPTS_MAX))
def test_upstream_ids_are_legal_and_differ_per_attempt_and_leg(client: str, attempt: int) -> None:
    base = upstream_base(RequestId(client))
    ids = [
        AttemptIds(base, n).of(leg)
        for n in (attempt, attempt + 1)
        for leg in ("whole", "prefill", "decode")
    ]
    assert len(set(ids)) == 6
    assert all(len(request_id) <= 128 for request_id in ids)
    assert upstream_base(RequestId(client)) != base  # the same client id twice


EXPECTED = Expected(
    prompt_tokens=3, policy_version=2, run_id=RunId("run-1"), request_id=RequestId("r")
)
SEGMENT = {
    "field": "routed_experts",
    "file": "v2/run-1/0a/r-0123456789abcdef.sbp",
    "offset": 512,
    "row": 0,
    "pos": 0,
    "rows": 4,
    "dtype": "uint8",
    "shape": [2, 2],
}
MASK = {**SEGMENT, "field": "sampling_mask", "pos": 3, "rows": 2, "dtype": "int32", "shape": [64]}


def answer(*segments: object, key: str = "0", **members: object) -> dict[str, object]:
    choice = {"index": 0, "token_ids": [7, 8]}
    return {"choices": [choice], "payload_segments": {key: list(segments)}, **members}


def test_a_whole_answer_is_read() -> None:
    found = read_answer(answer(SEGMENT, MASK), EXPECTED)
    assert found.files == {SEGMENT["file"]}
    assert [segment.pos for segment in found.choices[0].segments] == [0, 3]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (answer({**SEGMENT, "pos": -1}), "pos"),
        (answer({**SEGMENT, "rows": 0}), "rows"),
        (answer({**SEGMENT, "rows": 5}), r"\[0, 5\) must lie in \[0, 4\)"),
        (answer({**SEGMENT, "rows": "4"}), "Expected `int`"),
        (answer({**SEGMENT, "offset": -1}), "offset"),
        (answer({**SEGMENT, "file": "/etc/passwd"}), "file"),
        (answer({**SEGMENT, "file": "v2/run-1/0a/../x.sbp"}), "file"),
        (answer({**SEGMENT, "file": SEGMENT["file"].replace("v2", "v3")}), "is not of v2"),  # type: ignore[attr-defined]
        (answer({**SEGMENT, "file": SEGMENT["file"].replace("run-1", "run-2")}), "run-2"),  # type: ignore[attr-defined]
        (answer({**SEGMENT, "file": SEGMENT["file"].replace("r-0", "q-0")}), "not named by"),  # type: ignore[attr-defined]
        (answer({**SEGMENT, "dtype": "int32"}), "dtype"),
        (answer({**SEGMENT, "shape": [4]}), "shape"),
        (answer({**SEGMENT, "field": "logits"}), "field"),
        (answer({**MASK, "pos": 2}), "sampling_mask"),
        (answer({**MASK, "rows": 3}), "sampling_mask"),
        (answer(SEGMENT, {**SEGMENT, "pos": 3, "rows": 1}), "overlap"),
        (answer(SEGMENT, key="1"), "segments a choice"),
        (answer(SEGMENT, key="x"), "keyed by choice"),
        (answer(payload_segments=[]), "keyed by choice"),
        (answer(payload_model={"num_layers": 1}), "payload_model"),
        (answer(routed_layer_ids="all"), "routed_layer_ids"),
        ({"choices": [{"index": -1}]}, "index"),
        ({"choices": [{"index": True}]}, "index"),
        ({"choices": ["x"]}, "objects"),
        ({"choices": [{"index": 0}, {"index": 0}]}, "own index"),
        ({"choices": [{"index": 0, "token_ids": [1.5]}]}, "token_ids"),
        ({"choices": [{"index": 0, "routed_experts": [[1]]}]}, "base64"),
    ],
)
def test_each_kind_of_malformed_answer_is_refused(body: object, said: str) -> None:
    with pytest.raises(MalformedAnswer, match=said):
        read_answer(body, EXPECTED)


def test_segments_that_nobody_asked_for_are_refused() -> None:
    unasked = structs.replace(EXPECTED, run_id=None)
    with pytest.raises(MalformedAnswer, match="without a payload_dir"):
        read_answer(answer(SEGMENT), unasked)


@pytest.mark.parametrize(
    ("params", "status", "message", "is_refusal"),
    [
        ({"temperature": 0.0, "top_k": 5}, 500, "", True),
        ({"temperature": 1.0}, 500, "", True),
        ({"top_k": 5}, 500, "", False),
        ({"temperature": 0.0}, 500, "out of memory", False),
        ({"temperature": 0.0}, 503, "", False),
    ],
)
def test_a_mask_refusal_is_told_from_a_crash(
    params: dict[str, object], status: int, message: str, is_refusal: bool
) -> None:
    error = {"error": {"message": message, "code": status}}
    found = VllmDialect().is_mask_refusal({"sampling_params": params}, status, error)
    assert found is is_refusal
