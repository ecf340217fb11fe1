"""``StepCommitter``: commits steps from another process than the one that receives.

With a ``DataLoader`` the RankFeed lives in the data worker, while the optimizer step happens in
the trainer's main process. A COMMIT names its run and rank, so any connection may bring it.
"""

import time
from types import TracebackType
from typing import Final, Self

import zmq

from sideband.feed.errors import FeedTimeout, RankRefused, StepFailed
from sideband.feed.frames import decode_message, encode_message
from sideband.feed.messages import (
    FROM_FEED,
    AbortMessage,
    CommitMessage,
    CommittedMessage,
    RefusedMessage,
)
from sideband.ids import RunId

REPEAT_S: Final = 1.0


class StepCommitter:
    """One rank's commits. Not thread-safe; make it in the process that uses it."""

    def __init__(
        self,
        endpoint: str,
        *,
        run_id: RunId | str,
        global_rank: int,
        commit_timeout_s: float = 60.0,
    ) -> None:
        self._endpoint, self._run_id, self._global_rank = endpoint, run_id, global_rank
        self._commit_timeout_s = commit_timeout_s
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        self._dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._dealer.connect(endpoint)

    def commit(self, step: int) -> None:
        """Say that the optimizer step is done; returns when the feed has recorded it.

        Repeated until then, so a feed that restarts gets it too. Raises StepFailed, RankRefused,
        MalformedFrame, or FeedTimeout after ``commit_timeout_s``.
        """
        header = CommitMessage(run_id=self._run_id, global_rank=self._global_rank, step=step)
        frames = encode_message(header)
        deadline_s = time.monotonic() + self._commit_timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            if self._dealer.poll(0, zmq.POLLOUT):
                self._dealer.send_multipart(frames, flags=zmq.NOBLOCK)
            if self._is_answered(step, min(REPEAT_S, left_s)):
                return
        what = f"the confirmation of step {step} from {self._endpoint}"
        raise FeedTimeout(what, waited_s=self._commit_timeout_s)

    def _is_answered(self, step: int, wait_s: float) -> bool:
        deadline_s = time.monotonic() + wait_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            if not self._dealer.poll(max(1, int(left_s * 1000))):
                return False
            header, _ = decode_message(self._dealer.recv_multipart(), FROM_FEED)
            if isinstance(header, CommittedMessage) and header.step >= step:
                return True
            if isinstance(header, AbortMessage):
                raise StepFailed(header.step, header.reason)
            if isinstance(header, RefusedMessage):
                raise RankRefused(header.code, header.reason)
        return False

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._dealer.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
