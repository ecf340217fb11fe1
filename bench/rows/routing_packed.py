"""Routing ids above 256 experts: two bytes each, or the bits that they need."""

from collections.abc import Callable
from functools import partial
from itertools import count, pairwise
from typing import Final, cast

import numpy as np

from bench.files import payload_root, publish, request_of, warm_buffer
from bench.registry import Row
from bench.results import Claim, RowResult
from bench.scale import Scale
from bench.timing import Timings, paired
from bench.workload import NEMOTRON_SUPER, routing_rows
from sideband.payload.columns import RowArray
from sideband.payload.encodings import PACKED, RAW, Encodings, routing_blocks
from sideband.payload.reader import PayloadReader
from sideband.payload.root import PayloadRoot
from sideband.segments import PayloadSegment

MODEL: Final = NEMOTRON_SUPER  # top-22 of 512 in 40 layers
ENCODE: Final = "packed: encode"
DECODE: Final = "packed: decode, checked"
LIMIT: Final = "limit: memcpy of the decoded rows"
Block = tuple[int, int, bytes]  # rows [first, last), stored bytes


def measure(scale: Scale) -> RowResult:
    """Encoding and decoding against a memcpy; files in both encodings, written and read warm."""
    rows = routing_rows(MODEL, scale.pick(tiny=300, quick=30_000, full=100_000), seed=1)
    blocks = encode(rows)
    out = cast("RowArray", warm_buffer(rows.nbytes).view(rows.dtype).reshape(rows.shape))
    sides: dict[str, Callable[[], object]] = {
        ENCODE: partial(encode, rows),
        DECODE: partial(decode, blocks, out),
        LIMIT: partial(np.copyto, out, rows),
    }
    timings = paired(sides, rounds=scale.rounds)
    stored = sum(len(block) for *_, block in blocks)
    sizes = {ENCODE: stored, DECODE: stored, LIMIT: rows.nbytes}
    with payload_root() as root, PayloadReader(root, model=MODEL) as reader:
        files, file_sizes = file_sides(root, reader, out)
        file_timings = paired(files, rounds=scale.rounds)
    return RowResult(
        name="routing_packed",
        title="Packed routing ids",
        setting=f"{len(rows)} rows of {MODEL.row_size_bytes} B (40 layers, top-22 of 512), numpy "
        "alone, one core; files in the page cache",
        measurements=[
            one.measurement(name, size_bytes=size, units=rows.nbytes / 1e9, unit="GB/s of rows")
            for one, known in ((timings, sizes), (file_timings, file_sizes))
            for name, size in known.items()
        ],
        claims=_claims(stored, rows.nbytes, timings, file_timings),
    )


def _claims(stored: int, raw: int, timings: Timings, files: Timings) -> list[Claim]:
    gigabytes = raw / 1e9
    raw_s, packed_s = files.median(reading("raw")), files.median(reading("packed"))
    claims = [
        Claim(
            what="packed: stored, of two bytes per id",
            value=100 * stored / raw,
            unit="%",
            target=56.5,
            is_ceiling=True,
        ),
        Claim(
            what="packed: decoded on one core",
            value=gigabytes / timings.median(DECODE),
            unit="GB/s of rows",
            target=1,
        ),
        Claim(
            what="packed: encoded on one core",
            value=gigabytes / timings.median(ENCODE),
            unit="GB/s of rows",
        ),
    ]
    if packed_s > raw_s:  # what must be saved elsewhere: the time to move the bytes left out
        claims.append(
            Claim(
                what="packed reads sooner where one reader gets less than",
                value=(raw - stored) / 1e9 / (packed_s - raw_s),
                unit="GB/s",
            )
        )
    return claims


def encode(rows: RowArray) -> list[Block]:
    """The blocks of the rows, as the writer makes them."""
    return [
        (first, last, b"".join(PACKED.encode_block(rows[first:last], MODEL)))
        for first, last in pairwise(routing_blocks(len(rows), MODEL, PACKED))
    ]


def decode(blocks: list[Block], out: RowArray) -> None:
    """All rows again, every check on."""
    for first, last, stored in blocks:
        PACKED.decode_rows(
            memoryview(stored), last - first, first=0, out_NLK=out[first:last], model=MODEL
        )


def reading(name: str) -> str:
    """The side that reads a file in one encoding."""
    return f"{name}: read from a file, verified"


def file_sides(
    root: PayloadRoot, reader: PayloadReader, out: RowArray
) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """Writing and reading one request in both encodings, and the bytes of its file."""
    sides: dict[str, Callable[[], object]] = {}
    sizes: dict[str, int] = {}
    number = count()
    choice = request_of(
        MODEL, prompt_tokens=len(out), completion_tokens=1, with_masks=False, seed=1
    )
    for name in (RAW.name, PACKED.name):
        encodings = Encodings(routing=name)

        def write(encodings: Encodings = encodings) -> object:
            return publish(root, MODEL, choice, f"request-{next(number)}", encodings=encodings)

        report = publish(root, MODEL, choice, f"read-{name}", encodings=encodings)
        (segment,) = report.segments[0]
        sides[f"{name}: written to a file, synced"] = write
        sides[reading(name)] = partial(read, reader, segment, out)
        sizes |= dict.fromkeys((f"{name}: written to a file, synced", reading(name)), 0)
        sizes = {side: size or report.size_bytes for side, size in sizes.items()}
    return sides, sizes


def read(reader: PayloadReader, segment: PayloadSegment, out: RowArray) -> None:
    """The rows of one file into warm memory."""
    reader.read_routing(segment, out[: segment.rows])


ROWS: Final = [Row("routing_packed", measure)]
