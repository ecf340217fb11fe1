"""Raw rows are read alike, and refused alike, with the loop and without it."""

import errno
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sideband.payload import (
    ChoicePayload,
    PayloadReader,
    PayloadRoot,
    RoutingRows,
    WriteReport,
    blocks,
    encodings,
    errors,
)
from sideband.segments import PayloadSegment
from sideband.testing.payloads import random_routing
from tests.unit.masks.ways import ARRAYS, COMPILED, WAYS, names, taking
from tests.unit.payload.support import NARROW, file_path, of_field, read_routing, write

ROWS, BLOCK_ROWS, ROW_BYTES = 3000, 500, 6  # six blocks of 3000 bytes
ROWS_NLK = random_routing(np.random.default_rng(1), ROWS, NARROW)


@pytest.fixture(params=WAYS)
def any_way(request: pytest.FixtureRequest) -> Iterator[str]:
    with taking(request.param):
        yield request.param


@pytest.fixture
def report(root: PayloadRoot, monkeypatch: pytest.MonkeyPatch) -> WriteReport:
    """A file of six blocks."""
    monkeypatch.setattr(encodings, "BLOCK_BYTES_TARGET", BLOCK_ROWS * ROW_BYTES)
    choice = ChoicePayload(choice=0, routing=RoutingRows(pos=0, rows_NLK=ROWS_NLK), masks=None)
    return write(root, choice, model=NARROW)


@pytest.fixture
def segment(report: WriteReport) -> PayloadSegment:
    (found,) = of_field(report.segments[0], "routed_experts")
    return found


def rows_of(reader: PayloadReader, segment: PayloadSegment, first: int, last: int) -> bytes:
    return read_routing(reader, segment.narrowed(first, last)).tobytes()


@pytest.mark.usefixtures("any_way")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ranges=st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(1, ROWS)), max_size=6))
def test_segments_after_one_another_read_back(
    reader: PayloadReader, segment: PayloadSegment, ranges: list[tuple[int, int]]
) -> None:
    """After one another: a thread keeps the block that it read last."""
    for first, rows in ranges:
        last = min(first + rows, ROWS)
        assert rows_of(reader, segment, first, last) == ROWS_NLK[first:last].tobytes()


@pytest.mark.usefixtures("any_way")
def test_the_last_block_is_kept_and_no_block_of_before(
    root: PayloadRoot, reader: PayloadReader, report: WriteReport, segment: PayloadSegment
) -> None:
    rows_of(reader, segment, 700, 1600)
    os.truncate(file_path(root, report), segment.offset)
    assert rows_of(reader, segment, 1501, 2000) == ROWS_NLK[1501:2000].tobytes()
    for first, last in ((1499, 1501), (1999, 2001), (500, 501)):
        with pytest.raises(errors.PayloadTruncated):
            rows_of(reader, segment, first, last)


@pytest.mark.usefixtures("any_way")
def test_blocks_larger_than_the_scratch_read_back(
    reader: PayloadReader, segment: PayloadSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_SCRATCHES", blocks._Scratches())
    monkeypatch.setattr(blocks._SCRATCHES.own, "room", memoryview(bytearray(2999)))
    assert rows_of(reader, segment, 3, 2998) == ROWS_NLK[3:2998].tobytes()


@pytest.mark.skipif(COMPILED not in names(), reason="needs sideband[fast]")
def test_the_compiled_loop_reads_all_blocks_itself(
    reader: PayloadReader, segment: PayloadSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.header(segment.file)

    def preadv(*_: object) -> int:
        raise AssertionError("the loop left a block")

    monkeypatch.setattr(os, "preadv", preadv)
    with taking(COMPILED):
        assert rows_of(reader, segment, 3, 2998) == ROWS_NLK[3:2998].tobytes()


def refusal(reader: PayloadReader, segment: PayloadSegment, way: str) -> tuple[type, object]:
    with taking(way), pytest.raises(errors.PayloadError) as caught:
        rows_of(reader, segment, 700, 2900)
    return type(caught.value), vars(caught.value)


@pytest.mark.parametrize("row", [501, 700, 1000, 1499, 2899, 2999])
def test_a_changed_bit_is_refused_alike(
    root: PayloadRoot,
    reader: PayloadReader,
    report: WriteReport,
    segment: PayloadSegment,
    row: int,
) -> None:
    """In rows that were asked for, and in the other rows of their blocks."""
    path = file_path(root, report)
    data = bytearray(path.read_bytes())
    data[segment.offset + row * ROW_BYTES] ^= 4
    path.write_bytes(data)
    expected = refusal(reader, segment, ARRAYS)
    assert expected[0] is errors.ChecksumMismatch
    assert [refusal(reader, segment, way) for way in names()] == [expected] * len(names())


@pytest.mark.parametrize("row", [600, 1000, 1200, 2600])
def test_a_short_file_is_refused_alike(
    root: PayloadRoot,
    reader: PayloadReader,
    report: WriteReport,
    segment: PayloadSegment,
    row: int,
) -> None:
    reader.header(segment.file)
    os.truncate(file_path(root, report), segment.offset + row * ROW_BYTES)
    expected = refusal(reader, segment, ARRAYS)
    assert expected[0] is errors.PayloadTruncated
    assert [refusal(reader, segment, way) for way in names()] == [expected] * len(names())


@pytest.mark.usefixtures("any_way")
@pytest.mark.parametrize(
    ("number", "error"), [(errno.ESTALE, errors.StalePayload), (errno.EIO, errors.ReadFailed)]
)
def test_what_the_operating_system_says_of_a_block_that_the_loop_left_is_told(
    root: PayloadRoot,
    reader: PayloadReader,
    report: WriteReport,
    segment: PayloadSegment,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    error: type[errors.PayloadError],
) -> None:
    """The file is cut short for the compiled loop, which no patch of ``os`` reaches."""
    reader.header(segment.file)
    os.truncate(file_path(root, report), segment.offset + 1000 * ROW_BYTES)

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(error) as caught:
        rows_of(reader, segment, 700, 2900)
    assert caught.value.file == segment.file


@pytest.mark.usefixtures("any_way")
@pytest.mark.parametrize("row", [0, 600, 1000, 2600])
def test_a_file_that_is_whole_when_the_block_is_read_again_reads_back(
    root: PayloadRoot,
    reader: PayloadReader,
    report: WriteReport,
    segment: PayloadSegment,
    monkeypatch: pytest.MonkeyPatch,
    row: int,
) -> None:
    path, whole = file_path(root, report), os.preadv
    data = path.read_bytes()
    reader.header(segment.file)
    os.truncate(path, segment.offset + row * ROW_BYTES)

    def healing(fd: int, buffers: list[Any], offset: int) -> int:
        path.write_bytes(data)
        return whole(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", healing)
    assert rows_of(reader, segment, 3, 2998) == ROWS_NLK[3:2998].tobytes()
