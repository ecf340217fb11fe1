"""The parent of the workers: binds, forks, watches, ends. It sees no request.

::

    bind ──▶ fork all ──▶ watch ──signal──▶ ask all to end ──▶ kill the late ──▶ end
                            │ one ended, or hangs and is killed
                            └──▶ fork it again, later each time in a row

It has one thread and no loop, so it can fork at any time. It keeps the last state that the leader
has told, which a worker that is forked inherits, and both ends of every inbox.
"""

import os
import select
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Final

import msgspec
import structlog

from services.inference_proxy.workers.asks import ASKS, AnyAsk, Done, End, Keep
from services.inference_proxy.workers.calls import ASKED_BYTES_MAX
from services.inference_proxy.workers.child import SILENT_S_MAX, Child
from services.inference_proxy.workers.listening import listeners
from services.inference_proxy.workers.parcels import BEAT, CALL, STARTED, Inbox, Outbox
from services.inference_proxy.workers.state import SharedState
from services.inference_proxy.workers.worker import Seat

END_MARGIN_S: Final = 5.0  # beyond the drain, for the last deletions
ASK_TIMEOUT_S: Final = 1.0  # of a worker that has something to tell
TICK_S: Final = 0.5
POLL_S: Final = 0.005
KILL_WAIT_S: Final = 1.0  # until a killed worker is gone: it holds nothing that others wait for

Work = Callable[[Seat, SharedState | None], None]
log = structlog.get_logger(__name__)


