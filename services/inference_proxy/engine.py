"""One engine behind the proxy: what is known of it. State without I/O."""

from dataclasses import dataclass
from typing import Final, Literal

from services.inference_proxy.dialects.base import Dialect
from services.inference_proxy.health import Health
from services.inference_proxy.identity import EngineIdentity, Misfit, Weights

Role = Literal["colocated", "prefill", "decode"]
AT_START: Final = Weights(policy_version=0)


@dataclass(slots=True, kw_only=True)
class Engine:
    """One engine. ``payload_mount`` is where it sees the payload root; None without a root.

    ``spills``: it writes no file, so the proxy does, from its inline answers. ``identity`` is None
    until it was asked, and for an engine that says nothing of itself.
    """

    name: str
    url: str
    role: Role
    payload_mount: str | None
    health: Health
    dialect: Dialect
    spills: bool = False
    weights: Weights = AT_START
    weights_told: Weights = AT_START  # what the leader of several workers said last
    identity: EngineIdentity | None = None
    misfit: Misfit | None = None
    asked_run: str | None = None  # the run that its identity was compared with
    at_start: int = 0  # the policy version of what it runs when it is started
    names_weights: bool = False  # it named its weights by a policy version once
    doubts: int = 0  # how often something failed: it may be another process since
    doubts_answered: int = 0  # of those, how many there were when it last said what it is
    in_flight: int = 0
    requests_total: int = 0
    ejections_total: int = 0
    returns_total: int = 0  # by hand
    reports_total: int = 0  # of its weights' version

    @property
    def policy_version(self) -> int:
        """What it runs, as far as anybody said."""
        return self.weights.policy_version

    @property
    def is_doubted(self) -> bool:
        """Whether something failed since it was asked what it is."""
        return self.doubts > self.doubts_answered

    @property
    def is_mute(self) -> bool:
        """Whether nothing that it says tells it from one that was started anew."""
        return self.weights.process is None and not (self.names_weights or self.weights.is_named)

    @property
    def is_older_than_told(self) -> bool:
        """Whether it was found to run older weights than the leader of several workers said."""
        return self.policy_version < self.weights_told.policy_version

    @property
    def is_fit(self) -> bool:
        """Whether it is healthy and says nothing of itself that does not fit."""
        return self.health.state == "healthy" and self.misfit is None
