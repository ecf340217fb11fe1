"""The hook on joined stream parts, in the lines of vLLM that lose rows there.

When a stream's reader is slower than its engine, parts that wait are joined into one
(``RequestOutput.add``). Up to 0.30 the routing rows of the last part are lost in that, and up to
0.31 the kept sets of every joined part.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

LOSING_LINES: Final = ("0.30", "0.31")


def install(module: ModuleType) -> None:
    """Replace the method by one that carries rows over."""
    kind = module.RequestOutput
    kind.add = carrying(kind.add)


def carrying(add: Callable[[Any, Any, bool], None]) -> Callable[[Any, Any, bool], None]:
    """``add``, after which nothing of the next part is missing."""

    def add_all(self: Any, next_output: Any, aggregate: bool) -> None:
        before = {output.index: _sets(output) for output in self.outputs}
        add(self, next_output, aggregate)
        if not aggregate:
            return
        joined = {output.index: output for output in self.outputs}
        for part in next_output.outputs:
            whole = joined[part.index]
            if whole is part:  # the first part of its choice
                continue
            if part.routed_experts is not None:
                whole.routed_experts = part.routed_experts
            wanted = [*before[part.index], *_sets(part)]
            if len(_sets(whole)) < len(wanted):
                whole.sampling_mask = whole.sampling_mask or part.sampling_mask
                whole.sampling_mask.token_ids = wanted

    return add_all


def _sets(output: Any) -> list[list[int]]:
    mask = getattr(output, "sampling_mask", None)
    return [] if mask is None else list(mask.token_ids)
