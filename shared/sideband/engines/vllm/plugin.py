"""The entry point in ``vllm.general_plugins``: vLLM calls it in each of its processes."""

import logging
import multiprocessing
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from sideband.engines.vllm.hooks import outputs, router, serving
from sideband.engines.vllm.hooks.imports import Action, AfterImport
from sideband.engines.vllm.settings import server_settings
from sideband.engines.vllm.versions import (
    OUTPUTS_MODULE,
    ROUTER_MODULE,
    SERVING_MODULE,
    judge_version,
    line_of,
)

log: Final = logging.getLogger("vllm.sideband")


def register() -> None:
    """Wait for the server's HTTP side. vLLM calls it once per process.

    Raises InvalidInput for a setting that cannot be: the server then does not start.
    """
    settings = server_settings()
    verdict = judge_version(
        str(import_module("vllm").__version__), accepted=settings.accept_version
    )
    if multiprocessing.current_process().name == "MainProcess":  # said once for all processes
        _say_if_never_asked()
    actions: dict[str, Action] = {
        SERVING_MODULE: partial(serving.install, settings=settings, verdict=verdict),
        ROUTER_MODULE: router.install,
    }
    if line_of(verdict.version) in outputs.LOSING_LINES:
        actions[OUTPUTS_MODULE] = outputs.install
    AfterImport(actions).install()


def _say_if_never_asked() -> None:
    """Requests that do not come through the hooked module are answered as without a plugin."""
    if not _exists(SERVING_MODULE):
        log.error(
            "sideband: this vLLM has no %s: all answers are inline, whatever a request asks for",
            SERVING_MODULE,
        )
    if getattr(import_module("vllm.envs"), "VLLM_USE_RUST_FRONTEND", False):
        log.error(
            "sideband: VLLM_USE_RUST_FRONTEND is set, and that front end loads no plugin: all "
            "answers are inline, whatever a request asks for; unset it"
        )


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is not there either
        return False
