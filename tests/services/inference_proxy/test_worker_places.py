"""Where requests belong: every route has a place, and both ways of reading a request agree."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Scope

from services.inference_proxy.app import describe
from services.inference_proxy.workers.places import (
    LEADER,
    PLACES,
    place_of,
    place_of_head,
    place_of_scope,
    worker_of,
)

SESSIONS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,60}", fullmatch=True)
WORKERS = st.integers(1, 8)
PATHS = st.sampled_from(
    [
        *(path for path in PLACES if "{" not in path),
        "/v1/sessions/rollout-7",
        "/v1/engines/decode-0/eject",
        "/v1/engines/decode-0/return",
        "/nowhere",
    ]
)


def test_every_route_has_a_place_and_every_place_is_a_route() -> None:
    app = describe()
    own = {getattr(route, "path", "") for route in app.routes} - {""}  # the framework's
    assert {*app.openapi()["paths"], *own} == set(PLACES), (
        "say in workers/places.py where requests of a new route belong"
    )


def test_each_route_goes_where_its_state_is() -> None:
    session = b"rollout-7"
    own = worker_of(session, 4)
    for path, place in PLACES.items():
        asked = path.format(session_id="rollout-7", name="decode-0")
        expected = {"session": own, "named_session": own, "leader": LEADER, "here": None}[place]
        assert place_of(asked, session, 4) == expected, path
    assert place_of("/inference/v1/generate", None, 4) is None
    assert place_of("/nowhere", session, 4) is None


@given(SESSIONS, st.integers(2, 8))
def test_a_sessions_requests_and_its_end_belong_to_one_worker(session: str, workers: int) -> None:
    named = place_of(f"/v1/sessions/{session}", None, workers)
    for path in ("/inference/v1/generate", "/v1/chat/completions", "/v1/completions"):
        assert place_of(path, session.encode(), workers) == named
    assert named == worker_of(session.encode(), workers)


@given(
    path=PATHS,
    session=st.none() | SESSIONS,
    workers=WORKERS,
    name=st.sampled_from(["X-Sideband-Session", "x-sideband-session", "X-SIDEBAND-SESSION"]),
    space=st.sampled_from(["", " ", "  ", "\t"]),
    query=st.sampled_from(["", "?limit=3", "?a=/v1/sessions"]),
    before=st.booleans(),
)
def test_a_head_says_what_the_parsed_request_says(
    path: str,
    session: str | None,
    workers: int,
    name: str,
    space: str,
    query: str,
    before: bool,
) -> None:
    line = [] if session is None else [f"{name}:{space}{session}"]
    other = ["Host: proxy", "X-Sideband-Sessions: rollout-8"]
    lines = [*line, *other] if before else [*other, *line]
    head = "\r\n".join([f"POST {path}{query} HTTP/1.1", *lines]).encode()
    scope: Scope = {
        "path": path,
        "headers": [(b"host", b"proxy"), (b"x-sideband-sessions", b"rollout-8")],
    }
    if session is not None:
        scope["headers"].append((b"x-sideband-session", session.encode()))
    assert place_of_head(head, workers) == place_of_scope(scope, workers)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/sessions/rollout%2D7", "/v1/sessions/rollout-7"),
        ("/v1/engine%73", "/v1/engines"),
        ("/v1/engines?x=%41", "/v1/engines"),
        ("http://proxy:8000/v1/engines", "/v1/engines"),
        ("HTTP://proxy/v1/sessions/rollout%2D7?x#y", "/v1/sessions/rollout-7"),
        ("/v1/engines#x?y", "/v1/engines"),
        (" /v1/engines", "/v1/engines"),
        ("http://", ""),
        ("*", ""),
    ],
)
def test_any_form_of_a_path_is_read_as_the_server_reads_it(path: str, meant: str) -> None:
    assert place_of_head(f"GET {path} HTTP/1.1\r\nHost: p".encode(), 4) == place_of(meant, None, 4)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_head_of_somebody(head: bytes) -> None:
    worker = place_of_head(head, 4)
    assert worker is None or 0 <= worker < 4


def test_sessions_spread_evenly() -> None:
    counts = Counter(worker_of(b"rollout-%d" % number, 4) for number in range(4000))
    assert set(counts) == {0, 1, 2, 3}
    assert min(counts.values()) > 900
