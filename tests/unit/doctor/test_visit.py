"""The two sides on a real folder; what they say when the folder or a side is missing."""

import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import xxhash

from sideband.doctor import following, locks, probes, visit
from sideband.doctor.errors import DoctorError, FolderUnusable, MeetingTaken, PeerSilent
from sideband.doctor.findings import Level, findings_of
from sideband.doctor.meeting import Meeting, publish
from sideband.doctor.messages import Report, Side
from sideband.errors import InvalidId


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visit, "WATCH_S", 0.2)
    monkeypatch.setattr(visit, "READ_BYTES", (1 << 20) + 17)
    monkeypatch.setattr(probes, "FSYNC_ROUNDS", 3)


def test_alone_it_measures_everything_and_leaves_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    report = visit.visit_alone(tmp_path, say=said.append)
    assert report.is_one_host
    assert report.watch.reads > 0
    assert (report.watch.torn, report.watch.missing, report.read.error) == (0, 0, "")
    assert report.read.seconds > 0
    assert len(report.echoes) == visit.ECHOES
    assert len(report.fresh) == visit.FRESH
    assert all(reply.reads == 1 and not reply.error for reply in report.fresh)
    assert report.lock.error == "", "the second one was refused"
    assert len(report.lead.fsync_s) == 3
    assert all(echo.travel_s > 0 for echo in report.echoes)
    assert {finding.level for finding in findings_of(report)} <= {Level.GOOD, Level.REMARK}
    assert list(tmp_path.iterdir()) == []
    assert said[0] == "write, fsync, rename"


def test_two_sides_meet_by_name(tmp_path: Path) -> None:
    reports: list[Report | None] = []

    def side() -> None:
        reports.append(visit.visit(tmp_path, "m", meet_timeout_s=20, say=lambda _: None))

    threads = [threading.Thread(target=side) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert sorted(report is None for report in reports) == [False, True]
    assert list(tmp_path.iterdir()) == []


def test_a_third_side_is_refused(tmp_path: Path) -> None:
    assert Meeting.join(tmp_path, "m").role == "lead"
    assert Meeting.join(tmp_path, "m").role == "follow"
    with pytest.raises(MeetingTaken, match="choose another name"):
        Meeting.join(tmp_path, "m")


@pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 200])
def test_a_name_that_is_no_id_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidId, match="meet"):
        Meeting.join(tmp_path, name)


def test_a_side_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerSilent, match="side-follow"):
        visit.visit(tmp_path, "m", meet_timeout_s=0.05, say=lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FolderUnusable, match="No such file"):
        visit.visit_alone(tmp_path / "absent", say=lambda _: None)


def test_an_error_of_the_other_side_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(meeting: Meeting, *, meet_timeout_s: float) -> None:
        raise PeerSilent("anything", meet_timeout_s)

    monkeypatch.setattr(visit, "follow", fail)
    monkeypatch.setattr(visit, "REPLY_TIMEOUT_S", 0.1)
    with pytest.raises(DoctorError):
        visit.visit_alone(tmp_path, say=lambda _: None)


def test_a_stale_handle_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may forget a handle between look-up and read; other errors are final."""
    meeting, other = Meeting.join(tmp_path, "m"), Meeting.join(tmp_path, "m")
    other.post("side", Side(host="h", boot_id="b", fsync_s=[]))
    failures = [OSError(errno.ESTALE, "stale"), OSError(errno.EIO, "broken")]
    real_open = open

    def flaky(path: Path, mode: str = "r") -> object:
        if failures and failures[0].errno == errno.ESTALE:
            raise failures.pop(0)
        return real_open(path, mode)

    monkeypatch.setattr("builtins.open", flaky)
    assert meeting.wait("side", Side, timeout_s=5).host == "h"

    def broken(path: Path, mode: str = "r") -> object:
        raise failures[0]

    monkeypatch.setattr("builtins.open", broken)
    with pytest.raises(FolderUnusable, match="broken"):
        meeting.wait("side", Side, timeout_s=5)


def test_the_read_probe_finds_what_is_wrong(tmp_path: Path) -> None:
    content = os.urandom(300_000)
    publish(tmp_path, "large", content)
    checksum = xxhash.xxh3_64_intdigest(content)
    assert probes.read_checked(tmp_path / "large", len(content), checksum) > 0
    with pytest.raises(OSError, match="not those that were written"):
        probes.read_checked(tmp_path / "large", len(content), checksum + 1)
    with pytest.raises(OSError, match="300000 of 300001"):
        probes.read_checked(tmp_path / "large", len(content) + 1, checksum)


def test_the_watch_probe_tells_torn_missing_and_stale_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = probes.Watched(tmp_path / "name")
    assert not seen.look()
    assert (seen.reads, seen.missing) == (0, 0)  # it may still be on its way
    publish(tmp_path, "name", probes.sealed(1, 100))
    assert seen.look()
    (tmp_path / "name").write_bytes(probes.sealed(1, 100)[:60] + probes.sealed(2, 100)[60:])
    seen.look()
    assert (seen.reads, seen.torn) == (2, 1)
    (tmp_path / "name").unlink()
    seen.look()
    assert seen.missing == 1
    monkeypatch.setattr(Path, "read_bytes", _raises(OSError(errno.ESTALE, "stale")))
    seen.look()
    assert seen.stale == 1
    monkeypatch.setattr(Path, "read_bytes", _raises(OSError(errno.EACCES, "no")))
    with pytest.raises(PermissionError):
        seen.look()


def _raises(error: OSError) -> object:
    def read_bytes(_: Path) -> bytes:
        raise error

    return read_bytes


def test_an_announced_file_that_never_comes_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "REPLY_TIMEOUT_S", 0.02)
    with pytest.raises(TimeoutError, match="announced"):
        following._seconds_until_whole(probes.Watched(tmp_path / "absent"))


def test_a_lock_that_nobody_else_sees_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "locked"
    file.write_bytes(b"-")
    with locks.locked(file):
        locks.check_refused(file)
        with pytest.raises(BlockingIOError), locks.locked(file):
            pass
    with pytest.raises(OSError, match="is not seen"):
        locks.check_refused(file)
    real = fcntl.fcntl

    def without_locks(fd: int, command: int, argument: Any = 0) -> Any:
        if command == fcntl.F_OFD_SETLK:
            raise OSError(errno.ENOSYS, "Function not implemented")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", without_locks)
    assert visit.visit_alone(tmp_path, say=lambda _: None).lock.error == "Function not implemented"
