"""A rank reads the rows of its chunk, every block verified, against plain preadv. Warm files."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from bench.files import payload_root, publish, request_of, warm_buffer
from bench.reads import chosen_reads, plain_calls, reader_calls
from bench.registry import Row
from bench.results import Claim, Curve, Measurement, RowResult, Series
from bench.rows.masks import without_loops
from bench.scale import Scale
from bench.timing import paired
from bench.workload import VOCAB_SIZE
from sideband.compiled import compile_loops
from sideband.model import ModelShape
from sideband.payload.reader import PayloadReader
from sideband.payload.root import PayloadRoot
from sideband.segments import PayloadSegment

THREADS: Final = 32
NUMPY_ONLY: Final = "without compiled loops"
MODELS: Final = {  # bytes per row: DeepSeek-V4-Flash, Qwen3-30B-A3B, GLM-5.3, Nemotron-3-Super
    240: ModelShape(
        num_layers=43, layer_ids=tuple(range(3, 43)), top_k=6, id_space=256, vocab_size=VOCAB_SIZE
    ),
    384: ModelShape(
        num_layers=48, layer_ids=tuple(range(48)), top_k=8, id_space=128, vocab_size=VOCAB_SIZE
    ),
    600: ModelShape(
        num_layers=78, layer_ids=tuple(range(3, 78)), top_k=8, id_space=256, vocab_size=VOCAB_SIZE
    ),
    3872: ModelShape(
        num_layers=88, layer_ids=tuple(range(88)), top_k=22, id_space=512, vocab_size=VOCAB_SIZE
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What reading segments of one length costs."""

    segment_rows: int
    percent: float  # of the speed of plain preadv of the same whole blocks
    without_loops_percent: float | None  # the same without compiled loops, where it was asked
    segment_s: float
    plain_s: float
    read_bytes: int
    wanted_bytes: int


def measure(scale: Scale) -> RowResult:
    """Rows of four sizes in segments of 1 to 30 k rows, one thread and the pool."""
    compile_loops()
    file_rows = scale.pick(tiny=300, quick=30_000, full=30_000)
    lengths = scale.pick(
        tiny=[1, 200],
        quick=[1, 64, 1024, 29_000],
        full=[1, 16, 64, 256, 1024, 4096, 16_384, 29_000],
    )
    points: dict[tuple[int, int], list[Point]] = {}
    for row_bytes in scale.pick(tiny=[384], quick=[384, 3872], full=list(MODELS)):
        with payload_root() as root:
            files = _files(
                root,
                MODELS[row_bytes],
                file_rows,
                count=scale.pick(tiny=1, quick=4, full=8) if row_bytes < 1000 else 2,
            )
            for threads in (1, THREADS):
                points[row_bytes, threads] = [
                    _point(root, files, length, threads=threads, scale=scale) for length in lengths
                ]
    return RowResult(
        name="rank_read",
        title="A rank reads its rows",
        setting=f"files of {file_rows} rows in the page cache, segments at random rows, every "
        "block verified, into memory that is there already; the limit is preadv of the same blocks",
        measurements=[
            _measurement(row_bytes, threads, point)
            for (row_bytes, threads), found in points.items()
            for point in found
        ],
        claims=_claims(points, lengths),
        curves=[_curve(points)],
        notes=[_short_note(points)],
    )


def _claims(points: dict[tuple[int, int], list[Point]], lengths: Sequence[int]) -> list[Claim]:
    """The worst row size of each length, and the worst of all where nothing is asked for."""
    alone = [found for (_, threads), found in points.items() if threads == 1]
    pooled = [
        point.percent for (_, threads), found in points.items() if threads > 1 for point in found
    ]
    plainly = [point.without_loops_percent or 0.0 for found in alone for point in found]
    return [
        *(
            Claim(
                what=f"speed of preadv at {length} rows per segment, worst row size, one thread",
                value=min(found[place].percent for found in alone),
                unit="%",
                target=80,
            )
            for place, length in enumerate(lengths)
        ),
        Claim(
            what=f"speed of preadv at the worst length and row size, {THREADS} threads",
            value=min(pooled),
            unit="%",
        ),
        Claim(
            what="speed of preadv at the worst length and row size, one thread, " + NUMPY_ONLY,
            value=min(plainly),
            unit="%",
        ),
    ]


