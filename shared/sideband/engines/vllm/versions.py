"""Which vLLM the plugin knows, and what its hooks must look like: pure.

A hook is a method that the plugin overrides and whose arguments it reads. A version that is not
listed, or a hook of another shape, is not guessed at: the server serves, and requests by handle are
refused with the reason.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

SERVING_MODULE: Final = "vllm.entrypoints.scale_out.token_in_token_out.serving"
ROUTER_MODULE: Final = "vllm.entrypoints.scale_out.token_in_token_out.api_router"
OUTPUTS_MODULE: Final = "vllm.outputs"
SERVING_CLASS: Final = "ServingTokens"
KNOWN_LINES: Final = ("0.30", "0.31", "0.32")
# Leading parameters after self; more may follow, each with a default or passed through by name.
HOOKS: Final[Mapping[str, tuple[str, ...]]] = {
    "serve_tokens": ("request", "raw_request"),
    "serve_tokens_full_generator": ("request", "result_generator", "request_id"),
    "serve_tokens_stream_generator": ("request", "result_generator", "request_id"),
}
_LINE: Final = re.compile(r"(\d+\.\d+)(?:\.|$|[a-z+])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether requests go by handle. ``why_not`` is what a refused client reads."""

    version: str
    why_not: str | None = None

    @property
    def is_known(self) -> bool:
        """Whether the hooks may be used."""
        return self.why_not is None


def line_of(version: str) -> str | None:
    """``"0.32"`` of ``"0.32.0+cpu"``; None for something else, such as a build of a branch."""
    match = _LINE.match(version)
    return match[1] if match else None


def judge_version(version: str, *, accepted: str | None) -> Verdict:
    """Whether this version is known, or was accepted by hand."""
    line = line_of(version)
    if line is not None and line in (*KNOWN_LINES, accepted):
        return Verdict(version=version)
    return Verdict(
        version=version,
        why_not=(
            f"vLLM {version} is not known to this release of sideband (known: "
            f"{', '.join(KNOWN_LINES)}); SIDEBAND_VLLM_ACCEPT_VERSION accepts one by name"
        ),
    )


def judge_hooks(verdict: Verdict, methods: Mapping[str, Callable[..., object] | None]) -> Verdict:
    """The same verdict when every hook has the shape that is relied on."""
    if not verdict.is_known:
        return verdict
    for name, wanted in HOOKS.items():
        method = methods.get(name)
        found = () if method is None else tuple(inspect.signature(method).parameters)[1:]
        if found[: len(wanted)] != wanted:
            reason = (
                f"vLLM {verdict.version}: {SERVING_CLASS}.{name} takes {found or 'nothing'}, "
                f"{wanted} was expected"
            )
            return Verdict(version=verdict.version, why_not=reason)
    return verdict
