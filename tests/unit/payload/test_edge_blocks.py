"""Blocks that a segment needs in part: read once for neighbours, never used unverified or stale."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sideband.payload import PayloadReader, PayloadRoot, WriteReport, blocks
from sideband.payload.copying import COPY_BLOCKS
from sideband.payload.errors import ChecksumMismatch, PayloadTruncated
from sideband.segments import PayloadSegment
from sideband.testing.payloads import random_choice
from tests.unit.payload.support import WIDE, file_path, of_field, read_routing, write, write_one


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where each read of blocks began. A compiled loop would read past it."""
    monkeypatch.setattr(COPY_BLOCKS, "for_items", lambda count: None)
    found: list[int] = []
    whole = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        found.append(offset)
        return whole(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return found


def single_rows(segment: PayloadSegment) -> list[PayloadSegment]:
    return [segment.narrowed(pos, pos + 1) for pos in range(segment.pos, segment.stop)]


def test_neighbours_in_one_block_read_it_once(
    root: PayloadRoot, reader: PayloadReader, reads: list[int]
) -> None:
    routing = of_field(write_one(root).segments[0], "routed_experts")
    rows = [read_routing(reader, row) for segment in routing for row in single_rows(segment)]
    assert len(rows) > 1
    assert reads == [routing[0].offset]


def test_blocks_of_two_files_are_never_mixed_up(
    root: PayloadRoot, reader: PayloadReader, reads: list[int]
) -> None:
    """Both files have the same layout: same offsets, same sizes, other rows."""
    one, other = (
        of_field(write_one(root, seed, request_id="req-1").segments[0], "routed_experts")[0]
        for seed in (1, 2)
    )
    first, second = single_rows(one)[0], single_rows(other)[0]
    found = [read_routing(reader, row).tobytes() for row in (first, second, first, second)]
    assert found[:2] == found[2:]
    assert found[0] != found[1]
    assert len(reads) == 4


def test_a_forgotten_file_is_read_anew(root: PayloadRoot, reader: PayloadReader) -> None:
    report, other = write_one(root, 1), write_one(root, 2)
    row = single_rows(of_field(report.segments[0], "routed_experts")[0])[0]
    before = read_routing(reader, row).tobytes()
    os.replace(file_path(root, other), file_path(root, report))
    reader.forget(row.file)
    assert read_routing(reader, row).tobytes() != before


def test_a_block_that_was_refused_is_refused_again(
    root: PayloadRoot, reader: PayloadReader
) -> None:
    report = write_one(root)
    row = single_rows(of_field(report.segments[0], "routed_experts")[0])[0]
    path = file_path(root, report)
    data = path.read_bytes()
    path.write_bytes(data[: row.offset] + bytes([data[row.offset] ^ 1]) + data[row.offset + 1 :])
    for _ in range(2):
        with pytest.raises(ChecksumMismatch):
            read_routing(reader, row)
    os.truncate(path, row.offset + 1)
    with pytest.raises(PayloadTruncated):
        read_routing(reader, row)
    path.write_bytes(data)
    assert read_routing(reader, row).tobytes() == data[row.offset : row.offset + 8]


def test_blocks_larger_than_the_scratch_are_read_all_the_same(
    root: PayloadRoot, reader: PayloadReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = write_one(root)
    segment = of_field(report.segments[0], "routed_experts")[0]
    expected = [read_routing(reader, row).tobytes() for row in single_rows(segment)]
    monkeypatch.setattr(blocks, "_SCRATCHES", blocks._Scratches())
    monkeypatch.setattr(blocks._SCRATCHES.own, "room", memoryview(bytearray(3)))
    assert [read_routing(reader, row).tobytes() for row in single_rows(segment)] == expected


def test_threads_do_not_share_a_scratch(root: PayloadRoot, reader: PayloadReader) -> None:
    reports = [write_one(root, seed, request_id=f"request-{seed}") for seed in range(4)]
    rows = [
        row
        for report in reports
        for row in single_rows(of_field(report.segments[0], "routed_experts")[0])
    ]
    expected = [read_routing(reader, row).tobytes() for row in rows]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda row: read_routing(reader, row).tobytes(), rows * 20))
    assert found == expected * 20


def one_block(root: PayloadRoot, seed: int) -> tuple[WriteReport, PayloadSegment]:
    """A file whose routing rows are one segment and one block, and that segment."""
    rng = np.random.default_rng(seed)
    report = write(root, random_choice(rng, WIDE, prompt_tokens=6, completion_tokens=4))
    (segment,) = of_field(report.segments[0], "routed_experts")
    assert segment.rows == 9
    return report, segment


def part_of(segment: PayloadSegment, first: int, last: int) -> PayloadSegment:
    return segment.narrowed(segment.pos + first, segment.pos + last)


@pytest.mark.parametrize("room_bytes", [3, 1 << 18])
def test_any_part_of_a_block_comes_back_and_all_of_it_is_verified(
    root: PayloadRoot, reader: PayloadReader, monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    report, segment = one_block(root, 1)
    rows = [read_routing(reader, row).tobytes() for row in single_rows(segment)]
    ranges = [(first, last) for first in range(9) for last in range(first + 1, 10)]
    monkeypatch.setattr(blocks, "_SCRATCHES", blocks._Scratches())
    monkeypatch.setattr(blocks._SCRATCHES.own, "room", memoryview(bytearray(room_bytes)))
    for first, last in ranges + ranges[::-1]:
        found = read_routing(reader, part_of(segment, first, last))
        assert found.tobytes() == b"".join(rows[first:last])
    path, data = file_path(root, report), file_path(root, report).read_bytes()
    for first, last in ranges:
        for row in {0, 8}.difference(range(first, last)):  # a row that is not wanted
            at = segment.offset + 8 * row
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            reader.forget(segment.file)
            with pytest.raises(ChecksumMismatch):
                read_routing(reader, part_of(segment, first, last))
    os.truncate(path, segment.offset + 8 * 9 - 1)
    with pytest.raises(PayloadTruncated):
        read_routing(reader, part_of(segment, 0, 8))
