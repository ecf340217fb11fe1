"""Open files are kept, bounded, shared between threads, and closed exactly once."""

import itertools
import os
import random
import resource
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from sideband.payload import PayloadError, PayloadReader, PayloadRoot
from sideband.payload.errors import NoDescriptorFree, PayloadNotFound
from sideband.payload.handles import OpenFiles, OpenPayload
from sideband.payload.header import PayloadHeader
from tests.unit.payload.support import REQUEST, RUN, WIDE, file_path, of_field, rows_read, write_one

HEADER = PayloadHeader(run_id=RUN, request_id=REQUEST, policy_version=3, model=WIDE, sections=())


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Opener:
    """Opens real files and counts; ``absent`` ones fail."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: Counter[str] = Counter()
        self.absent: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, file: str) -> OpenPayload:
        self.opened[file] += 1
        assert self.gate.wait(10)
        if file in self.absent:
            raise PayloadNotFound(file)
        fd = os.open(self.folder / file, os.O_RDONLY)
        return OpenPayload(file=file, fd=fd, header=HEADER, sections={})


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    for number in range(20):
        (tmp_path / str(number)).write_text(str(number))
    before = open_descriptors()
    yield Opener(tmp_path)
    assert open_descriptors() == before


def content(files: OpenFiles, file: str) -> str:
    with files.use(file) as payload:
        return os.pread(payload.fd, 10, 0).decode()


def test_a_file_is_opened_once_and_kept(opener: Opener) -> None:
    files = OpenFiles(opener, files_max=3)
    for _ in range(3):
        assert content(files, "1") == "1"
    assert opener.opened == {"1": 1}
    files.close()


def test_the_least_recently_used_goes_first(opener: Opener) -> None:
    files = OpenFiles(opener, files_max=2)
    for file in ("1", "2", "1", "3", "1"):
        content(files, file)
    assert opener.opened == {"1": 1, "2": 1, "3": 1}
    content(files, "2")
    assert opener.opened["2"] == 2
    assert len(files) == 2
    files.close()


def test_files_in_use_stay_open_over_the_limit(opener: Opener) -> None:
    files = OpenFiles(opener, files_max=1)
    with files.use("1") as one, files.use("2") as two, files.use("3") as three:
        assert [os.pread(p.fd, 1, 0) for p in (one, two, three)] == [b"1", b"2", b"3"]
        assert len(files) == 3
    assert len(files) == 1
    files.close()


def test_a_limit_of_none_closes_each_file_after_its_use(opener: Opener) -> None:
    files = OpenFiles(opener, files_max=0)
    before = open_descriptors()
    assert content(files, "1") == "1"
    assert (len(files), open_descriptors()) == (0, before)


def test_a_forgotten_file_is_opened_anew_while_its_readers_go_on(opener: Opener) -> None:
    files = OpenFiles(opener, files_max=2)
    with files.use("1") as old:
        files.forget("1")
        with files.use("1") as new:
            assert new.fd != old.fd
        files.forget("1")
        files.forget("1")
        assert os.pread(old.fd, 1, 0) == b"1"
    assert opener.opened["1"] == 2
    files.forget("never opened")
    assert len(files) == 0


def test_closing_waits_for_readers_and_may_be_repeated(opener: Opener) -> None:
    files = OpenFiles(opener, files_max=2)
    with files.use("1") as payload:
        files.close()
        files.close()
        assert os.pread(payload.fd, 1, 0) == b"1"
    assert content(files, "1") == "1"  # and it may be used again
    files.close()


def test_a_failed_opening_is_not_remembered(opener: Opener) -> None:
    files = OpenFiles(opener, files_max=2)
    opener.absent.add("1")
    for _ in range(2):
        with pytest.raises(PayloadNotFound):
            content(files, "1")
    assert len(files) == 0
    opener.absent.clear()
    assert content(files, "1") == "1"
    files.close()


def test_a_failed_opening_that_was_forgotten_meanwhile(opener: Opener) -> None:
    opener.absent.add("1")
    opener.gate.clear()
    files = OpenFiles(opener, files_max=2)
    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(content, files, "1")
        while not opener.opened["1"]:
            pass
        files.forget("1")
        opener.gate.set()
        assert isinstance(failing.exception(), PayloadNotFound)
    assert len(files) == 0


def test_many_threads_open_a_file_once_and_others_do_not_wait(opener: Opener) -> None:
    files = OpenFiles(opener, files_max=4)
    opener.gate.clear()
    with ThreadPoolExecutor(9) as pool:
        waiting = [pool.submit(content, files, "1") for _ in range(8)]
        while not opener.opened["1"]:
            pass
        opener.gate.set()
        assert content(files, "2") == "2"
        assert [future.result(10) for future in waiting] == ["1"] * 8
    assert opener.opened["1"] == 1
    files.close()


@pytest.mark.parametrize("seed", range(3))
def test_readers_never_meet_a_closed_or_foreign_descriptor(opener: Opener, seed: int) -> None:
    """32 threads read, forget and fail at random over three places for twenty files."""
    files = OpenFiles(opener, files_max=3)
    start = threading.Barrier(32)

    def work(number: int) -> None:
        rng = random.Random(f"{seed}-{number}")
        start.wait(10)
        for _ in range(150):
            file = str(rng.randrange(20))
            action = rng.random()
            if action < 0.1:
                files.forget(file)
            elif action < 0.12:
                files.close()
            elif action < 0.15:
                opener.absent.add(file)
            else:
                opener.absent.discard(file)
                with suppress(PayloadNotFound):
                    assert content(files, file) == file

    with ThreadPoolExecutor(32) as pool:
        for future in [pool.submit(work, number) for number in range(32)]:
            future.result(30)
    assert len(files) <= 3
    files.close()
    assert len(files) == 0


def test_a_reader_over_few_descriptors_serves_many_files(root: PayloadRoot) -> None:
    reports = [write_one(root, seed, request_id=f"request-{seed}") for seed in range(12)]
    before = open_descriptors()
    with PayloadReader(root, model=WIDE, open_files_max=2) as reader:

        def read(number: int) -> dict[int, bytes]:
            report = reports[number % 12]
            if number % 7 == 0:
                reader.forget(report.file or "")
            return rows_read(reader, of_field(report.segments[0], "routed_experts"))

        with ThreadPoolExecutor(32) as pool:
            found = list(pool.map(read, range(240), timeout=30))
        assert open_descriptors() <= before + 2
    assert open_descriptors() == before
    for number in range(240):
        assert found[number] == found[number % 12]
    assert len({tuple(rows.values()) for rows in found}) == 12


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Seven are free: two for the way down to a file, the others for files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(fd) for fd in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{fd}").exists()}
    free = (fd for fd in itertools.count() if fd not in taken)
    highest = next(itertools.islice(free, 6, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("few_descriptors")
def test_idle_files_give_their_descriptors_to_others(root: PayloadRoot) -> None:
    reports = [write_one(root, seed, request_id=f"request-{seed}") for seed in range(12)]
    with PayloadReader(root, model=WIDE) as reader:
        first, second = (
            [rows_read(reader, of_field(r.segments[0], "routed_experts")) for r in reports]
            for _ in range(2)
        )
    assert first == second


@pytest.mark.usefixtures("few_descriptors")
def test_files_in_use_give_nothing_and_the_next_may_try_again(root: PayloadRoot) -> None:
    files = [write_one(root, seed, request_id=f"request-{seed}").file or "" for seed in range(12)]
    with PayloadReader(root, model=WIDE) as reader:
        with ExitStack() as stack:
            for file in files[:6]:
                stack.enter_context(reader._files.use(file))
            with pytest.raises(NoDescriptorFree):
                reader.header(files[6])
        assert reader.header(files[6]).request_id == "request-6"


def test_a_file_that_was_replaced_is_seen_after_it_was_forgotten(
    root: PayloadRoot, reader: PayloadReader
) -> None:
    report, other = write_one(root, 1), write_one(root, 2)
    assert report.file is not None
    routing = of_field(report.segments[0], "routed_experts")
    before = rows_read(reader, routing)
    os.replace(file_path(root, other), file_path(root, report))
    assert rows_read(reader, routing) == before
    reader.forget(report.file)
    assert rows_read(reader, routing) != before


def test_a_deleted_file_is_read_on_until_it_is_forgotten(
    root: PayloadRoot, reader: PayloadReader
) -> None:
    report = write_one(root)
    assert report.file is not None
    header = reader.header(report.file)
    root.delete(report.file)
    assert reader.header(report.file) is header
    reader.forget(report.file)
    with pytest.raises(PayloadNotFound):
        reader.header(report.file)


def test_a_refused_file_leaves_no_descriptor_behind(
    root: PayloadRoot, reader: PayloadReader
) -> None:
    report = write_one(root)
    file_path(root, report).write_bytes(b"SIDEBAND" + bytes(100))
    before = open_descriptors()
    for _ in range(10):
        with suppress(PayloadError):
            reader.header(report.file or "")
    assert open_descriptors() == before


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_does_not_wait_for_locks_that_nobody_holds_there(opener: Opener) -> None:
    files = OpenFiles(opener, files_max=2)
    with files.use("1"):  # the child has no thread that would ever leave this or give the lock back
        with files._lock:
            pid = os.fork()
            if pid == 0:
                signal.alarm(5)
                os._exit(0 if [content(files, str(n)) for n in range(1, 4)] == [*"123"] else 1)
            _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    assert content(files, "1") == "1"
    files.close()


def test_a_deleted_file_gives_its_bytes_back_when_all_are_forgotten(
    root: PayloadRoot, reader: PayloadReader
) -> None:
    report = write_one(root)
    rows_read(reader, of_field(report.segments[0], "routed_experts"))
    file_path(root, report).unlink()
    assert len(payloads_held(root)) == 1
    reader.forget_all()
    assert payloads_held(root) == []
    with pytest.raises(PayloadNotFound):
        reader.header(report.file or "")


def payloads_held(root: PayloadRoot) -> list[str]:
    """Deleted payload files of a root that this process has open."""
    folder = Path("/proc/self/fd")
    links = [os.readlink(folder / fd) for fd in os.listdir(folder) if (folder / fd).is_symlink()]
    names = [link for link in links if link.endswith(".sbp (deleted)")]
    return [name for name in names if Path(name).is_relative_to(root.path)]
