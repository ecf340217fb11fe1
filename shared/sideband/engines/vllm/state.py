"""What one API process of the server holds: its verdict, its model, and the threads that write."""

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from sideband.compiled import compile_loops
from sideband.engines.vllm.asks import Ask, Target, open_target, read_ask
from sideband.engines.vllm.checks import EngineFacts, Finding, check_engine
from sideband.engines.vllm.errors import AskRefused
from sideband.engines.vllm.processes import ENGINE_PROCESS, server_process
from sideband.engines.vllm.settings import PluginSettings
from sideband.engines.vllm.versions import Verdict
from sideband.errors import SidebandError
from sideband.model import ModelShape
from sideband.payload.durable import DurableFolders
from sideband.payload.root import PayloadRoot
from sideband.routing import model_shape

# Below vLLM's own logger, so that what is said at the start is formatted and shown with the rest.
log: Final = logging.getLogger("vllm.sideband")
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A request that may be served: where its rows go, if anywhere, and in which form they stay."""

    target: Target | None = None
    is_debug: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class PluginState:
    """Made by ``start`` when the server is. ``model`` is None when rows cannot go by handle."""

    settings: PluginSettings
    verdict: Verdict
    facts: EngineFacts
    findings: Sequence[Finding]
    model: ModelShape | None
    why_not: str | None  # what a refused client reads; None when requests may go by handle
    process: str | None = None  # this start of the server, see ``processes``
    pool: ThreadPoolExecutor = field(init=False)
    durable: DurableFolders = field(default_factory=DurableFolders)

    def __post_init__(self) -> None:
        self.pool = ThreadPoolExecutor(self.settings.write_threads, "sideband-write")

    async def admit(self, extra_args: Mapping[str, object] | None, request_id: str) -> Wish:
        """What a request may have. Raises AskRefused."""
        ask: Ask = read_ask(extra_args, root=self.settings.payload_root, request_id=request_id)
        if ask.place is None:
            return Wish(is_debug=ask.is_debug)
        if self.why_not is not None:
            raise AskRefused("payload_dir", self.why_not)
        place = ask.place
        target = await asyncio.get_running_loop().run_in_executor(
            self.pool, lambda: open_target(place, durable=self.durable)
        )
        return Wish(target=target, is_debug=ask.is_debug)

    async def shown(self, *, weight_version: str | None = None) -> dict[str, Any]:
        """What a proxy compares before it sends work here.

        ``weight_version`` is the name that the engine's weights have now.
        """
        run_id = await asyncio.get_running_loop().run_in_executor(self.pool, self._run_id)
        return {
            "vllm": self.facts.version,
            "is_by_handle": self.why_not is None and self.settings.payload_root is not None,
            "why_not": self.why_not or self._why_no_root(),
            "run_id": run_id,
            "policy_version": named_version(weight_version),
            ENGINE_PROCESS: self.process,
            "payload_model": None if self.model is None else msgspec.to_builtins(self.model),
            "captures": {
                "routed_experts": self.facts.captures_routing,
                "sampling_mask": self.facts.captures_masks,
            },
            "findings": [finding.message for finding in self.findings],
        }

    def signed(self, members: Mapping[str, Any]) -> dict[str, Any]:
        """``members`` of an answer's top level, and which start of the server gives it."""
        return dict(members) if self.process is None else {**members, ENGINE_PROCESS: self.process}

    def _why_no_root(self) -> str | None:
        is_set = self.settings.payload_root is not None
        return None if is_set else "SIDEBAND_VLLM_PAYLOAD_ROOT is not set"

    def _run_id(self) -> str | None:
        """The run of the root's marker now: a fresh run may have taken the root over."""
        if self.settings.payload_root is None:
            return None
        try:
            return PayloadRoot.open(self.settings.payload_root).run_id
        except SidebandError:
            return None


def named_version(weight_version: str | None) -> int | None:
    """The policy version that weights are named by; None for vLLM's own name, or another word."""
    if weight_version is None or not _NUMBER.fullmatch(weight_version):
        return None
    return int(weight_version)


def start(
    settings: PluginSettings,
    verdict: Verdict,
    facts: EngineFacts,
    hf_config: Mapping[str, object],
) -> PluginState:
    """Judge the server once, and say everything that an operator should read.

    Where it will write, it compiles what writers use: later, it would keep Python's lock from
    requests for tens of milliseconds.
    """
    findings = check_engine(facts)
    refusals = [finding.message for finding in findings if finding.is_refusal]
    model: ModelShape | None = None
    try:
        model = model_shape(hf_config)
    except SidebandError as exc:
        refusals.append(f"this model's layers are not known: {exc}")
    if not verdict.is_known:
        refusals.insert(0, verdict.why_not or "")
    for finding in findings:
        log.warning("sideband: %s", finding.message)
    state = PluginState(
        settings=settings,
        verdict=verdict,
        facts=facts,
        findings=findings,
        model=model,
        why_not="; ".join(refusals) or None,
        process=server_process(api_processes=facts.api_processes),
    )
    _say(state)
    if settings.payload_root is not None:
        compile_loops()
    return state


def _say(state: PluginState) -> None:
    root = state.settings.payload_root
    if state.why_not is not None:
        log.error("sideband: requests by handle are refused: %s", state.why_not)
    elif root is None:
        log.info("sideband: SIDEBAND_VLLM_PAYLOAD_ROOT is not set: all answers are inline")
    else:
        log.info("sideband: requests by handle are served under %s: %s", root, state.model)