def _files(root: PayloadRoot, model: ModelShape, rows: int, *, count: int) -> list[PayloadSegment]:
    """The routing segment of each of ``count`` new files."""
    found: list[PayloadSegment] = []
    choice = request_of(
        model, prompt_tokens=rows, completion_tokens=1, with_masks=False, seed=model.top_k
    )
    for serial in range(count):
        report = publish(root, model, choice, f"request-{serial}")
        found += report.segments[0]
    return found


def _point(
    root: PayloadRoot,
    files: Sequence[PayloadSegment],
    segment_rows: int,
    *,
    threads: int,
    scale: Scale,
) -> Point:
    reads = chosen_reads(
        files, segment_rows, read_bytes_max=scale.pick(tiny=1 << 20, quick=96 << 20, full=256 << 20)
    )
    out = warm_buffer(reads.row_bytes)
    plain = warm_buffer(reads.block_bytes)
    fds = {file.file: os.open(root.path / file.file, os.O_RDONLY) for file in files}
    try:
        with (
            PayloadReader(root, model=None) as reader,
            ThreadPoolExecutor(threads) as pool,
        ):
            ours = reader_calls(reader, reads, out)
            limit = plain_calls(fds, reads, plain)
            sides: dict[str, Callable[[], object]] = {
                "ours": lambda: _run(pool, threads, ours),
                "plain": lambda: _run(pool, threads, limit),
            }
            if threads == 1:
                sides[NUMPY_ONLY] = lambda: without_loops(sides["ours"])
            timings = paired(
                sides,
                rounds=2 * scale.rounds + 1,  # a few per cent are asked for: five vary as much
            )
    finally:
        for fd in fds.values():
            os.close(fd)
    count = len(reads.segments)
    return Point(
        segment_rows=segment_rows,
        percent=100 * timings.ratio("plain", "ours"),
        without_loops_percent=100 * timings.ratio("plain", NUMPY_ONLY) if threads == 1 else None,
        segment_s=timings.median("ours") / count,
        plain_s=timings.median("plain") / count,
        read_bytes=reads.block_bytes // count,
        wanted_bytes=reads.row_bytes // count,
    )


def _run(pool: ThreadPoolExecutor, threads: int, calls: Sequence[Callable[[], None]]) -> None:
    if threads == 1:
        for call in calls:
            call()
        return
    for future in [pool.submit(call) for call in calls]:
        future.result()


def _measurement(row_bytes: int, threads: int, point: Point) -> Measurement:
    kind = "1 thread" if threads == 1 else f"{threads} threads"
    return Measurement(
        side=f"{row_bytes} B rows, segments of {point.segment_rows}, {kind}: one segment",
        seconds=point.segment_s,
        bytes=point.wanted_bytes,
        rate=point.wanted_bytes / point.segment_s / 1e9,
        rate_unit="GB/s of rows",
    )


def _curve(points: dict[tuple[int, int], list[Point]]) -> Curve:
    return Curve(
        name="rank-read",
        title="Reading rows with checksums",
        x_label="rows per segment",
        y_label="% of plain preadv of the same blocks",
        log="x",
        series=[
            Series(
                name=f"{row_bytes} B, {threads} thread{'s' if threads > 1 else ''}",
                points=[(point.segment_rows, point.percent) for point in found],
            )
            for (row_bytes, threads), found in points.items()
        ],
    )


def _short_note(points: dict[tuple[int, int], list[Point]]) -> str:
    costs = [
        f"{row_bytes} B rows: {found[0].segment_s * 1e6:.0f} µs, {found[0].read_bytes} bytes read "
        f"and verified (plain preadv of them: {found[0].plain_s * 1e6:.0f} µs)"
        for (row_bytes, threads), found in points.items()
        if threads == 1
    ]
    return "A segment of one row costs a whole block. " + "; ".join(costs) + "."


ROWS: Final = [Row("rank_read", measure)]
