"""One worker as the parent sees it: when the next begins in its place, and when it hangs. Pure."""

from dataclasses import dataclass
from typing import Final

BACKOFF_S: Final = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)  # by how often in a row; the last one repeats
LASTED_S: Final = 10.0  # who lived so long does not count as failing in a row
BEAT_S: Final = 1.0  # a worker whose loop runs says so this often
SILENT_S_MAX: Final = 15.0  # beyond it the loop is stuck: what arrives there would wait for ever


@dataclass(slots=True, kw_only=True)
class Child:
    """``pid`` is None while it waits to begin again. Times are monotonic seconds."""

    pid: int | None = None
    begun_s: float = 0.0
    due_s: float = 0.0
    failures: int = 0  # in a row
    has_started: bool = False
    silent_s: float = 0.0  # for so long nothing was heard, of the time that the parent ran

    def begun(self, pid: int, *, now_s: float) -> None:
        """A process was forked for it."""
        self.pid, self.begun_s, self.has_started, self.silent_s = pid, now_s, False, 0.0

    def heard(self) -> None:
        """Its loop runs."""
        self.silent_s = 0.0

    def hangs(self, awake_s: float, *, silent_s_max: float) -> bool:
        """Whether it was silent for too long, after ``awake_s`` more of the parent's own time."""
        if self.pid is None or not self.has_started:
            return False
        self.silent_s += awake_s
        return self.silent_s > silent_s_max

    def never_began(self, code: int) -> bool:
        """Whether an end with ``code`` is due to its settings: the next would fail as well."""
        return not self.has_started and not self.failures and code > 0

    def ended(self, *, now_s: float) -> float:
        """Its process is gone. After how long the next one is due."""
        has_lasted = self.has_started and now_s - self.begun_s > LASTED_S
        wait_s = BACKOFF_S[0 if has_lasted else min(self.failures, len(BACKOFF_S) - 1)]
        self.pid, self.due_s = None, now_s + wait_s
        self.failures = 1 if has_lasted else self.failures + 1
        return wait_s
