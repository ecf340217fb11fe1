"""A stub engine, ``python -m bench.http.engine PORT DELAY_S``: it answers after a fixed time."""

import asyncio
import re
import sys
from typing import Final, cast

import uvloop
import xxhash

from bench.http.bodies import FILE_MARK, LARGE, LARGE_BODY_BYTES, RUN_ID, SMALL
from bench.http.wire import MessageSplitter, response

_REQUEST_ID: Final = re.compile(rb'"request_id":"([A-Za-z0-9._:-]{1,128})"')
_PARTS: Final = {
    is_large: traffic.answer_body().split(FILE_MARK.encode())
    for is_large, traffic in ((False, SMALL), (True, LARGE))
}
HEALTHY: Final = response(b"{}")
UNKNOWN: Final = response(b"{}", b"404 Not Found")  # as a server without the plugin


class Engine(asyncio.Protocol):
    """One connection."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._splitter = MessageSplitter()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for head, body in self._splitter.feed(data):
            if head.startswith(b"GET"):
                self._write(HEALTHY if head.startswith(b"GET /health ") else UNKNOWN)
                continue
            answer = response(answer_to(body))
            if self._delay_s:
                asyncio.get_running_loop().call_later(self._delay_s, self._write, answer)
            else:
                self._write(answer)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


def answer_to(body: bytes) -> bytes:
    """The prepared answer, with the file named after the request as a real engine's is."""
    found = _REQUEST_ID.search(body, max(0, len(body) - 4096)) or _REQUEST_ID.search(body[:4096])
    request_id = found[1] if found else b"unnamed"
    fan_out = xxhash.xxh3_64_intdigest(request_id) & 0xFF
    file = b"v0/%s/%02x/%s-0123456789abcdef.sbp" % (RUN_ID.encode(), fan_out, request_id)
    return file.join(_PARTS[len(body) > LARGE_BODY_BYTES])


async def main(port: int, delay_s: float) -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Engine(delay_s), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), float(sys.argv[2])))
