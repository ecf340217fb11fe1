"""A large file is written while it is checked: the same bytes and refusals, nothing visible."""

import errno
import os
import threading
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest

from sideband.payload import ChoicePayload, PayloadReader, PayloadRoot, RoutingRows, writer
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


def body_first(root: PayloadRoot, *choices: ChoicePayload) -> tuple[list[int], bytes]:
    """Where each write of a file began, and its bytes."""
    begins: list[int] = []
    whole = os.writev

    def writev(fd: int, buffers: list[memoryview]) -> int:
        begins.append(os.lseek(fd, 0, os.SEEK_CUR))
        return whole(fd, buffers)

    with patch.object(os, "writev", writev):
        report = write(root, *choices)
    return begins, file_path(root, report).read_bytes()


def test_it_makes_the_same_bytes(root: PayloadRoot) -> None:
    choices = (request_of(), request_of(choice=1))
    begins, overlapped = body_first(root, *choices)
    with patch.object(writer, "_OVERLAP_BYTES_MIN", 1 << 60):
        after, plain = body_first(root, *choices)
    assert overlapped == plain
    assert begins[-1] == 0 < begins[0]
    assert after == [0]


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
    _, overlapped = body_first(root, *choices)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with patch.object(threading.Thread, "start", refuse):
        begins, alone = body_first(root, *choices)
    assert alone == overlapped
    assert begins == [0]
    assert len(all_files(root)) == 2


def test_only_large_files_pay_for_a_thread(root: PayloadRoot) -> None:
    with (
        patch.object(writer, "_OVERLAP_BYTES_MIN", 1 << 20),
        patch.object(writer, "ThreadPoolExecutor", None),
    ):
        write(root, request_of())
