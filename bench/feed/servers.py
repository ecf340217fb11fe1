"""``python -m bench.feed.servers KIND ENDPOINT READY_PORT SHAPE [KEYS]``: the feed or the raw loop.

With a folder that `sideband keys` made the feed's connections are CURVE's.
"""

import asyncio
import socket
import sys
from pathlib import Path

import msgspec
import uvloop
import zmq

from bench.feed.workload import CP_SIZE, RANKS, FeedShape, bodies, feed_plan
from sideband.feed.delivery import Delivery
from sideband.feed.keys import RANKS_DIR, FeedKeys
from sideband.feed.outgoing import outgoing_step
from sideband.feed.ready import ReadyFrame
from sideband.feed.server import FeedServer


async def serve(endpoint: str, ready_port: int, shape: FeedShape, keys: FeedKeys | None) -> None:
    """The feed with all steps in it, until every rank has committed the last."""
    server = FeedServer(Delivery(feed_plan(shape)), endpoint, keys=keys)
    async with server.serving():
        for number, body in enumerate(bodies(shape), start=1):
            await server.put(body, step=number)
        server.end()
        with _ready(ready_port):
            await server.drained(timeout_s=300.0)


def serve_raw(endpoint: str, ready_port: int, shape: FeedShape) -> None:
    """A ROUTER that sends ready-made messages: the least that the same traffic can cost."""
    messages = _by_rank(shape)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.SNDHWM, 0)
        router.bind(endpoint)
        with _ready(ready_port):
            connections: dict[int, bytes] = {}
            while len(connections) < RANKS:
                connection, greeting = router.recv_multipart()
                connections[int(greeting)] = connection
            for step in messages:
                for rank, own in enumerate(step):
                    for message in own:
                        router.send_multipart([connections[rank], message], copy=False)
            for _ in range(RANKS * len(messages)):
                router.recv_multipart()
            for connection in connections.values():
                router.send_multipart([connection, b""])
            router.close(linger=10_000)


def _by_rank(shape: FeedShape) -> list[list[list[ReadyFrame]]]:
    """The feed's own frames by step, rank and micro batch."""
    return [
        [
            [frames[cp] for frames in row]
            for row in outgoing_step(body, lineage=0).frames
            for cp in range(CP_SIZE)
        ]
        for body in bodies(shape)
    ]


def _ready(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def main(
    kind: str, endpoint: str, ready_port: int, shape: FeedShape, folder: str | None = None
) -> None:
    """Serve one run of either kind."""
    if kind == "raw":
        serve_raw(endpoint, ready_port, shape)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(endpoint, ready_port, shape, feed_keys(folder)))


def feed_keys(folder: str | None) -> FeedKeys | None:
    """Where the feed's keys lie, if it has any."""
    if folder is None:
        return None
    return FeedKeys(feed_key=Path(folder, "feed.key_secret"), ranks_dir=Path(folder, RANKS_DIR))


if __name__ == "__main__":
    shape_of_run = msgspec.json.decode(sys.argv[4], type=FeedShape)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), shape_of_run, *sys.argv[5:])
