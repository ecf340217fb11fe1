"""Writers of one request never meet; a reader beside them sees whole files only."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sideband.payload import PayloadReader, PayloadRoot
from sideband.payload.errors import WriteFailed
from tests.unit.payload.support import (
    GAPS,
    REQUEST,
    all_files,
    of_field,
    one_choice,
    rows_given,
    rows_read,
    write_one,
)

REPOSITORY = Path(__file__).parent.parent.parent.parent
WAIT_S = 30.0


def start_writer(root: PayloadRoot, number: int, count: int) -> "subprocess.Popen[bytes]":
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "shared")])
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.unit.payload.processes",
            str(root.path),
            str(number),
            str(count),
        ],
        env={"PYTHONPATH": paths},
        cwd=REPOSITORY,
    )


def headers_of_all(root: PayloadRoot) -> int:
    """Opens every visible file; each must be whole."""
    files = [file for file in root.files_of_request(3, REQUEST) if file.endswith(".sbp")]
    with PayloadReader(root, model=None) as reader:
        for file in files:
            assert len(reader.header(file).sections) == 2
    return len(files)


def test_threads_that_write_one_request_each_make_a_file(root: PayloadRoot) -> None:
    with ThreadPoolExecutor(16) as pool:
        reports = list(pool.map(lambda seed: write_one(root, seed), range(64)))
    assert len({report.file for report in reports}) == 64
    assert sorted(report.file or "" for report in reports) == root.files_of_request(3, REQUEST)
    with PayloadReader(root, model=None) as reader:
        for seed, report in enumerate(reports):
            choice = one_choice(seed)
            for field, rows in rows_given(choice, gaps=GAPS).items():
                assert rows_read(reader, of_field(report.segments[0], field), choice) == rows


def test_threads_that_begin_on_an_empty_root_make_its_folders_together(root: PayloadRoot) -> None:
    with ThreadPoolExecutor(16) as pool:
        reports = list(
            pool.map(
                lambda n: write_one(root, policy_version=n % 2, request_id=f"r-{n % 4}"), range(32)
            )
        )
    assert {report.file for report in reports} == all_files(root)
    assert root.versions() == [0, 1]


def test_processes_that_write_one_request_never_meet_and_a_kill_leaves_no_half_file(
    root: PayloadRoot,
) -> None:
    ended = [start_writer(root, number, 12) for number in range(2)]
    killed = start_writer(root, 2, 1_000_000)
    deadline = time.monotonic() + WAIT_S
    while headers_of_all(root) < 36:  # readers run beside the writers all the time
        assert time.monotonic() < deadline, "the writers make no progress"
    assert [process.wait(WAIT_S) for process in ended] == [0, 0]
    killed.send_signal(signal.SIGKILL)
    killed.wait(WAIT_S)
    assert headers_of_all(root) >= 36
    leftovers = [file for file in all_files(root) if file.endswith(".staging")]
    assert len(leftovers) <= 1


def test_a_version_swept_again_and_again_under_writers_never_tears_a_file(
    root: PayloadRoot,
) -> None:
    def sweep() -> int:
        return sum(root.remove_version(3) for _ in range(100))

    def write_all(seed: int) -> int:
        done = 0
        for index in range(20):
            try:
                write_one(root, 100 * seed + index)
            except WriteFailed:  # its folder went away under it: loud, and nothing is left
                continue
            done += 1
        return done

    with ThreadPoolExecutor(5) as pool:
        sweeper = pool.submit(sweep)
        writers = [pool.submit(write_all, seed) for seed in range(4)]
        assert sum(writer.result(WAIT_S) for writer in writers) >= 0
        assert sweeper.result(WAIT_S) >= 0
    headers_of_all(root)
    assert not [file for file in all_files(root) if file.endswith(".staging")]
    root.remove_version(3)
    report = write_one(root)
    assert all_files(root) == {report.file}
