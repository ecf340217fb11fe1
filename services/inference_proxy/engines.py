"""The engines behind the proxy: health, requests in flight, and the policy version of each.

Pure state without I/O. *Serving* means healthy, fitting and not behind: an engine that comes back
with older weights than the applied version stays out (reason "stale weights") until its version is
reported, so that the applied version never goes back by itself. What an engine says of itself is
judged in ``identity``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from services.inference_proxy.book_errors import UnknownEngine, VersionBackwards
from services.inference_proxy.engine import Engine, Role
from services.inference_proxy.identity import (
    EngineIdentity,
    Expected,
    Misfit,
    Said,
    Weights,
    misfit_of,
    weights_of,
)
from sideband.model import ModelShape


class EngineBook:
    """All engines by name. Not thread-safe: the event loop owns it.

    ``policy_version`` is what engines run when they are started, ``model`` what all must serve (by
    default what the first of them says).
    """

    def __init__(
        self, engines: list[Engine], *, policy_version: int = 0, model: ModelShape | None = None
    ) -> None:
        self._engines = {engine.name: engine for engine in engines}
        self._at_start = self._applied = policy_version
        self._model = model
        self.has_gone_back = False  # the applied version was newer once
        # Whether the engines are prefill and decode, and not colocated.
        self.is_pair = any(engine.role != "colocated" for engine in engines)
        for engine in engines:
            engine.weights = engine.weights_told = Weights(policy_version=policy_version)
            engine.at_start = policy_version

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def get(self, name: str) -> Engine:
        """The engine called ``name``. Raises UnknownEngine."""
        if name not in self._engines:
            raise UnknownEngine(name)
        return self._engines[name]

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that a request needs."""
        return ("prefill", "decode") if self.is_pair else ("colocated",)

    def is_serving(self, engine: Engine) -> bool:
        """Whether new requests may go there."""
        return engine.is_fit and engine.policy_version >= self._applied

    def serving(self, role: Role) -> list[Engine]:
        """Engines of a role that take requests."""
        return [engine for engine in self if engine.role == role and self.is_serving(engine)]

    def missing_roles(self) -> list[Role]:
        """Roles that a request needs and no engine serves."""
        return [role for role in self.roles if not self.serving(role)]

    def begin(self, engine: Engine) -> None:
        """A request goes there."""
        engine.in_flight += 1
        engine.requests_total += 1

    def end(self, engine: Engine) -> None:
        """A request has come back, however."""
        engine.in_flight -= 1

    def succeeded(self, engine: Engine) -> None:
        """A whole answer came from it."""
        engine.health = engine.health.request_succeeded()

    def must_ask(self, engine: Engine, *, run_id: str | None) -> bool:
        """Whether what an engine says of itself is not known, or may have changed."""
        if engine.dialect.identity_path is None:
            return False
        is_behind = engine.policy_version < self._applied
        is_known = engine.is_fit and engine.asked_run == run_id
        return engine.is_doubted or is_behind or not is_known

    def told(
        self,
        engine: Engine,
        said: Said,
        *,
        run_id: str | None,
        known: Weights,
        doubts: int,
    ) -> bool:
        """What an engine said of itself. True when its fitness changed.

        ``run_id`` is the run of the proxy's payload root, if it is known. ``known`` and ``doubts``
        are of the engine when it was asked: what was said of its weights since is newer, which is
        a doubt, and what failed since is not answered.
        """
        before = engine.misfit
        engine.asked_run, engine.doubts_answered = run_id, doubts
        if isinstance(said.identity, Misfit):
            engine.misfit = said.identity
        else:
            if engine.weights is known:
                self._hear(engine, said, said.identity)
            else:
                engine.doubts += 1
            engine.identity, engine.misfit = said.identity, None
            if said.identity is not None:
                engine.misfit = misfit_of(said.identity, self._expected(engine, run_id))
        self._advance()
        return engine.misfit != before

    def _hear(self, engine: Engine, said: Said, identity: EngineIdentity | None) -> None:
        """What follows for its weights."""
        known, had_route = engine.weights, engine.identity is not None
        if identity is not None:
            engine.names_weights |= identity.policy_version is not None
            known = replace(known, is_named=known.is_named or engine.names_weights)
        engine.weights = weights_of(said, known, at_start=self._at_start, had_route=had_route)

    def _expected(self, engine: Engine, run_id: str | None) -> Expected:
        model, model_of = self._model, "model_config_path says"
        for other in self:
            known = other.identity
            if model is None and other is not engine and other.is_fit and known is not None:
                model, model_of = known.payload_model, f"engine {other.name} serves"
        is_by_handle = engine.payload_mount is not None and not engine.spills
        return Expected(is_by_handle=is_by_handle, run_id=run_id, model=model, model_of=model_of)

    def probed(self, engine: Engine, *, now_s: float) -> bool:
        """Its health route answered. True when that brought it back."""
        before = engine.health.state
        engine.health = engine.health.probe_succeeded(now_s=now_s)
        self._advance()
        return before != "healthy" and engine.health.state == "healthy"

    def failed(
        self,
        engine: Engine,
        reason: str,
        *,
        now_s: float,
        is_dead: bool = False,
        is_probe: bool = False,
    ) -> bool:
        """A request or a probe failed there. True when that ejected it.

        What comes back where nobody listened was started anew, if it cannot say so itself.
        """
        before = engine.health.state
        engine.doubts += 1
        engine.health = engine.health.failed(
            reason, now_s=now_s, is_dead=is_dead, is_probe=is_probe
        )
        is_ejected = before == "healthy" and engine.health.state == "ejected"
        engine.ejections_total += is_ejected
        if is_ejected and is_dead and engine.is_mute:
            engine.weights = Weights(policy_version=self._at_start)
        self._advance()
        return is_ejected

    def behind(self, engine: Engine, found: Weights, *, known: Weights) -> None:
        """An answer was sampled by the weights ``found``, older than its request was of.

        ``known`` is what was known when the request went out: whatever was said since is newer
        than the answer.
        """
        engine.doubts += 1
        if engine.weights is known and found.policy_version < known.policy_version:
            engine.weights = found
            self._advance()

    def hold(self, name: str, reason: str) -> Engine:
        """Take one out by hand. Raises UnknownEngine."""
        engine = self.get(name)
        engine.health = engine.health.hold(reason)
        self._advance()
        return engine

    def release(self, name: str) -> Engine:
        """Let the next probe bring one back. Raises UnknownEngine.

        Whether it names its weights is found out anew: it may be of another kind since.
        """
        engine = self.get(name)
        engine.health = engine.health.release()
        engine.names_weights = False
        engine.returns_total += 1
        return engine

    @property
    def applied(self) -> int:
        """What all serving engines have applied; it never goes back by itself."""
        return self._applied

    def least(self, policy_version: int) -> int:
        """The oldest weights that may sample for a request of ``policy_version``: its own, or the
        applied ones where those went back since.
        """
        return min(policy_version, self._applied) if self.has_gone_back else policy_version

    def follow(self, applied: int) -> None:
        """Take as applied what is told: by the leader of several workers, or by the one before."""
        self.has_gone_back |= applied < self._applied
        self._applied = applied

    def begin_at(self, recorded: int) -> None:
        """The applied version on record when the proxy starts: it does not fall below.

        Engines that do not say what they run are taken to have it.
        """
        self._applied = max(self._applied, recorded)
        for engine in self:
            if engine.identity is None and not engine.weights.is_reported:
                version = max(engine.policy_version, recorded)
                engine.weights = replace(engine.weights, policy_version=version)
        self._advance()

    def named(self, names: Sequence[str] | None) -> list[Engine]:
        """Engines ``names``, by default all. Raises UnknownEngine."""
        return list(self) if names is None else [self.get(name) for name in names]

    def report(
        self,
        version: int,
        names: list[str] | None = None,
        *,
        force: bool = False,
        is_named: bool = False,
        processes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Engines ``names`` (all by default) now run ``version``; all or none are changed. One
        that did not go back is asked what it says of that.

        ``is_named``: they themselves name their weights by it. ``force`` allows an older version,
        for a run that restarts from an earlier checkpoint. ``processes`` run now; an engine that
        is not among them has the one known before. Raises UnknownEngine and VersionBackwards.
        """
        engines = self.named(names)
        for engine in engines:
            if version < engine.policy_version and not force:
                raise VersionBackwards(engine.name, reported=version, known=engine.policy_version)
        for engine in engines:
            is_named_now = is_named or engine.weights.is_named
            engine.reports_total += 1
            if version >= engine.policy_version:  # what goes back is said, not asked
                engine.doubts += 1  # one that names them shows when it is started anew
            engine.weights = Weights(
                policy_version=version,
                is_named=is_named_now,
                is_reported=True,
                process=processes.get(engine.name, engine.weights.process),
            )
        if force:
            # Back to what the engines that could serve really run, however old.
            fit = [engine for engine in self if engine.is_fit]
            self.follow(min(engine.policy_version for engine in fit or self))
        self._advance()

    def why_out(self, engine: Engine) -> str | None:
        """Why no request goes there; None when it serves."""
        if self.is_serving(engine):
            return None
        if engine.misfit is not None:
            return str(engine.misfit)
        if engine.health.state == "healthy":
            return f"stale weights: v{engine.policy_version} is behind v{self._applied}"
        return f"{engine.health.state}: {engine.health.reason or 'no probe answered yet'}"

    def _advance(self) -> None:
        # Only over serving engines, and only when a whole set serves: with none there is no news.
        # At the start not before all were asked: the first to answer would put others behind.
        if any(engine.health.is_unknown for engine in self):
            return
        serving = [engine for engine in self if self.is_serving(engine)]
        if serving and not self.missing_roles():
            self._applied = max(self._applied, min(engine.policy_version for engine in serving))
