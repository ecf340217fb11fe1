"""uvicorn's HTTP protocol, with bounds on what is no body and one reading of every request.

A server that takes bytes for another request, or for other headers, than a proxy in front of it
does would let one client's bytes speak for another. So:

- what is no request is a 400, told as every other problem is;
- a head of more than ``HEAD_BYTES_MAX`` is a 431 and starts nothing, in however many parts it
  comes; one that is not whole yet is refused when so many bytes of it were read, or a part later;
- fields behind a chunked body are no headers: they are dropped, and bounded like a head;
- nothing is upgraded: the parser takes a body for what follows such a request, so one that has a
  body is a 400, and any other is the last of its connection;
- what is wrong with a request is said in its place: after the answers to earlier ones.
"""

from typing import Final

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from services.kit.problems import (
    SHOWN_CHARACTERS_MAX,
    HeadTooLarge,
    MalformedRequest,
    Problem,
    render,
)

HEAD_BYTES_MAX: Final = 64 << 10  # of a request's line and headers, with what separates them


class BoundedProtocol(HttpToolsProtocol):
    """One connection of a client; its requests are answered one after the other."""

    is_refused = False  # nothing more is read of this connection
    _is_in_head = False  # a head has begun whose end was not read
    _is_between = True  # no request has begun whose end was not read
    _fault: MalformedRequest | None = None  # for which a callback has stopped the parser
    _due: Problem | None = None  # said when all before it is answered
    _part_bytes = 0  # of what was read last
    _head_least = _head_most = 0  # bytes of that head: in parts of nothing else, and of any
    _bare_bytes = 0  # of parts in a row that held nothing of a body where one was due

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if self.is_refused:
            return  # a client that still sends would be cut off before it has read the answer
        self._part_bytes = len(data)
        if self._is_in_head:
            self._head_most += self._part_bytes
        self._bare_bytes += self._part_bytes
        super().data_received(data)
        if self.is_refused:
            return
        if self._is_in_head:
            self._head_least += self._part_bytes
            if self._head_least > HEAD_BYTES_MAX:
                self.refuse_head()
        elif self.is_in_body and self._bare_bytes > HEAD_BYTES_MAX:
            self.logger.warning("fields behind a body have more than %d bytes", HEAD_BYTES_MAX)
            self._close()

    def on_message_begin(self) -> None:
        """Called by the parser."""
        super().on_message_begin()
        self._is_between, self._is_in_head = False, True
        # The part that it begins in may hold a body before it: that one does not count as read.
        self._head_least, self._head_most = -self._part_bytes, self._part_bytes

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser, also for what follows a body."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called by the parser: a request begins."""
        if self._is_head_too_large():
            raise HeadTooLarge("told by send_400_response, as all that stops the parser")
        is_last = self.parser.should_upgrade()
        if is_last and _has_body(self.headers):
            self._fault = MalformedRequest(
                "nothing is upgraded here: ask again without, or no body"
            )
            raise self._fault
        super().on_headers_complete()  # stops the parser at a target that is no address
        self._is_in_head, self._bare_bytes = False, 0
        if is_last:
            self.cycle.keep_alive, self.is_refused = False, True

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._bare_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._is_between = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Called for what the parser, or a callback of it, does not take."""
        if self._is_in_head and self._is_head_too_large():
            self.refuse_head()
        else:
            what = "the body's framing" if self.is_in_body else "the request line or a header"
            self._refuse(self._fault or MalformedRequest(f"{what} is not as HTTP says"))

    def refuse_head(self) -> None:
        """Say that it is too large."""
        detail = f"the request line and headers have more than {HEAD_BYTES_MAX} bytes"
        self._refuse(HeadTooLarge(detail))

    @property
    def is_in_body(self) -> bool:
        """Whether a request has begun, its head was read, and its end was not."""
        return not (self._is_between or self._is_in_head)

    def _refuse(self, problem: Problem) -> None:
        """Say what is wrong, read no more, and close when the client does, or soon: one that still
        sends would lose the answer.
        """
        if self._must_wait(problem):
            return
        answer = render(problem, _path_of(self._target()))
        headers = [*self.server_state.default_headers, *answer.raw_headers]
        lines = [b"%b: %b\r\n" % header for header in [*headers, (b"connection", b"close")]]
        head = b"".join([STATUS_LINE[answer.status_code], *lines, b"\r\n"])
        self.transport.write(head + bytes(answer.body))
        if self.is_in_body:  # whoever waits for the rest need not, and says nothing more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.is_refused, self._is_in_head = True, False
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _should_upgrade_to_ws(self) -> bool:
        """Asked for every such request."""
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """Called for every such request; no log is for a client to fill."""

    def _target(self) -> bytes:
        """What the request that is read asks for, as far as it came."""
        return b"" if self._is_between else self.url

    def on_response_complete(self) -> None:
        """Called when a request was answered: what waited for that is said."""
        super().on_response_complete()
        problem = self._due
        if problem is not None and not self.pipeline and not self.transport.is_closing():
            self._due = None
            self._refuse(problem)

    def _must_wait(self, problem: Problem) -> bool:
        """Whether something else is to be said first, or it is too late for this."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None:
            return False
        if self.is_in_body and cycle.response_started:  # it has its answer, or a part of one
            self._close()
        elif self.pipeline or not (self.is_in_body or cycle.response_complete):
            self._due, self.is_refused = problem, True
        else:
            return False
        return True

    def _close(self) -> None:
        self.is_refused = True
        self.transport.close()

    def _is_head_too_large(self) -> bool:
        if self._head_most <= HEAD_BYTES_MAX:
            return False
        line_bytes = len(self.parser.get_method()) + len(self.url) + len("  HTTP/1.1\r\n\r\n")
        return line_bytes + sum(len(n) + len(v) + 4 for n, v in self.headers) > HEAD_BYTES_MAX


def _path_of(target: bytes) -> str:
    """The path of a request's target, or its begin."""
    target = target[:SHOWN_CHARACTERS_MAX]
    try:
        path = httptools.parse_url(target).path or b""
    except httptools.HttpParserInvalidURLError:
        path = target.partition(b"?")[0]
    return path.decode("latin-1")


def _has_body(headers: list[tuple[bytes, bytes]]) -> bool:
    named = dict(headers)
    return b"transfer-encoding" in named or named.get(b"content-length", b"0") != b"0"
