"""One connection, fed byte by byte: where an answer ends, and what may follow it."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference_proxy.connection import (
    HEAD_BYTES_MAX,
    UNREAD_BYTES_MAX,
    Connection,
    ConnectionBroke,
)

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX: y\r\n\r\nwhole"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b"2;x=1\r\nwh\r\n3\r\nole\r\n0\r\nx-trailer: 1\r\n\r\n"
)
CONTINUED = b"HTTP/1.1 100 Continue\r\nx-early: 1\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n" + LENGTH
CLOSING = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nwhole"
OLD = b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nwhole"
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\n\r\nwhole"
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
FAR_S = 1e9


class Pipe(asyncio.Transport):
    """Keeps what is written, and who may write."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.takes_more, self.is_aborted = True, False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        self.is_aborted = True

    def pause_reading(self) -> None:
        self.takes_more = False

    def resume_reading(self) -> None:
        self.takes_more = True


async def asked() -> tuple[Connection, Pipe, list[Connection]]:
    """A connection over which a request went."""
    ended: list[Connection] = []
    connection, pipe = Connection(ended.append), Pipe()
    connection.connection_made(pipe)
    await connection.send(b"GET / HTTP/1.1\r\n\r\n", b"", write_s=1.0)
    return connection, pipe, ended


async def whole(connection: Connection) -> bytes:
    data = b""
    while part := await connection.read(FAR_S):
        data += part
    return data


@pytest.mark.parametrize(
    ("said", "is_kept", "body"),
    [
        (LENGTH, True, b"whole"),
        (CHUNKED, True, b"whole"),
        (CONTINUED, True, b"whole"),
        (CLOSING, False, b"whole"),
        (OLD, False, b"whole"),
        (EMPTY, True, b""),
    ],
)
@given(data=st.data())
def test_an_answer_is_the_same_however_its_bytes_come(
    said: bytes, is_kept: bool, body: bytes, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(said) - 1))))
    parts = [said[a:b] for a, b in zip([0, *cuts], [*cuts, len(said)], strict=True)]

    async def run() -> None:
        connection, _, ended = await asked()
        for part in parts:
            connection.data_received(part)
        await connection.wait_for_head(FAR_S)
        assert await whole(connection) == body
        assert connection.is_reusable == is_kept
        assert (connection.status, ended) == (204 if said is EMPTY else 200, [])
        names = [name.lower() for name, _ in connection.headers]
        assert b"x-early" not in names
        assert b"x-trailer" not in names

    asyncio.run(run())


@pytest.mark.parametrize(
    ("begin", "field", "what"),
    [
        (b"", b"HTTP/1.1 103 Early Hints\r\nx: y\r\n\r\n", "head"),
        (b"HTTP/1.1 200 OK\r\nx: ", b"yyyyyyyy", "head"),
        (CHUNKED[:-2], b"x-trailer: y\r\n", "fields behind its body"),
        (CHUNKED[:-2] + b"x: ", b"yyyyyyyy", "fields behind its body"),
        (CHUNKED[:-2].partition(b"wh")[0][:-2] + b";", b"yyyyyyyy", "fields behind its body"),
    ],
)
async def test_what_is_no_body_has_a_bound(begin: bytes, field: bytes, what: str) -> None:
    connection, pipe, _ = await asked()
    connection.data_received(begin)
    sent_bytes = 0
    while not pipe.is_aborted:
        connection.data_received(field * 100)
        sent_bytes += 100 * len(field)
        assert sent_bytes <= HEAD_BYTES_MAX + 100 * len(field)
    with pytest.raises(ConnectionBroke, match=f"the answer's {what} has more than"):
        await connection.send(b"", b"", write_s=1.0)


async def test_a_body_without_a_length_ends_with_its_connection() -> None:
    connection, _, ended = await asked()
    connection.data_received(UNTIL_CLOSED)
    assert await connection.read(FAR_S) == b"whole"
    connection.connection_lost(None)
    assert await connection.read(FAR_S) == b""
    assert not connection.is_reusable
    assert ended == [connection]


