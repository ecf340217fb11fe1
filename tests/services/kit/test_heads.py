"""What is no body has bounds, and every byte one meaning: heads, trailers, upgrades, pipelines."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest
from starlette.types import Receive, Scope, Send

from services.kit.heads import HEAD_BYTES_MAX
from services.kit.problems import SHOWN_CHARACTERS_MAX, ProblemBody
from services.kit.server import START, CallerProtocol
from tests.services.kit.test_server import (
    GET,
    HEADERS,
    LARGE,
    FakeTransport,
    answering,
    connected,
    nothing,
    settled,
    waiting,
)

CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
LENGTH = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n"
TOO_LARGE = b"GET / HTTP/1.1\r\nx-pad: " + b"x" * HEAD_BYTES_MAX + b"\r\n\r\n"
# The parser takes them, and whoever reads the address does not.
NO_ADDRESSES = (b"GET http://x", b"GET http:///a", b"GET http://a:b/", b"CONNECT a:80")
UPGRADE = b"host: x\r\nconnection: upgrade, http2-settings\r\nupgrade: %b\r\n"


class Seen:
    """An application that reads each body, notes it, and answers when ``gate`` opens."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[bytes, bytes], bytes]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        await self.gate.wait()
        self.requests.append((scope["path"], dict(scope["headers"]), body))
        await send({"type": START, "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": b"hello"})


def statuses(transport: FakeTransport) -> list[int]:
    return [int(part[:3]) for part in b"".join(transport.parts).split(b"HTTP/1.1 ")[1:]]


def refused(transport: FakeTransport) -> ProblemBody:
    """The body of the only answer."""
    content = b"".join(transport.parts).partition(b"\r\n\r\n")[2]
    return ProblemBody.model_validate_json(content)


async def fed(protocol: CallerProtocol, *parts: bytes) -> None:
    for part in parts:
        protocol.data_received(part)
        await settled()


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_what_follows_a_body_is_no_header(size: int) -> None:
    seen = Seen()
    protocol, transport = connected(seen)
    trailers = b"x-sideband-session: other\r\nauthorization: Bearer other\r\n"
    await fed(protocol, *cut(CHUNKED + b"3\r\nabc\r\n0\r\n" + trailers + b"\r\n" + GET, size))
    assert statuses(transport) == [200, 200]
    assert seen.requests == [
        ("/", {b"host": b"x", b"transfer-encoding": b"chunked"}, b"abc"),
        ("/", {b"host": b"x"}, b""),
    ]


@pytest.mark.parametrize("begin", [b"0\r\n", b"0\r\nx-t: ", b"3;"])
@pytest.mark.parametrize("field", [b"x-t: y\r\n", b"yyyyyyyy"])
async def test_what_is_neither_head_nor_body_has_the_bound_of_a_head(
    begin: bytes, field: bytes
) -> None:
    protocol, transport = connected(Seen())
    await fed(protocol, CHUNKED + b"3\r\nabc\r\n" + begin)
    sent_bytes = 0
    while not protocol.is_refused:
        protocol.data_received(field * 100)
        sent_bytes += len(field) * 100
        assert sent_bytes <= HEAD_BYTES_MAX + len(field) * 100
    assert statuses(transport) in ([], [400])


@pytest.mark.parametrize("size", [1, 5])
async def test_a_body_in_small_chunks_may_be_as_large_as_it_likes(size: int) -> None:
    seen = Seen()
    protocol, transport = connected(seen)
    body = b"".join(b"1\r\n%c\r\n" % (n % 10 + 48) for n in range(20_000)) + b"0\r\n\r\n"
    for part in cut(CHUNKED + body, size):
        protocol.data_received(part)
    await settled()
    assert statuses(transport) == [200]
    assert len(seen.requests[0][2]) == 20_000


@pytest.mark.parametrize("name", [b"h2c", b"websocket"])
@pytest.mark.parametrize(
    "framing", [b"content-length: %d\r\n" % len(GET), b"transfer-encoding: chunked\r\n"]
)
async def test_the_body_of_an_upgrade_is_never_a_request(name: bytes, framing: bytes) -> None:
    seen = Seen()
    protocol, transport = connected(seen)
    await fed(protocol, b"POST / HTTP/1.1\r\n" + UPGRADE % name + framing + b"\r\n", GET, GET)
    assert (statuses(transport), seen.requests) == ([400], [])
    assert "nothing is upgraded here" in refused(transport).detail


