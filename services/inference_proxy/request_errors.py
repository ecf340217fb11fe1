"""Faults of a request itself; a part of the tree in ``errors``.

::

    Problem
    ├── BodyRefused 400, SamplingRefused 400, EngineRefusedRequest 4xx
    └── TooManyValues 413
"""

from services.inference_proxy.limits import VALUES_MAX
from services.kit.problems import Problem


class BodyRefused(Problem):
    """A body that breaks a rule between its parts."""

    status, code, title = 400, "body_refused", "Request refused"


class SamplingRefused(Problem):
    """The engine returns sampling masks, which needs temperature > 0 and top_k > 0."""

    status, code, title = 400, "sampling_refused", "Sampling cannot be replayed"


class EngineRefusedRequest(Problem):
    """The engine says that the request is at fault."""

    status, code, title = 400, "engine_refused", "Refused by the engine"


class TooManyValues(Problem):
    """A request whose JSON is too long to be parsed in one call, whatever its bytes."""

    status, code, title = 413, "too_many_values", "Too many values"

    def __init__(self, count: int) -> None:
        super().__init__(
            f"The JSON has {count} commas and brackets; at most {VALUES_MAX} are taken.",
            values_max=VALUES_MAX,
        )