@pytest.mark.parametrize("said", [LENGTH[:-1], CHUNKED[:-1], UNTIL_CLOSED])
async def test_a_torn_answer_is_never_whole(said: bytes) -> None:
    connection, _, ended = await asked()
    connection.data_received(said)
    connection.connection_lost(ConnectionResetError("reset") if said is UNTIL_CLOSED else None)
    with pytest.raises(ConnectionBroke):
        await whole(connection)
    assert ended == [connection]


@pytest.mark.parametrize("rest", [LENGTH, b"HTTP/1.1 500 No\r\n\r\n", b"\r\nx", b"x"])
async def test_what_follows_an_answer_makes_its_connection_useless(rest: bytes) -> None:
    together, _, _ = await asked()
    together.data_received(LENGTH + rest)
    await together.wait_for_head(FAR_S)
    apart, pipe, _ = await asked()
    apart.data_received(LENGTH)
    apart.data_received(rest)
    assert pipe.is_aborted
    for connection in (together, apart):
        assert not connection.is_reusable
        assert connection.status == 200
        assert await whole(connection) == b"whole"


async def test_the_next_answer_has_nothing_of_the_last() -> None:
    connection, pipe, _ = await asked()
    connection.data_received(CHUNKED)
    assert connection.is_reusable
    await connection.send(b"POST / HTTP/1.1\r\n\r\n", b"{}", write_s=1.0)
    assert not connection.is_reusable
    connection.data_received(b"HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\nno")
    await connection.wait_for_head(FAR_S)
    assert (connection.status, connection.headers) == (500, [(b"content-length", b"2")])
    assert await whole(connection) == b"no"
    assert pipe.written.endswith(b"POST / HTTP/1.1\r\n\r\n{}")


async def test_an_engine_waits_while_nobody_reads() -> None:
    connection, pipe, _ = await asked()
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (3 * UNREAD_BYTES_MAX)
    connection.data_received(head + b"x" * UNREAD_BYTES_MAX)
    assert pipe.takes_more
    connection.data_received(b"x")
    assert not pipe.takes_more
    assert len(await connection.read(FAR_S)) == UNREAD_BYTES_MAX + 1
    assert pipe.takes_more


async def test_a_wait_ends_at_its_own_deadline_whatever_waited_before() -> None:
    connection, _, _ = await asked()
    now_s = asyncio.get_running_loop().time
    for wait_s in (0.01, 0.05, 0.01):
        begin_s = now_s()
        with pytest.raises(TimeoutError):
            await connection.wait_for_head(begin_s + wait_s)
        assert now_s() - begin_s >= wait_s * 0.9


async def test_a_connection_that_ended_can_be_waited_for_by_nobody() -> None:
    connection, pipe, ended = await asked()
    waiting = asyncio.create_task(connection.wait_for_head(FAR_S))
    await asyncio.sleep(0)
    connection.abort("for a test")
    with pytest.raises(ConnectionBroke, match="for a test"):
        await waiting
    with pytest.raises(ConnectionBroke):
        await connection.send(b"x", b"", write_s=1.0)
    connection.connection_lost(None)
    assert (pipe.is_aborted, ended) == (True, [connection])


async def test_a_large_request_waits_for_its_engine_part_by_part() -> None:
    connection, pipe, _ = await asked()
    content = bytes(1 << 20)
    connection.pause_writing()
    sending = asyncio.create_task(connection.send(b"head", content, write_s=FAR_S))
    for _ in range(10):
        await asyncio.sleep(0)
    assert 0 < len(pipe.written) < len(content)
    connection.resume_writing()
    await sending
    assert pipe.written.endswith(b"head" + content)
    connection.pause_writing()
    with pytest.raises(TimeoutError):
        await connection.send(b"head", content, write_s=0.01)