@pytest.mark.parametrize("length", [b"", b"content-length: 0\r\n"])
@pytest.mark.parametrize("name", [b"h2c", b"websocket"])
async def test_an_upgrade_without_a_body_is_answered_as_if_it_were_none(
    name: bytes, length: bytes
) -> None:
    seen = Seen()
    protocol, transport = connected(seen)
    head = b"GET /first HTTP/1.1\r\n" + UPGRADE % name + length + b"\r\n"
    await fed(protocol, head + GET, GET)
    assert statuses(transport) == [200]
    assert [path for path, _, _ in seen.requests] == ["/first"]
    assert transport.is_closed


@pytest.mark.parametrize(
    "wrong",
    [
        TOO_LARGE,
        b"\0bad",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        *(b"%b HTTP/1.1\r\nhost: x\r\n\r\n" % target for target in NO_ADDRESSES),
        CHUNKED + b"3\r\nabc\r\nnone\r\n",
    ],
)
@pytest.mark.parametrize("earlier", [GET, LENGTH + b"abcde", GET + GET])
@pytest.mark.parametrize("size", [997, 10**6])
async def test_what_is_wrong_with_a_request_does_not_answer_an_earlier_one(
    wrong: bytes, earlier: bytes, size: int
) -> None:
    seen = Seen()
    seen.gate.clear()
    protocol, transport = connected(seen)
    await fed(protocol, *cut(earlier + wrong, size), GET)
    assert (transport.parts, transport.is_closed) == ([], False)
    seen.gate.set()
    for _ in range(3):
        await settled()
    status = 431 if wrong is TOO_LARGE else 400
    assert statuses(transport) == [*[200] * earlier.count(b"HTTP/1.1"), status]
    assert not transport.is_closed
    await fed(protocol, GET)
    assert statuses(transport)[-1] == status
    protocol.timeout_keep_alive_handler()
    assert transport.is_closed


async def test_a_client_that_closes_after_its_answer_is_not_told_of_more() -> None:
    protocol, transport = connected(answering(send_whole=False))
    await fed(protocol, GET.replace(b"host", b"connection: close\r\nhost") + b"\0bad")
    assert (statuses(transport), transport.is_closed) == ([200], True)


@pytest.mark.parametrize("send_whole", [False, True])
async def test_a_request_that_was_answered_gets_no_second_answer(send_whole: bool) -> None:
    protocol, transport = connected(answering(send_whole))
    await fed(protocol, CHUNKED + b"3\r\nabc\r\n", b"none\r\n", GET)
    assert (statuses(transport), transport.is_closed) == ([200], True)


@pytest.mark.parametrize("earlier", [0, 1, 3])
async def test_a_broken_body_is_a_400_in_its_own_place(earlier: int) -> None:
    seen = Seen()
    seen.gate.clear()
    protocol, transport = connected(seen)
    await fed(protocol, GET * earlier + CHUNKED + b"3\r\nabc\r\nnone\r\n", GET)
    assert (statuses(transport), transport.is_closed) == ([] if earlier else [400], False)
    seen.gate.set()
    for _ in range(earlier + 1):
        await settled()
    assert statuses(transport) == [*[200] * earlier, 400]
    assert len(seen.requests) == earlier
    protocol.timeout_keep_alive_handler()
    assert transport.is_closed
    protocol.connection_lost(None)
    await settled()


