"""``StepCommitter``: commits steps from another process than the one that receives.

With a ``DataLoader`` the RankFeed lives in the data worker, while the optimizer step happens in
the trainer's main process. A COMMIT names its run and rank, so any connection may bring it.
"""

import time
from types import TracebackType
from typing import Final, Self

import zmq

from sideband.feed.curve import rank_keys
from sideband.feed.dealer import Dealer
from sideband.feed.errors import FeedTimeout, RankRefused, StepFailed
from sideband.feed.frames import encode_message
from sideband.feed.keys import RankKeys
from sideband.feed.messages import (
    AbortMessage,
    CommitMessage,
    CommittedMessage,
    RefusedMessage,
)
from sideband.ids import RunId

REPEAT_S: Final = 1.0
CONNECTING_S: Final = 0.05  # how soon it tries again while there is no connection


class StepCommitter:
    """One rank's commits. Not thread-safe; make it in the process that uses it.

    ``keys`` as ``RankFeed`` has them. Raises InvalidInput for an address beyond loopback without
    keys unless ``plain_beyond_loopback``, BadKeyFile, CurveUnavailable.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        run_id: RunId | str,
        global_rank: int,
        commit_timeout_s: float = 60.0,
        keys: RankKeys | None = None,
        plain_beyond_loopback: bool = False,
    ) -> None:
        loaded = rank_keys(endpoint, keys, plain_beyond_loopback=plain_beyond_loopback)
        self._endpoint, self._run_id, self._global_rank = endpoint, run_id, global_rank
        self._commit_timeout_s = commit_timeout_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = Dealer(self._context, endpoint, loaded)

    def commit(self, step: int, *, lineage: int | None = None) -> None:
        """Say that the optimizer step is done; returns when the feed has recorded it.

        ``lineage`` is the micro batches' own: a trainer that was gone back behind commits nothing.

        Repeated until then, so a feed that restarts gets it too. Raises StepFailed, RankRefused,
        MalformedFrame, or FeedTimeout after ``commit_timeout_s``.
        """
        header = CommitMessage(
            run_id=self._run_id, global_rank=self._global_rank, step=step, lineage=lineage
        )
        frames = encode_message(header)
        deadline_s = time.monotonic() + self._commit_timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            self._dealer.heal(now_s=time.monotonic())
            is_sent = self._dealer.send(frames)
            if self._is_answered(step, min(REPEAT_S if is_sent else CONNECTING_S, left_s)):
                return
        why = f" ({self._dealer.denial})" if self._dealer.denial else ""
        what = f"the confirmation of step {step} from {self._endpoint}{why}"
        raise FeedTimeout(what, waited_s=self._commit_timeout_s)

    def _is_answered(self, step: int, wait_s: float) -> bool:
        deadline_s = time.monotonic() + wait_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            self._dealer.wait(left_s)
            received, fault = self._dealer.receive()
            for header, _ in received:
                if isinstance(header, CommittedMessage) and header.step >= step:
                    return True
                if isinstance(header, AbortMessage):
                    raise StepFailed(header.step, header.reason)
                if isinstance(header, RefusedMessage):
                    raise RankRefused(header.code, header.reason)
            if fault is not None:
                raise fault
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
