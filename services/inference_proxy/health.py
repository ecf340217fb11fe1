"""Health of one engine as a pure state machine: no clock, no task, no client.

::

    starting ──probe ok──▶ healthy ──failures──▶ ejected ──probes ok, backoff over──▶ healthy
        any ──hold──▶ held ──release──▶ starting

A refused connection ejects at once: nothing listens there. Other failures eject after
``failures_max`` in a row; requests and probes are counted apart: an engine that answers probes and
fails every request must go, one that is too busy for probes and answers requests must not. An
ejected engine comes back when ``returns_min`` probes in a row succeed and its backoff is over; each
ejection in a row doubles the backoff. A held engine (by an administrator) comes back only by
``release``.
"""

from dataclasses import dataclass, replace
from typing import Literal

State = Literal["starting", "healthy", "ejected", "held"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthLimits:
    """When an engine is ejected, and when it comes back."""

    failures_max: int
    returns_min: int
    backoff_s: float
    backoff_s_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """One engine's state. Every method returns the next state; times are monotonic seconds."""

    limits: HealthLimits
    state: State = "starting"
    failures: int = 0  # of requests, in a row
    probe_failures: int = 0  # in a row
    successes: int = 0  # probes in a row while not healthy
    ejections: int = 0  # in a row: a request that succeeds ends the row
    until_s: float = 0.0  # an ejected engine stays out until then
    reason: str = ""

    @property
    def is_unknown(self) -> bool:
        """Whether no probe has come back yet, either way."""
        return self.state == "starting" and not self.reason

    def request_succeeded(self) -> "Health":
        """A whole answer came. It says nothing about an engine that is out."""
        has_failed = self.failures or self.probe_failures or self.ejections
        if self.state != "healthy" or not has_failed:
            return self
        return replace(self, failures=0, probe_failures=0, ejections=0)

    def probe_succeeded(self, *, now_s: float) -> "Health":
        """The health route answered."""
        if self.state == "starting":
            return self._returned()
        if self.state == "healthy":
            return replace(self, probe_failures=0)
        if self.state == "ejected":
            successes = self.successes + 1
            if successes >= self.limits.returns_min and now_s >= self.until_s:
                return self._returned()
            return replace(self, successes=successes)
        return self

    def failed(
        self, reason: str, *, now_s: float, is_dead: bool = False, is_probe: bool = False
    ) -> "Health":
        """A request or a probe failed; ``is_dead`` when nothing listens."""
        if self.state == "held":
            return self
        if self.state != "healthy":
            return replace(self, successes=0, reason=reason)
        failures, probe_failures = self.failures + (not is_probe), self.probe_failures + is_probe
        if max(failures, probe_failures) < self.limits.failures_max and not is_dead:
            return replace(self, failures=failures, probe_failures=probe_failures, reason=reason)
        backoff_s = min(self.limits.backoff_s * 2.0 ** min(self.ejections, 32), self._backoff_s_max)
        return replace(
            self,
            state="ejected",
            failures=failures,
            probe_failures=probe_failures,
            successes=0,
            ejections=self.ejections + 1,
            until_s=now_s + backoff_s,
            reason=reason,
        )

    def hold(self, reason: str) -> "Health":
        """Out by hand, whatever the probes say."""
        return replace(self, state="held", successes=0, reason=reason)

    def release(self) -> "Health":
        """Let the next probe decide, without backoff."""
        return replace(self._returned(), state="starting", ejections=0)

    @property
    def _backoff_s_max(self) -> float:
        return self.limits.backoff_s_max

    def _returned(self) -> "Health":
        return replace(
            self,
            state="healthy",
            failures=0,
            probe_failures=0,
            successes=0,
            until_s=0.0,
            reason="",
        )
