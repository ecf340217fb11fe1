"""Problems that only several workers have.

::

    Problem (services.kit.problems)
    ├── Misdirected 421          a pipelined request of another worker's session
    └── WorkerSilent 503         another worker does not answer
"""

from typing import Final

from services.kit.problems import Problem

PARENT: Final = -1  # in place of a worker's index


class Misdirected(Problem):
    """The request came before the answer to the one before it, and belongs to another worker: its
    connection could not move. It is closed; the same request on another one is served.
    """

    status, code, title = 421, "misdirected", "Sent before an answer"


class WorkerSilent(Problem):
    """A worker gave no answer in time, so what it would say is not known."""

    status, code, title = 503, "worker_silent", "A worker does not answer"

    def __init__(self, index: int, reason: str) -> None:
        self.index = index
        name = "the parent of the workers" if index == PARENT else f"worker {index}"
        super().__init__(f"{name} {reason}", headers={"Retry-After": "1"})
