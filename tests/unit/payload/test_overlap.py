"""A large file is written while it is checked: the same bytes and refusals, nothing visible."""

import errno
import os
import threading
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest

from sideband.model import ModelShape
from sideband.payload import (
    ChoicePayload,
    PayloadReader,
    PayloadRoot,
    RoutingRows,
    encodings,
    writer,
)
from sideband.payload.checks import valid_runs
from sideband.payload.columns import RowArray
from sideband.payload.errors import WriteFailed
from sideband.payload.refusals import IdOutOfRange, SampledTokenNotKept, WrongRowShape
from sideband.segments import POSITION_MAX
from sideband.testing.payloads import random_choice, random_routing, with_gaps
from tests.unit.payload.support import (
    WIDE,
    all_files,
    file_path,
    of_field,
    rows_given,
    rows_read,
    write,
)

ROWS = 1000


@pytest.fixture(autouse=True)
def always_overlap() -> Iterator[None]:
    with patch.object(writer, "_OVERLAP_BYTES_MIN", 0):
        yield


def request_of(*, gaps: tuple[int, ...] = (), choice: int = 0) -> ChoicePayload:
    return random_choice(
        np.random.default_rng(choice),
        WIDE,
        prompt_tokens=ROWS // 2,
        completion_tokens=ROWS // 2,
        choice=choice,
        gaps=gaps,
    )


def routing_only(rows_NLK: RowArray, pos: int = 0) -> ChoicePayload:
    return ChoicePayload(choice=0, routing=RoutingRows(pos=pos, rows_NLK=rows_NLK), masks=None)


def steps_of(root: PayloadRoot, *choices: ChoicePayload, waits: bool) -> tuple[list[str], bytes]:
    """Checks and writes in their order, and the file's bytes.

    ``waits``: no check ends before something was written, which never is when it is not meanwhile.
    """
    steps: list[str] = []
    has_written = threading.Event()
    whole = os.writev

    def checked(routing: RoutingRows, model: ModelShape) -> list[tuple[int, int]]:
        assert has_written.wait(10)
        steps.append("check")
        return valid_runs(routing, model)

    def writev(fd: int, buffers: list[memoryview]) -> int:
        place = os.lseek(fd, 0, os.SEEK_CUR)
        steps.append("write the body" if place else "write the front")
        has_written.set()
        return whole(fd, buffers)

    if not waits:
        has_written.set()
    with patch.object(os, "writev", writev), patch.object(writer, "valid_runs", checked):
        report = write(root, *choices)
    return steps, file_path(root, report).read_bytes()


def test_it_makes_the_same_bytes(root: PayloadRoot) -> None:
    choices = (request_of(), request_of(choice=1))
    overlapped, first = steps_of(root, *choices, waits=True)
    with patch.object(writer, "_OVERLAP_BYTES_MIN", 1 << 60):
        one_by_one, second = steps_of(root, *choices, waits=False)
    assert first == second
    assert (overlapped[0], overlapped[-1]) == ("write the body", "write the front")
    assert sorted(overlapped) == sorted(one_by_one)
    assert one_by_one[:3] == ["check", "check", "write the body"]
    assert one_by_one[-1] == "write the front"


@pytest.mark.parametrize("gap", [0, 1, 500, 501, ROWS - 2])
def test_a_gap_that_a_glance_misses_is_still_a_gap(
    root: PayloadRoot, reader: PayloadReader, gap: int
) -> None:
    choice = request_of(gaps=(gap,))
    report = write(root, choice)
    assert report.rows_invalid == 1
    for field, rows in rows_given(choice, gaps=(gap,)).items():
        assert rows_read(reader, of_field(report.segments[0], field), choice) == rows
    assert all_files(root) == {report.file}
    with patch.object(writer, "_OVERLAP_BYTES_MIN", 1 << 60):
        again = file_path(root, write(root, choice)).read_bytes()
    assert again == file_path(root, report).read_bytes()