async def test_nothing_is_said_after_the_refusal_of_a_body() -> None:
    async def hasty(_scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await send({"type": START, "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": b"hello"})

    protocol, transport = connected(hasty)
    await fed(protocol, CHUNKED + b"3\r\nabc\r\nnone\r\n")
    assert statuses(transport) == [400]
    assert not protocol.tasks, "it was told"
    body = refused(transport)
    assert (body.code, body.instance) == ("malformed_request", "/")


@pytest.mark.parametrize(
    ("data", "instance"),
    [
        (b"\0\1", ""),
        (b"G@T / HTTP/1.1\r\n\r\n", ""),
        (b"GET /a HTTP/1.1\r\nx y\r\n\r\n", "/a"),
        *zip(
            (b"%b HTTP/1.1\r\nhost: x\r\n\r\n" % target for target in NO_ADDRESSES),
            ("", "http:///a", "http://a:b/", "a:80"),
            strict=True,
        ),
    ],
)
async def test_what_is_no_request_is_a_problem_too(data: bytes, instance: str) -> None:
    protocol, transport = connected(Seen())
    await fed(protocol, data, GET)
    assert statuses(transport) == [400]
    assert refused(transport).instance == instance
    assert "the request line or a header" in refused(transport).detail


def head_of(size_bytes: int, lines: int) -> bytes:
    """A request without a body, of so many bytes, most of them in ``lines`` headers."""
    start = b"GET / HTTP/1.1\r\nhost: x\r\n"
    most = b"x-pad: 1234\r\n" * (lines - 1) + b"x-pad: "
    rest = size_bytes - len(start) - len(most) - len(b"\r\n\r\n")
    return start + most + b"x" * rest + b"\r\n\r\n"


@pytest.mark.parametrize("lines", [1, 1000])
@pytest.mark.parametrize(
    "cuts",
    [
        (),
        (9,),
        (60_000,),
        (9, 60_000),
        (30_000, 60_000, 90_000),
        range(0, HEAD_BYTES_MAX, 999),
    ],
)
@pytest.mark.parametrize(("over_bytes", "status"), [(0, 200), (1, 431), (200_000, 431)])
async def test_a_head_is_served_up_to_its_limit_in_whatever_parts(
    over_bytes: int, status: int, cuts: Sequence[int], lines: int
) -> None:
    protocol, transport = connected(answering(send_whole=True))
    head = head_of(HEAD_BYTES_MAX + over_bytes, lines)
    for start, stop in pairwise([0, *cuts, len(head)]):
        protocol.data_received(head[start:stop])
    await settled()
    assert len(transport.parts) == 1
    assert transport.parts[0].startswith(b"HTTP/1.1 %d " % status)
    assert (b'"code":"head_too_large"' in transport.parts[0]) == (status == 431)
    assert not transport.is_closed  # a client that sends reads the answer first


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/v1/run?limit=3", "/v1/run"),
        (b"http://feed/v1/run", "/v1/run"),
        (b"*", "*"),
        (b"/" + b"y" * 60_000, "/" + "y" * (SHOWN_CHARACTERS_MAX - 1)),
    ],
)
@pytest.mark.parametrize("size", [999, 10**6])
async def test_the_refusal_of_a_head_is_a_problem_that_names_its_path(
    target: bytes, path: str, size: int
) -> None:
    protocol, transport = connected(answering(send_whole=True))
    await fed(protocol, *cut(TOO_LARGE.replace(b" / ", b" %b " % target), size))
    body = refused(transport)
    assert (body.status, body.code, body.instance) == (431, "head_too_large", path)


async def test_what_is_no_head_is_a_400_however_much_comes() -> None:
    protocol, transport = connected(answering(send_whole=True))
    for part in (b"GET / HTTP/1.1\r\nhost", b": x\r\n\0bad" + b"x" * LARGE):
        protocol.data_received(part)
    assert b"".join(transport.parts).count(b"HTTP/1.1 ") == 1
    assert transport.parts[0].startswith(b"HTTP/1.1 400 ")


async def test_a_head_without_end_is_refused_and_read_no_further() -> None:
    protocol, transport = connected(answering(send_whole=True))
    protocol.data_received(b"GET / HTTP/1.1\r\nx-pad: ")
    for _ in range(HEAD_BYTES_MAX // 1024):
        protocol.data_received(b"x" * 1024)
    assert transport.parts == []
    for _ in range(100):
        protocol.data_received(b"x" * 1024)
    assert len(transport.parts) == 1
    assert transport.parts[0].startswith(b"HTTP/1.1 431 ")
    assert not transport.is_closed  # a client that sends reads the answer first
    protocol.timeout_keep_alive_handler()
    assert transport.is_closed


@pytest.mark.parametrize("cut", [0, 20])
async def test_a_body_is_no_part_of_the_head_that_follows_it(cut: int) -> None:
    protocol, transport = connected(waiting(nothing))
    first = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % LARGE + b"x" * LARGE
    for part in (first[:cut], first[cut:] + GET[:9], GET[9:]):
        protocol.data_received(part)
    await settled()
    assert b"".join(transport.parts).count(b"\r\n\r\nhello") == 2
