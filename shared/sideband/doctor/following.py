"""The follower of a visit: it does what the leader asks, and answers. Blocking."""

import errno
import os
import threading
import time
from pathlib import Path
from typing import Final

from sideband.doctor.errors import FolderUnusable
from sideband.doctor.locks import check_refused
from sideband.doctor.meeting import POLL_S, Meeting
from sideband.doctor.messages import Reply, Request, Side
from sideband.doctor.probes import Watched, read_checked, side_of

WATCH_S: Final = 3.0
REPLY_TIMEOUT_S: Final = 60.0  # the slowest attribute cache in use holds for 60 s


def follow(meeting: Meeting, *, meet_timeout_s: float) -> None:
    """Answer until the leader ends the visit. Raises DoctorError."""
    meeting.wait("side-lead", Side, timeout_s=meet_timeout_s)
    meeting.post("side-follow", measured(meeting))
    serial = 0
    while True:
        serial += 1
        request = meeting.wait(f"request-{serial}", Request, timeout_s=REPLY_TIMEOUT_S + WATCH_S)
        received_s = time.time()
        reply = _answer(meeting, request, serial, received_s)
        meeting.post(f"reply-{serial}", reply)
        if request.op == "end":
            return


def _answer(meeting: Meeting, request: Request, serial: int, received_s: float) -> Reply:
    path = meeting.others / request.file
    seen = Watched(path)
    seconds, error = 0.0, ""
    try:
        if request.op == "watch":
            deadline = time.monotonic() + request.duration_s
            while time.monotonic() < deadline:
                seen.look()
        elif request.op == "fresh":
            seconds = _seconds_until_whole(seen)
        elif request.op == "read":
            seconds = read_checked(path, request.size_bytes, request.checksum)
        elif request.op == "hold":
            _read_deleted(meeting, path, serial)
        elif request.op == "lock":
            check_refused(path)
    except OSError as exc:
        error = f"{exc.strerror} (errno {exc.errno})"
    return Reply(
        received_s=received_s,
        replied_s=time.time(),
        reads=seen.reads,
        torn=seen.torn,
        missing=seen.missing,
        stale=seen.stale,
        seconds=seconds,
        error=error,
    )


def _seconds_until_whole(seen: Watched) -> float:
    """How long until the file is read whole. Raises OSError (ETIMEDOUT)."""
    pause, begin = threading.Event(), time.monotonic()
    while seen.reads == seen.torn:
        if time.monotonic() - begin > REPLY_TIMEOUT_S:
            raise OSError(errno.ETIMEDOUT, "an announced file did not appear")
        if not seen.look():
            pause.wait(POLL_S)
    return time.monotonic() - begin


def _read_deleted(meeting: Meeting, path: Path, serial: int) -> None:
    with open(path, "rb", buffering=0) as file:
        now_s = time.time()
        meeting.post(f"held-{serial}", Reply(received_s=now_s, replied_s=now_s))
        meeting.wait(f"gone-{serial}", Request, timeout_s=REPLY_TIMEOUT_S)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # ask the server, not a cache
        file.read()


def measured(meeting: Meeting) -> Side:
    """This side of either role, with its own times. Raises FolderUnusable."""
    try:
        return side_of(meeting.own, meeting.role)
    except OSError as exc:
        raise FolderUnusable(meeting.own, exc) from exc
