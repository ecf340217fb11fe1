"""Whether the weights that sampled an answer are those that its request is said to be of: pure.

An engine that died and came back between two probes has the weights of its start and looks as
before. Only what stands in the answer itself cannot come late: the name of each token's weights
(``weight_versions``), and of the process that sampled them (``engine_process``), as decisions/0042
says.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from services.inference_proxy.engine import Engine
from services.inference_proxy.identity import Weights
from services.inference_proxy.upstream import EngineBehind

_DIGITS_MAX: Final = 9  # of a policy version; a longer number names something else


def check_weights(
    engine: Engine,
    choices: object,
    *,
    at_least: int,
    known: Weights,
    process: str | None = None,
) -> bool:
    """Whether the answer shows that no older weights than version ``at_least`` sampled it. Raises
    EngineBehind when it shows that they did.

    ``choices`` are an answer's or an event's, as the dialect read them, ``process`` is the one that
    it names, ``known`` what was known when it was asked. A name that is no number means the weights
    of the engine's start, unless others were reported to this proxy of an engine that never named
    its weights by a number: from that one such a name says nothing.
    """
    is_named, is_silent = False, False
    for name in _names(choices):
        is_named = True
        if name.isdecimal() and len(name) <= _DIGITS_MAX:
            engine.names_weights = True
            found = int(name)
        elif engine.weights.is_reported and not (engine.names_weights or engine.weights.is_named):
            is_silent = True
            continue
        else:
            found = engine.at_start
        if found < at_least:
            weights = Weights(policy_version=found, is_named=True)
            raise EngineBehind(engine.name, weights=weights, expected=at_least)
    is_shown = is_named and not is_silent
    if process is None:
        return is_shown
    if known.are_of_another(process):
        engine.doubts += not engine.is_doubted
        if not is_shown and engine.at_start < at_least:
            weights = Weights(policy_version=engine.at_start, process=process)
            raise EngineBehind(engine.name, weights=weights, expected=at_least)
        return True
    return is_shown or known.process is not None


def _names(choices: object) -> Iterator[str]:
    """What the weights are called, span by span; what is no span is passed over."""
    for choice in choices if isinstance(choices, list) else ():
        spans = choice.get("weight_versions") if isinstance(choice, dict) else None
        for span in spans if isinstance(spans, list) else ():
            if isinstance(span, dict) and not _is_empty(span):
                yield str(span.get("version"))


def _is_empty(span: Mapping[str, Any]) -> bool:
    """Whether it surely holds no token."""
    start, end = span.get("start"), span.get("end")
    return type(start) is int and type(end) is int and start == end
