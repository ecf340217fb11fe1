"""Whether the weights that sampled an answer are those that its request is said to be of: pure.

Engines name the weights of each token (``weight_versions``). That is the one word about them that
cannot come late: an engine that died and came back between two probes has the weights of its start
and looks as before. See decisions/0042.
"""

from collections.abc import Iterator
from typing import Final

from services.inference_proxy.engine import Engine
from services.inference_proxy.upstream import EngineBehind

_DIGITS_MAX: Final = 9  # of a policy version; a longer number names something else


def check_weights(engine: Engine, choices: object, *, at_least: int) -> None:
    """Raises EngineBehind when weights older than version ``at_least`` sampled any token.

    ``choices`` are an answer's or an event's, as the dialect read them. An engine that named its
    weights by a number once is known to: another name then means the weights of its start. From
    one that never did, such a name says nothing.
    """
    for name in _names(choices):
        if name.isdecimal() and len(name) <= _DIGITS_MAX:
            engine.names_weights = True
            found = int(name)
        elif engine.names_weights or engine.weights.is_named:
            found = engine.at_start
        else:
            continue
        if found < at_least:
            raise EngineBehind(engine.name, found=found, expected=at_least)


def _names(choices: object) -> Iterator[str]:
    """What the weights are called, span by span; what is malformed is passed over."""
    for choice in choices if isinstance(choices, list) else ():
        spans = choice.get("weight_versions") if isinstance(choice, dict) else None
        for span in spans if isinstance(spans, list) else ():
            if isinstance(span, dict) and span.get("start") != span.get("end"):
                yield str(span.get("version"))
