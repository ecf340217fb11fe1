"""Which turns form one token sequence, and which rows that sequence has.

A turn whose prompt begins with a whole branch continues it. Any other turn opens a branch: a
sub-agent, a fork, or a prefix that was tokenised anew and differs. Cuts are made at the real
shared token prefix, never at a length.

Routing row t depends on tokens up to t alone. So a branch may use row t of *any* turn that shares
its first t + 1 tokens; the first such turn wins, since it ran the token first, and later ones
fill gaps. Turn positions are branch positions, as every prompt holds the whole past.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sideband.batch.turns import tokens_of
from sideband.batch.types import Turn
from sideband.fields import FIELDS, Field
from sideband.segments import AnySegment, by_field, concatenate, cut


@dataclass(slots=True, kw_only=True, eq=False)
class Branch:
    """A growing sequence of T tokens. Owned by ``build_branches`` until it returns."""

    token_ids_T: NDArray[np.int32]
    turn_indices: list[int] = field(default_factory=list)  # the turns it continues through


def shared_prefix(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Number of leading tokens that both sequences share."""
    tokens = min(len(one), len(other))
    differs = one[:tokens] != other[:tokens]
    first = int(differs.argmax()) if tokens else 0
    return first if tokens and differs[first] else tokens


def build_branches(turns: Sequence[Turn], *, branches_max: int) -> list[Branch] | None:
    """The branches in the order they were opened, or None when there are more than allowed.

    The branch with the longest shared prefix takes part; among equals one that the turn continues,
    then the oldest. A turn without completion tokens (aborted) joins none: it says nothing, and the
    tokens after the last sampled one would only ask for rows that nobody wrote.
    """
    branches: list[Branch] = []
    for index, turn in enumerate(turns):
        if len(turn.completion_token_ids_C) == 0:
            continue
        continued = _continued(branches, turn.prompt_token_ids_P)
        if continued is None:
            if len(branches) == branches_max:
                return None
            continued = Branch(token_ids_T=np.zeros(0, np.int32))
            branches.append(continued)
        continued.token_ids_T = tokens_of(turn)
        continued.turn_indices.append(index)
    return branches


def _continued(branches: Sequence[Branch], prompt_token_ids: NDArray[np.int32]) -> Branch | None:
    best: tuple[int, bool] = (-1, False)
    chosen: Branch | None = None
    for branch in branches:
        shared = shared_prefix(branch.token_ids_T, prompt_token_ids)
        is_whole = shared == len(branch.token_ids_T)
        if (shared, is_whole) > best:
            best, chosen = (shared, is_whole), branch
    return chosen if best[1] else None


def rows_of(branch: Branch, turns: Sequence[Turn]) -> list[AnySegment]:
    """The branch's rows: field by field, each disjoint and ascending."""
    found: list[AnySegment] = []
    for name, declared in FIELDS.items():
        of_field = _about_inputs if declared.about == "input" else _about_sampled
        found += of_field(branch, turns, name)
    return found


def _about_inputs(branch: Branch, turns: Sequence[Turn], field: Field) -> list[AnySegment]:
    """Rows at positions [0, T - 1), of any turn that shares the tokens up to them."""
    last = len(branch.token_ids_T) - 1
    own = set(branch.turn_indices)
    usable: list[list[AnySegment]] = []
    for index, turn in enumerate(turns):
        rows = by_field(turn.segments, field)
        if not rows:
            continue
        tokens = tokens_of(turn)
        shared = len(tokens) if index in own else shared_prefix(tokens, branch.token_ids_T)
        usable.append(cut(rows, start=0, stop=min(shared, last)))
    return concatenate(usable)


def _about_sampled(branch: Branch, turns: Sequence[Turn], field: Field) -> list[AnySegment]:
    """Rows of the branch's own sampled tokens; what a parent sampled trains there."""
    return concatenate([by_field(turns[index].segments, field) for index in branch.turn_indices])
