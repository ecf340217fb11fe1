"""What a server's configuration means for requests by handle, said once at its start: pure.

A refusal names a combination whose rows or sets would be wrong: the server serves, and requests by
handle get the reason. A warning names what will be missing. ``code`` is stable.
"""

from dataclasses import dataclass
from typing import Final

from sideband.engines.vllm.versions import line_of

# Connectors that vLLM itself refuses beside captured routing; projects patch that check away.
NO_ROUTING_CONNECTORS: Final = (
    "MooncakeConnector",
    "MoRIIOConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
)
# The first line whose sampler returns the kept sets of speculative tokens too.
SPECULATIVE_MASKS_SINCE: Final = (0, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What is read off the running server's configuration."""

    version: str
    captures_routing: bool
    captures_masks: bool
    connectors: tuple[str, ...] = ()
    is_speculative: bool = False
    is_adaptive: bool = False  # speculative verification without fixed boundaries
    uses_v2_runner: bool = True
    logprobs_mode: str = "processed_logprobs"
    api_processes: int = 0  # of this server; 0 when it is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing to say at the start."""

    code: str
    message: str
    is_refusal: bool = False


def check_engine(facts: EngineFacts) -> list[Finding]:
    """Everything that an operator should read, refusals first."""
    findings = [*_missing(facts), *_routing(facts), *_masks(facts)]
    return sorted(findings, key=lambda finding: not finding.is_refusal)


def _missing(facts: EngineFacts) -> list[Finding]:
    findings = []
    if not facts.captures_routing:
        findings.append(
            Finding(
                code="no_routing",
                message="routing is not captured: start the server with "
                "--enable-return-routed-experts",
            )
        )
    if not facts.captures_masks:
        findings.append(
            Finding(
                code="no_masks",
                message="sampling masks are not captured: start the server with "
                "--return-sampling-mask --logprobs-mode processed_logprobs",
            )
        )
    return findings


def _routing(facts: EngineFacts) -> list[Finding]:
    refused = [name for name in facts.connectors if name in NO_ROUTING_CONNECTORS]
    if not facts.captures_routing or not refused:
        return []
    return [
        Finding(
            code="routing_with_connector",
            message=f"routing is captured beside {', '.join(refused)}, which vLLM refuses: its own "
            "check was taken out. Rows of tokens that this engine loaded do not exist; ask it only "
            "from the prompt's end on, as Sideband's proxy does",
        )
    ]


def _masks(facts: EngineFacts) -> list[Finding]:
    if not facts.captures_masks:
        return []
    reasons = []
    if not facts.uses_v2_runner:
        reasons.append("without Model Runner V2")
    if facts.is_adaptive or (facts.is_speculative and not _knows_speculative(facts.version)):
        kind = "adaptive speculative verification" if facts.is_adaptive else "speculative decoding"
        reasons.append(f"with {kind}")
    if facts.logprobs_mode != "processed_logprobs":
        reasons.append(f"with --logprobs-mode {facts.logprobs_mode}")
    return [
        Finding(
            code="masks_unsupported",
            message=f"sampling masks are captured {reason}: the sets are not those that were "
            "sampled from",
            is_refusal=True,
        )
        for reason in reasons
    ]


def _knows_speculative(version: str) -> bool:
    line = line_of(version)
    if line is None:
        return False
    major, minor = line.split(".")
    return (int(major), int(minor)) >= SPECULATIVE_MASKS_SINCE
