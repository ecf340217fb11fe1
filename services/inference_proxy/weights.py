"""A weight update of all engines: pause, update, say the version, resume.

One update at a time. An engine that fails any step is taken out by name, and what runs there is
ended: half-updated weights must answer nobody. The version advances with one report of all engines
that have applied it, so that no request sees some of them. Requests that run keep the version that
they were dispatched with.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from services.inference_proxy.asking import Asking
from services.inference_proxy.book_errors import VersionBackwards
from services.inference_proxy.dialects.base import EngineCall, WeightSteps, WeightUpdate
from services.inference_proxy.engine import Engine
from services.inference_proxy.engines import EngineBook
from services.inference_proxy.siblings import Siblings
from services.inference_proxy.upstream import EngineBroke, Upstream, UpstreamError
from services.kit.problems import Problem

log = structlog.get_logger(__name__)


class UpdateRunning(Exception):
    """An update is being applied; two at once would leave engines apart."""

    def __init__(self) -> None:
        super().__init__("a weight update is running: wait for its answer")


class UpdateFailed(Exception):
    """No engine applied it; each is named with its reason."""

    def __init__(self, reasons: dict[str, str]) -> None:
        self.reasons = reasons
        said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        super().__init__(f"no engine applied the weights: {said or 'none serves'}")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOutcome:
    """Who has it, and who was taken out and why."""

    updated: tuple[str, ...]
    failed: dict[str, str]
    left_out: tuple[str, ...]  # not serving when it began


class WeightUpdates:
    """What the weights endpoint calls."""

    def __init__(
        self,
        upstream: Upstream,
        asking: Asking,
        book: EngineBook,
        siblings: Siblings,
        *,
        token: str | None,
        timeout_s: float,
    ) -> None:
        self._upstream, self._asking, self._book = upstream, asking, book
        self._siblings, self._timeout_s = siblings, timeout_s
        self._headers = {"content-type": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._is_running = False

    async def apply(self, update: WeightUpdate) -> UpdateOutcome:
        """Bring every serving engine to the update's version.

        Raises UpdateRunning, VersionBackwards, UntranslatableParameter (nothing was touched),
        UpdateFailed (every engine was taken out), and WorkerSilent when another worker may not know
        of what was done.
        """
        if self._is_running:
            raise UpdateRunning
        for engine in self._book:
            if update.policy_version < engine.policy_version and not update.force:
                raise VersionBackwards(
                    engine.name, reported=update.policy_version, known=engine.policy_version
                )
        steps = {
            engine.name: engine.dialect.weight_steps(update)
            for engine in self._book
            if engine.is_fit
        }
        self._is_running = True
        try:
            return await self._applied(update, steps)
        finally:
            self._is_running = False

    async def _applied(self, update: WeightUpdate, steps: dict[str, WeightSteps]) -> UpdateOutcome:
        failed: dict[str, str] = {}
        everyone = list(steps)
        processes = await self._asking.processes(self._book.named(everyone))
        paused = await self._all(everyone, [steps[name].pause for name in everyone], failed)
        updated = await self._all(paused, [steps[name].update for name in paused], failed)
        updated = await self._same(updated, processes, failed)
        for name, reason in failed.items():
            self._book.hold(name, f"weight update to v{update.policy_version} failed: {reason}")
            log.error("weight_update_failed", engine=name, reason=reason)
        await self._told()  # nobody asks one that is about to be abandoned
        await self._all(failed, [steps[name].abandon for name in failed], {})
        if updated:
            self._book.report(
                update.policy_version,
                updated,
                force=update.force,
                is_named=True,
                processes=processes,
            )
            self._hold_ahead(update)
            await self._told()
        resumed = await self._all(updated, [steps[name].resume for name in updated], failed)
        for name in set(updated) - set(resumed):
            self._book.hold(name, f"did not resume after a weight update: {failed[name]}")
            log.error("resume_failed", engine=name, reason=failed[name])
        untold = await self._told()
        if not resumed:
            raise UpdateFailed(failed)
        if untold is not None:
            raise untold
        log.info("weights_updated", policy_version=update.policy_version, engines=resumed)
        left_out = [engine.name for engine in self._book if engine.name not in steps]
        return UpdateOutcome(updated=tuple(resumed), failed=failed, left_out=tuple(left_out))

    async def _same(
        self, names: Sequence[str], processes: dict[str, str], failed: dict[str, str]
    ) -> list[str]:
        """Who was not started anew since ``processes`` ran, to which new signs are added. One that
        was has lost the weights, while others were still getting theirs.
        """
        now = await self._asking.processes(self._book.named(names))
        for name in names:
            before = processes.get(name, self._book.get(name).weights.process)
            if before not in {None, now.get(name, before)}:
                failed[name] = "it was started anew meanwhile"
        processes |= {name: process for name, process in now.items() if name not in failed}
        return [name for name in names if name not in failed]

    async def _told(self) -> Problem | None:
        """Tell the other workers. One that does not hear it keeps no engine paused, which would
        hold every request that it has.
        """
        try:
            await self._siblings.publish()
        except Problem as problem:
            log.error("update_not_published", reason=problem.detail)
            return problem
        return None

    def _hold_ahead(self, update: WeightUpdate) -> None:
        """After going back no engine may come again with newer weights of before."""
        for engine in self._book:
            if engine.policy_version > update.policy_version:
                reason = f"has v{engine.policy_version}, given up for v{update.policy_version}"
                self._book.hold(engine.name, reason)

    async def _all(
        self,
        names: Iterable[str],
        calls: Sequence[Sequence[EngineCall]],
        failed: dict[str, str],
    ) -> list[str]:
        """Make each engine's calls, all engines at once; who succeeded. Others go to ``failed``."""
        order = list(names)
        reasons = await asyncio.gather(
            *(
                self._calls(self._book.get(name), own)
                for name, own in zip(order, calls, strict=True)
            )
        )
        failed |= {name: why for name, why in zip(order, reasons, strict=True) if why is not None}
        return [name for name, why in zip(order, reasons, strict=True) if why is None]

    async def _calls(self, engine: Engine, calls: Sequence[EngineCall]) -> str | None:
        """None when every call succeeded, else why one did not."""
        for call in calls:
            try:
                await self._call(engine, call)
            except UpstreamError as exc:
                return f"{call.path}: {exc.reason[:300]}"
            except TimeoutError:
                return f"{call.path}: no answer within {self._timeout_s:g} s"
        return None

    async def _call(self, engine: Engine, call: EngineCall) -> None:
        content = msgspec.json.encode(call.body) if call.body is not None else None
        async with (
            asyncio.timeout(self._timeout_s),
            self._upstream.open(
                engine.name,
                f"{engine.url}{call.path}",
                content=content,
                headers=self._headers,
                timeout_s=self._timeout_s,
            ) as reply,
        ):
            said = await reply.whole()
        if call.refusal is not None and call.refusal in said.replace(b" ", b""):
            raise EngineBroke(engine.name, said.decode(errors="replace")[:300])
