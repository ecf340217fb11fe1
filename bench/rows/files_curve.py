"""A rank's chunk whose rows lie in ever more files: opening and checking one must stay cheap."""

import os
from functools import partial
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.files import payload_root, publish, request_of
from bench.registry import Row
from bench.results import Claim, Curve, RowResult, Series
from bench.rows.curves import EXPONENT_MAX, Points, growth
from bench.scale import Scale
from bench.timing import paired
from bench.workload import QWEN3_30B
from sideband.payload.reader import PayloadReader
from sideband.payload.root import PayloadRoot
from sideband.segments import PayloadSegment


def measure(scale: Scale) -> RowResult:
    """The same number of rows out of 1 to 500 files, cold handles and warm pages."""
    rows = scale.pick(tiny=64, quick=16_384, full=65_536)
    counts = scale.pick(tiny=[1, 4], quick=[1, 16, 128, 512], full=[1, 4, 16, 64, 256, 512, 1024])
    ours: Points = []
    plain: Points = []
    for count in counts:
        with payload_root() as root:
            segments = _segments(root, rows // count, count)
            out = np.zeros((rows // count, *QWEN3_30B.row_shape), np.uint8)
            timings = paired(
                {
                    "ours": partial(_read, root, segments, out),
                    "plain": partial(_read_plainly, root, segments, out),
                },
                rounds=scale.rounds,
            )
        ours.append((count, timings.median("ours") * 1e3))
        plain.append((count, timings.median("plain") * 1e3))
    per_file_ms = ours[-1][1] / counts[-1]
    return RowResult(
        name="curve_files",
        title="Growth with files per chunk",
        setting=f"{rows} rows of {QWEN3_30B.row_size_bytes} B in {counts[0]} to {counts[-1]} "
        "files, none of them open, one thread; the limit opens, reads and closes the same files",
        claims=[
            Claim(
                what="exponent of ms over files",
                value=growth(ours),
                unit="",
                target=EXPONENT_MAX,
                is_ceiling=True,
            ),
            Claim(what="one small file: open, check, read", value=per_file_ms, unit="ms"),
            Claim(what="the same by open, read, close", value=plain[-1][1] / counts[-1], unit="ms"),
        ],
        curves=[
            Curve(
                name="files-read",
                title="Reading one chunk",
                x_label="files",
                y_label="ms",
                series=[
                    Series(name="Sideband", points=ours),
                    Series(name="limit: open, read, close", points=plain),
                ],
            )
        ],
    )


def _segments(root: PayloadRoot, rows: int, count: int) -> list[PayloadSegment]:
    choice = request_of(
        QWEN3_30B, prompt_tokens=rows, completion_tokens=1, with_masks=False, seed=1
    )
    reports = (publish(root, QWEN3_30B, choice, f"request-{serial}") for serial in range(count))
    return list(chain.from_iterable(report.segments[0] for report in reports))


def _read(root: PayloadRoot, segments: list[PayloadSegment], out: NDArray[np.uint8]) -> None:
    with PayloadReader(root, model=QWEN3_30B) as reader:
        for segment in segments:
            reader.read_routing(segment, out)


def _read_plainly(
    root: PayloadRoot, segments: list[PayloadSegment], out: NDArray[np.uint8]
) -> None:
    for segment in segments:
        fd = os.open(root.path / segment.file, os.O_RDONLY)
        try:
            os.preadv(fd, [out.data], segment.offset)
        finally:
            os.close(fd)


ROWS: Final = [Row("curve_files", measure)]
