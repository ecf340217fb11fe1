"""What is taken off an engine's results before the server turns them into JSON.

A result is shaped as vLLM's ``RequestOutput``: choices come whole in the last one, or, streamed,
token by token with the routing rows in each choice's last one. What is taken is replaced by None,
so that nobody encodes it.

Legend: N rows, L layers (all of them), K top-k.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sideband.routing.rows import RowArray, select_layers


class CompletionLike(Protocol):
    """vLLM's ``CompletionOutput``."""

    index: int
    token_ids: Sequence[int]
    routed_experts: Any  # RowArray | None, written to
    sampling_mask: Any  # vLLM's SamplingMask | None, written to
    finish_reason: str | None


class ResultLike(Protocol):
    """vLLM's ``RequestOutput``."""

    @property
    def prompt_token_ids(self) -> Sequence[int] | None:
        """As the engine ran it."""

    @property
    def outputs(self) -> Sequence[CompletionLike]:
        """The choices, or what is new of them."""


@dataclass(slots=True, kw_only=True, eq=False)
class Taken:
    """One choice: all its tokens, and its rows of every layer as the engine gave them."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    routing_NLK: RowArray | None = None
    masks: list[list[int]] | None = None
    finish_reason: str | None = None


class Takings:
    """Collects the choices of one request over its results."""

    def __init__(self, *, choices: int, is_stream: bool) -> None:
        self._choices, self._is_stream = choices, is_stream
        self._taken: dict[int, Taken] = {}
        self.prompt_tokens = 0

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        ended = [taken for taken in self._taken.values() if taken.finish_reason is not None]
        return len(ended) >= self._choices

    @property
    def choices(self) -> list[Taken]:
        """By index."""
        return [self._taken[index] for index in sorted(self._taken)]

    def take(self, result: ResultLike, *, leaves_inline: bool) -> None:
        """Remember what ``result`` brings; without ``leaves_inline`` its rows are taken off."""
        if result.prompt_token_ids is not None:
            self.prompt_tokens = len(result.prompt_token_ids)
        for output in result.outputs:
            taken = self._taken.setdefault(output.index, Taken(index=output.index))
            if not self._is_stream:  # each result holds the whole choice so far
                taken.token_ids, taken.masks = [], None
            taken.token_ids.extend(output.token_ids)
            if output.sampling_mask is not None:
                taken.masks = taken.masks or []  # a list of our own: it grows
                taken.masks.extend(output.sampling_mask.token_ids)
            if output.routed_experts is not None:
                taken.routing_NLK = output.routed_experts
            if output.finish_reason is not None:
                taken.finish_reason = output.finish_reason
            if not leaves_inline:
                output.routed_experts = output.sampling_mask = None


def rows_bytes(result: ResultLike) -> int:
    """Size of a result's routing rows."""
    found = [output.routed_experts for output in result.outputs]
    return sum(rows_NLK.nbytes for rows_NLK in found if rows_NLK is not None)


def keep_routed_layers(result: ResultLike, layer_ids: Sequence[int], num_layers: int) -> bool:
    """Leave only the routed layers in an inline result. True when there was something to cut.

    Rows of another depth than the model's are left as they are: the reader refuses them by name.
    """
    has_cut = False
    for output in result.outputs:
        rows_NLK = output.routed_experts
        if rows_NLK is not None and rows_NLK.shape[1] == num_layers != len(layer_ids):
            output.routed_experts = select_layers(rows_NLK, layer_ids)
            has_cut = True
    return has_cut