def test_no_valid_row_but_those_that_were_glanced_at(root: PayloadRoot) -> None:
    with patch.object(writer, "_SAMPLE_ROWS", 1):  # the first
        rows = with_gaps(random_routing(np.random.default_rng(0), ROWS, WIDE), [*range(1, ROWS)])
        report = write(root, routing_only(rows))
    assert [segment.rows for segment in report.segments[0]] == [1]
    assert report.rows_invalid == ROWS - 1


def test_no_rows_at_all(root: PayloadRoot) -> None:
    assert write(root, routing_only(np.zeros((0, 2, 2), np.uint16))).file is None
    assert write(root, routing_only(np.zeros((9, 2, 2), np.uint16))).rows_invalid == 9
    assert all_files(root) == set()


def test_what_is_refused_was_never_visible(root: PayloadRoot) -> None:
    rows = random_routing(np.random.default_rng(0), ROWS, WIDE)
    rows[501, 0, 0] = 300
    with pytest.raises(IdOutOfRange) as caught:
        write(root, routing_only(rows, pos=7))
    assert caught.value.pos == 508
    with pytest.raises(WrongRowShape):
        write(root, routing_only(rows[:500], pos=POSITION_MAX - 5))
    with pytest.raises(WrongRowShape):
        write(root, routing_only(rows.reshape(-1, 4, 1)))
    with pytest.raises(WrongRowShape):
        write(root, routing_only(np.zeros((), np.uint16)))
    good = request_of(choice=1)
    assert good.masks is not None
    good.masks.sampled_token_ids_N[:] = 1001
    with pytest.raises(SampledTokenNotKept):
        write(root, good)
    assert all_files(root) == set()


@pytest.mark.parametrize("call", ["writev", "fsync", "rename", "lseek"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_error_in_either_thread_leaves_nothing(
    root: PayloadRoot, call: str, number: int
) -> None:
    def fail(*args: object, **kwargs: object) -> int:
        raise OSError(number, "no")

    with patch.object(os, call, fail), pytest.raises(WriteFailed) as caught:
        write(root, request_of())
    assert caught.value.errno == number
    assert all_files(root) == set()


@pytest.mark.parametrize("gaps", [(), (7,)])
def test_where_no_thread_can_be_started_the_file_is_written_after_the_checks(
    root: PayloadRoot, gaps: tuple[int, ...]
) -> None:
    choices = (request_of(gaps=gaps), request_of(choice=1))
    whole = write(root, *choices)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with patch.object(threading.Thread, "start", refuse):
        steps, alone = steps_of(root, *choices, waits=False)
    assert alone == file_path(root, whole).read_bytes()
    assert steps[:3] == ["check", "check", "write the body"]
    assert len(all_files(root)) == 2


def test_only_large_files_pay_for_a_thread(root: PayloadRoot) -> None:
    with (
        patch.object(writer, "_OVERLAP_BYTES_MIN", 1 << 20),
        patch.object(writer, "ThreadPoolExecutor", None),
    ):
        write(root, request_of())


def test_a_writer_asks_the_disk_to_begin_while_it_goes_on(root: PayloadRoot) -> None:
    asked: list[tuple[int, int]] = []

    def begin_writeback(fd: int, offset_bytes: int, size_bytes: int) -> None:
        assert os.fstat(fd).st_size == offset_bytes + size_bytes
        asked.append((offset_bytes, size_bytes))

    with (
        patch.object(encodings, "BLOCK_BYTES_TARGET", 1000),
        patch.object(writer, "_WRITEBACK_BYTES", 3000),
        patch.object(writer, "begin_writeback", begin_writeback),
    ):
        report = write(root, request_of())
    stops = [offset + size for offset, size in asked]
    assert [offset for offset, _ in asked[1:]] == stops[:-1]  # without a hole
    assert min(size for _, size in asked) >= 3000
    assert report.size_bytes - stops[-1] < 3000
