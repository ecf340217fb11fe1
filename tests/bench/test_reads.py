"""The reads of the bench: ours and the plain one touch the same rows of the same blocks."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bench.files import request_of, warm_buffer
from bench.reads import chosen_reads, plain_calls, reader_calls, whole_blocks
from bench.rows.rank_read import MODELS
from sideband.ids import RequestId, RunId
from sideband.payload.encodings import routing_blocks
from sideband.payload.reader import PayloadReader
from sideband.payload.root import PayloadRoot
from sideband.payload.writer import write_payload

MODEL = MODELS[3872]  # 67 rows per block


@pytest.mark.parametrize("segment_rows", [1, 50, 150])
def test_both_sides_read_the_rows_that_were_written(tmp_path: Path, segment_rows: int) -> None:
    root = PayloadRoot.create(tmp_path / "root", RunId("bench"), fresh=True)
    choice = request_of(MODEL, prompt_tokens=200, completion_tokens=1, with_masks=False, seed=1)
    report = write_payload(
        root, policy_version=0, request_id=RequestId("r"), model=MODEL, choices=[choice]
    )
    (file,) = report.segments[0]
    reads = chosen_reads([file], segment_rows, read_bytes_max=1 << 20)
    out = warm_buffer(reads.rows * MODEL.row_size_bytes)
    plain = warm_buffer(reads.block_bytes)
    fd = os.open(root.path / file.file, os.O_RDONLY)
    try:
        with PayloadReader(root, model=MODEL) as reader:
            for call in [
                *reader_calls(reader, reads, out),
                *plain_calls({file.file: fd}, reads, plain),
            ]:
                call()
    finally:
        os.close(fd)
    assert choice.routing is not None
    rows = choice.routing.rows_NLK
    expected = np.concatenate([rows[s.row : s.row + s.rows] for s in reads.segments])
    assert np.array_equal(out.view(np.uint16).reshape(expected.shape), expected)
    bounds = routing_blocks(len(rows), MODEL)
    blocks = []
    for segment in reads.segments:
        touched = [
            (a, b)
            for a, b in pairwise(bounds)
            if a < segment.row + segment.rows and b > segment.row
        ]
        blocks.append(rows[touched[0][0] : touched[-1][1]])
        offset, size = whole_blocks(file, segment)
        assert offset == file.offset + touched[0][0] * MODEL.row_size_bytes
        assert size == blocks[-1].nbytes
    assert plain.tobytes() == np.concatenate(blocks).tobytes()