class Parent:
    """``work`` is what a worker does, called in a process of its own. One that has started and
    then says nothing for ``silent_s_max`` is killed.
    """

    def __init__(
        self,
        work: Work,
        *,
        host: str,
        port: int,
        workers: int,
        drain_timeout_s: float,
        silent_s_max: float = SILENT_S_MAX,
    ) -> None:
        self._work, self._drain_timeout_s = work, drain_timeout_s
        self._silent_s_max, self._looked_s = silent_s_max, time.monotonic()
        self._inboxes = [Inbox.create() for _ in range(workers + 1)]  # the last is the parent's
        self._listeners = listeners(host, port, workers)
        self._lifeline = socket.socketpair()
        self._children = [Child() for _ in range(workers)]
        self._dying: list[int] = []
        self._state: SharedState | None = None
        self._is_told_to_end = False
        self._signals = socket.socketpair()
        self._code: int | None = None  # with which a worker ended that could not even begin

    def run(self) -> None:
        """Until SIGTERM or SIGINT. Raises SystemExit when a worker cannot begin."""
        self._catch_signals()
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals[1], selectors.EVENT_READ)
            selector.register(self._inboxes[-1].taking, selectors.EVENT_READ)
            while not self._is_told_to_end and self._code is None:
                self._begin_due()
                selector.select(self._wait_s())
                self._drop_wakeups()
                self._read_inbox()
                self._reap()
                self._kill_hanging()
        self._end_all()
        if self._code is not None:
            sys.exit(self._code)

    def _catch_signals(self) -> None:
        for end in self._signals:
            end.setblocking(False)
        signal.set_wakeup_fd(self._signals[0].fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._told_to_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only so that it wakes us

    def _told_to_end(self, _number: int, _frame: object) -> None:
        self._is_told_to_end = True

    def _drop_wakeups(self) -> None:
        try:
            self._signals[1].recv(4096)
        except BlockingIOError:
            return

    def _wait_s(self) -> float:
        now_s = time.monotonic()
        due = [child.due_s - now_s for child in self._children if child.pid is None]
        return max(0.0, min([TICK_S, *due]))

    def _begin_due(self) -> None:
        now_s = time.monotonic()
        for index, child in enumerate(self._children):
            if child.pid is None and now_s >= child.due_s:
                child.begun(self._fork(index), now_s=now_s)

    def _fork(self, index: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        code: int | None = None
        try:
            self._be_child(index)
            code = 0
        except SystemExit as exc:
            code = exc.code if isinstance(exc.code, int) else 1
        finally:
            if code is None:  # a bug: said, then as any process ends that raises
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _be_child(self, index: int) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for end in (*self._signals, self._lifeline[0]):
            end.close()
        for other, listener in enumerate(self._listeners):
            if other != index:
                listener.close()
        seat = Seat(
            index=index,
            inbox=self._inboxes[index],
            outboxes=tuple(Outbox(inbox) for inbox in self._inboxes),
            listener=self._listeners[index],
            lifeline=self._lifeline[1],
        )
        self._work(seat, self._state)

    def _read_inbox(self) -> None:
        while (parcel := self._inboxes[-1].take()) is not None:
            if parcel.kind == STARTED:
                index = parcel.data[1]
                self._children[index].has_started = True
                log.info("worker_started", worker=index, pid=self._children[index].pid)
            elif parcel.kind == BEAT:
                self._children[parcel.data[1]].heard()
            elif parcel.kind == CALL:
                self._answer(socket.socket(fileno=parcel.descriptors.pop()))
            parcel.close()

    def _answer(self, caller: socket.socket) -> None:
        with caller:
            caller.settimeout(ASK_TIMEOUT_S)
            try:
                asked = b""
                while part := caller.recv(ASKED_BYTES_MAX):
                    asked += part
                self._do(ASKS.decode(asked))
                caller.sendall(msgspec.msgpack.encode(Done()))
            except (
                OSError,
                msgspec.DecodeError,
            ) as exc:  # it died while it asked, or waits no longer
                log.warning("ask_lost", error=str(exc))

    def _do(self, ask: AnyAsk) -> None:
        if isinstance(ask, Keep):
            self._state = ask.state
        elif isinstance(ask, End):
            self._kill(ask.index)
        else:
            raise AssertionError(f"the parent is not asked to {type(ask).__name__}")

    def _kill_hanging(self) -> None:
        """End those whose loop is stuck; while the parent stood still too, the machine did."""
        now_s = time.monotonic()
        awake_s, self._looked_s = min(now_s - self._looked_s, TICK_S), now_s
        for index, child in enumerate(self._children):
            if child.hangs(awake_s, silent_s_max=self._silent_s_max):
                log.error("worker_hangs", worker=index, silent_s=round(child.silent_s))
                self._kill(index)

    def _kill(self, index: int) -> None:
        pid = self._children[index].pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            self._dying.append(pid)
            self._bury(wait_s=KILL_WAIT_S)
            self._ended(index, -signal.SIGKILL)

    def _bury(self, *, wait_s: float = 0.0) -> None:
        """Forget the killed that are gone. One that hangs in a file system serves no more."""
        deadline_s = time.monotonic() + wait_s
        while self._dying:
            self._dying = [pid for pid in self._dying if not os.waitpid(pid, os.WNOHANG)[0]]
            if time.monotonic() >= deadline_s:
                return
            select.select([], [], [], POLL_S)

    def _reap(self) -> None:
        self._bury()
        for index, child in enumerate(self._children):
            if child.pid is not None:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    self._ended(index, os.waitstatus_to_exitcode(status))

    def _ended(self, index: int, code: int) -> None:
        """A worker ended that nobody asked to."""
        child = self._children[index]
        if child.never_began(code):
            self._code, child.pid = code, None
            return
        wait_s = child.ended(now_s=time.monotonic())
        log.error("worker_ended", worker=index, exit_code=code, again_in_s=wait_s)

    def _end_all(self) -> None:
        """Nobody is accepted any more; what runs may end."""
        for listener in self._listeners:
            listener.close()
        self._signal_all(signal.SIGTERM)
        deadline_s = time.monotonic() + self._drain_timeout_s + END_MARGIN_S
        while self._left() and time.monotonic() < deadline_s:
            select.select([self._signals[1]], [], [], TICK_S)
            self._drop_wakeups()
        if self._left():
            log.error("workers_killed", pids=self._left())
            self._signal_all(signal.SIGKILL)
        for pid in self._left():
            os.waitpid(pid, 0)

    def _left(self) -> list[int]:
        """Workers that have not ended."""
        for child in self._children:
            if child.pid is not None and os.waitpid(child.pid, os.WNOHANG)[0]:
                child.pid = None
        return [child.pid for child in self._children if child.pid is not None]

    def _signal_all(self, number: int) -> None:
        for pid in self._left():
            os.kill(pid, number)
