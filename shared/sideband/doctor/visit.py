"""A visit from the leader's side: it asks for each probe in turn; ``following.py`` answers."""

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import xxhash

from sideband.doctor.errors import DoctorError, FolderUnusable
from sideband.doctor.following import REPLY_TIMEOUT_S, WATCH_S, follow, measured
from sideband.doctor.locks import locked
from sideband.doctor.meeting import Meeting, publish
from sideband.doctor.messages import Echo, Reply, Report, Request, Side
from sideband.doctor.probes import sealed
from sideband.mounts import mount_of

ECHOES: Final = 10
ECHOES_S: Final = 30.0  # a name asked for too early may take an attribute cache's life
FRESH: Final = 5
RENAME_PAUSE_S: Final = 0.01
SEALED_BYTES: Final = 64 << 10
READ_BYTES: Final = 64 << 20

Progress = Callable[[str], None]


def visit(root: Path, name: str, *, meet_timeout_s: float, say: Progress) -> Report | None:
    """Take the side that is free: the leader's report, or None where this side followed.

    Raises DoctorError.
    """
    meeting = Meeting.join(root, name)
    try:
        if meeting.role == "lead":
            return lead(meeting, meet_timeout_s=meet_timeout_s, say=say)
        follow(meeting, meet_timeout_s=meet_timeout_s)
        return None
    finally:
        meeting.leave()


def visit_alone(root: Path, *, say: Progress) -> Report:
    """Both sides in this process. Raises DoctorError."""
    name = f"alone-{os.getpid()}"
    meeting = Meeting.join(root, name)
    errors: list[DoctorError] = []

    def other_side() -> None:
        try:
            follow(Meeting.join(root, name), meet_timeout_s=REPLY_TIMEOUT_S)
        except DoctorError as exc:
            errors.append(exc)

    thread = threading.Thread(target=other_side, name="sideband-doctor", daemon=True)
    thread.start()
    try:
        report = lead(meeting, meet_timeout_s=REPLY_TIMEOUT_S, say=say)
        thread.join(REPLY_TIMEOUT_S)
    finally:
        meeting.leave()
    if errors:
        raise errors[0]
    return report


def lead(meeting: Meeting, *, meet_timeout_s: float, say: Progress) -> Report:
    """Ask for every probe in turn. Raises DoctorError."""
    say("write, fsync, rename")
    own = measured(meeting)
    meeting.post("side-lead", own)
    say("waiting for the other side")
    other = meeting.wait("side-follow", Side, timeout_s=meet_timeout_s)
    asked = _Asked(meeting)
    say("how long until an announced file appears")
    fresh = [asked.for_fresh(serial) for serial in range(FRESH)]
    say("how long until a file appears that was asked for too early")
    echoes = asked.for_echoes()
    say("rename over a file that is being read")
    watch = asked.for_watch()
    say(f"read {READ_BYTES >> 20} MiB by 32 threads")
    read = asked.for_read()
    say("read a file that was deleted")
    hold = asked.for_hold()
    say("lock a file of the other side")
    lock = asked.for_lock()
    asked.end()
    return Report(
        lead=own,
        follow=other,
        filesystem=mount_of(meeting.folder).kind,
        fresh=fresh,
        echoes=echoes,
        watch=watch,
        read=read,
        read_bytes=READ_BYTES,
        hold=hold,
        lock=lock,
    )


class _Asked:
    """The leader's requests, numbered."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._serial = 0
        self._pause = threading.Event()

    def for_fresh(self, serial: int) -> Reply:
        """A file in a new folder that is announced when it is there, as a rank learns of one."""
        folder = self._meeting.own / f"fresh-{serial}"
        try:
            folder.mkdir()
            publish(folder, "file", sealed(serial, SEALED_BYTES))
        except OSError as exc:
            raise FolderUnusable(folder, exc) from exc
        return self._ask(Request(op="fresh", sent_s=time.time(), file=f"fresh-{serial}/file"))

    def for_echoes(self) -> list[Echo]:
        """At least one; each side asks for the other's file before it is there."""
        found: list[Echo] = []
        deadline = time.monotonic() + ECHOES_S
        while not found or (len(found) < ECHOES and time.monotonic() < deadline):
            found.append(self.echo())
        return found

    def echo(self) -> Echo:
        """One round trip."""
        sent_s = time.time()
        reply = self._ask(Request(op="echo", sent_s=sent_s))
        return Echo(
            sent_s=sent_s,
            received_s=reply.received_s,
            replied_s=reply.replied_s,
            returned_s=time.time(),
        )

    def for_watch(self) -> Reply:
        self._meeting.publish("watched", sealed(0, SEALED_BYTES))
        self._send(Request(op="watch", sent_s=time.time(), file="watched", duration_s=WATCH_S))
        deadline, serial = time.monotonic() + WATCH_S, 0
        while time.monotonic() < deadline:
            serial += 1
            self._meeting.publish("watched", sealed(serial, SEALED_BYTES))
            self._pause.wait(RENAME_PAUSE_S)
        return self._reply()

    def for_read(self) -> Reply:
        content = random.Random(1).randbytes(READ_BYTES)
        self._meeting.publish("large", content)
        checksum = xxhash.xxh3_64_intdigest(content)
        return self._ask(
            Request(
                op="read",
                sent_s=time.time(),
                file="large",
                size_bytes=READ_BYTES,
                checksum=checksum,
            )
        )

    def for_hold(self) -> Reply:
        self._send(Request(op="hold", sent_s=time.time(), file="watched"))
        self._meeting.wait(f"held-{self._serial}", Reply, timeout_s=REPLY_TIMEOUT_S)
        (self._meeting.own / "watched").unlink()
        self._meeting.post(f"gone-{self._serial}", Request(op="gone", sent_s=time.time()))
        return self._reply()

    def for_lock(self) -> Reply:
        """As the embedded ledger does: whoever comes second must be refused."""
        self._meeting.publish("locked", b"-")
        try:
            with locked(self._meeting.own / "locked"):
                return self._ask(Request(op="lock", sent_s=time.time(), file="locked"))
        except OSError as exc:
            now_s = time.time()
            return Reply(received_s=now_s, replied_s=now_s, error=exc.strerror or str(exc))

    def end(self) -> None:
        self._ask(Request(op="end", sent_s=time.time()))

    def _ask(self, request: Request) -> Reply:
        self._send(request)
        return self._reply()

    def _send(self, request: Request) -> None:
        self._serial += 1
        self._meeting.post(f"request-{self._serial}", request)

    def _reply(self) -> Reply:
        return self._meeting.wait(
            f"reply-{self._serial}", Reply, timeout_s=REPLY_TIMEOUT_S + WATCH_S
        )
