"""The feed: steps to 32 ranks, against a raw ZMQ loop that sends the same bytes ready-made.

Both have the same ready frames when the clock starts, receive without copies, and take what has
come from one socket before they look at the next. The feed checks, cuts and encodes a step when it
is handed over, in a thread beside the sending of the one before: that has a line of its own.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from bench.feed.ranks import Received, receive_feed, receive_raw
from bench.feed.workload import RANKS, FeedShape, bodies
from bench.http.processes import free_port, peak_bytes, processor_s, server
from bench.registry import Row
from bench.results import Claim, Measurement, RowResult
from bench.scale import Scale
from bench.timing import paired
from sideband.feed.codec import decode_step
from sideband.feed.keys import RankKeys, make_keys
from sideband.feed.outgoing import outgoing_step

OURS: Final = "Sideband's feed: send, credit, read, release, commit"
CURVE: Final = "the same with CURVE keys"
RAW: Final = "limit: raw ZMQ loop, one answer per rank and step"
CUT: Final = "beside it, when a step comes: check, cut, encode"


def measure(scale: Scale) -> RowResult:
    """All steps from the first greeting to the last commit of the last rank."""
    shape = FeedShape(
        samples=scale.pick(tiny=16, quick=512, full=512),
        mean_tokens=scale.pick(tiny=40, quick=4_500, full=4_500),
        seq_len=scale.pick(tiny=256, quick=32_768, full=32_768),
        steps=scale.pick(tiny=2, quick=8, full=8),  # the raw loop has no credit: it queues them all
    )
    [body] = bodies(msgspec.structs.replace(shape, steps=1))
    count = decode_step(body).micro_batch_count
    rounds = scale.pick(tiny=1, quick=9, full=25)
    cut = paired({CUT: partial(outgoing_step, body, lineage=0)}, rounds=rounds)
    with TemporaryDirectory(prefix="sideband-keys-") as folder:
        make_keys(folder)
        keys = RankKeys(feed_key=Path(folder, "feed.key"), rank_key=Path(folder, "rank.key_secret"))
        sides = {
            OURS: Side(["sideband"], partial(receive_feed, shape=shape)),
            CURVE: Side(["sideband", folder], partial(receive_feed, shape=shape, keys=keys)),
            RAW: Side(["raw"], partial(receive_raw, messages_per_step=count)),
        }
        found = _rounds(sides, shape, rounds=rounds)
    return RowResult(
        name="feed",
        title=f"The feed: steps to {RANKS} ranks",
        setting=f"{shape.steps} steps of {shape.samples} samples, "
        f"{shape.samples * shape.mean_tokens} tokens, {count} micro batches per rank, over TCP on "
        "one machine; ranks are 32 sockets in one thread of another process",
        measurements=[
            *(_measurement(name, runs, shape) for name, runs in found.items()),
            cut.measurement(CUT, size_bytes=len(body)),
        ],
        claims=[
            Claim(
                what="speed of the raw loop",
                value=100 * _time_ratio(found[RAW], found[OURS]),
                unit="%",
                target=80,
            ),
            Claim(
                what="processor time of the raw loop, of ours, both processes",
                value=100 * _processor_ratio(found[RAW], found[OURS]),
                unit="%",
            ),
            Claim(
                what="time with CURVE keys, of without",
                value=_time_ratio(found[CURVE], found[OURS]),
                unit="×",
            ),
            Claim(
                what="processor time with CURVE keys, of without",
                value=_processor_ratio(found[CURVE], found[OURS]),
                unit="×",
            ),
        ],
    )


@dataclass(frozen=True, slots=True)
class Side:
    """``server``: the kind of the server and its keys; ``receive``: what the ranks do."""

    server: list[str]
    receive: Callable[[str], Received]


@dataclass(frozen=True, slots=True)
class Run:
    """What the ranks saw, and what it cost; beside other work only the processor time is steady."""

    received: Received
    processor_s: float
    peak_bytes: int


def _rounds(sides: dict[str, Side], shape: FeedShape, *, rounds: int) -> dict[str, list[Run]]:
    """Each side once a round, forwards and backwards in turn."""
    found: dict[str, list[Run]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in sides if number % 2 else reversed(sides):
            found[name].append(_once(sides[name], shape))
    return found


def _once(side: Side, shape: FeedShape) -> Run:
    endpoint, ready_port = f"tcp://127.0.0.1:{free_port()}", free_port()
    kind, *keys = side.server
    told = [kind, endpoint, str(ready_port), msgspec.json.encode(shape).decode(), *keys]
    with server(["-m", "bench.feed.servers", *told], ready_port) as pid:
        before_s = processor_s(pid) + processor_s(os.getpid())
        received = side.receive(endpoint)
        after_s = processor_s(pid) + processor_s(os.getpid())
        return Run(received, after_s - before_s, peak_bytes(pid))


def _time_ratio(runs: list[Run], others: list[Run]) -> float:
    """How long ``runs`` take of ``others``: the median over paired rounds."""
    pairs = zip(runs, others, strict=True)
    return median(one.received.seconds / other.received.seconds for one, other in pairs)


def _processor_ratio(runs: list[Run], others: list[Run]) -> float:
    """The same of processor time, of the medians."""
    return median(run.processor_s for run in runs) / median(run.processor_s for run in others)


def _measurement(name: str, runs: list[Run], shape: FeedShape) -> Measurement:
    seconds = median(run.received.seconds for run in runs)
    received = runs[0].received
    return Measurement(
        side=f"{name}: one step",
        seconds=seconds / shape.steps,
        bytes=received.body_bytes // shape.steps,
        peak_bytes=runs[0].peak_bytes,
        rate=received.messages / seconds,
        rate_unit="messages/s",
    )


ROWS: Final = [Row("feed", measure)]
