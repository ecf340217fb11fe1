"""What a delivered rollout must be before branches are built from it.

InvalidInput
├── MixedForms        some turns by handle, others inline
├── MalformedSegment  a segment that cannot exist
└── (InvalidInput)    a turn whose columns, numbers or segments do not fit its tokens

Legend: P prompt tokens, C completion tokens, N = P + C.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sideband.batch.types import Turn
from sideband.errors import InvalidInput
from sideband.fields import FIELDS, Field
from sideband.model import ModelShape
from sideband.ranges import Ranges
from sideband.segments import AnySegment, Form, PayloadSegment, by_field

# (form, field, dtype, row shape): equal within a sample and within a micro batch
Kind = tuple[Form, Field, str, tuple[int, ...]]


class MixedForms(InvalidInput):
    """A rollout whose turns carry rows in both forms. Its files can be deleted: nothing trains."""

    def __init__(self, rollout_id: str) -> None:
        super().__init__(f"rollout {rollout_id}", "inline and handle", "must be of one form")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """Hard bounds on one rollout; beyond them it is refused before anything is built."""

    turns_max: int = 4096
    tokens_max: int = 1 << 22  # of one turn
    segments_max: int = 4096  # of one turn
    branches_max: int = 512  # each costs a comparison with every turn


def kind_of(segment: AnySegment) -> Kind:
    """What rows of a field must share to lie side by side; inline ragged rows know no bound."""
    if isinstance(segment, PayloadSegment):
        return ("handle", segment.field, segment.dtype, segment.shape)
    if isinstance(segment.data, np.ndarray):
        return ("inline", segment.field, segment.data.dtype.name, segment.data.shape[1:])
    return ("inline", segment.field, segment.data.dtype.name, ())


def tokens_of(turn: Turn) -> NDArray[np.int32]:
    """The turn's whole sequence, [N]."""
    return np.concatenate((turn.prompt_token_ids_P, turn.completion_token_ids_C))


def check_turns(
    rollout_id: str, turns: Sequence[Turn], *, model: ModelShape | None, limits: RolloutLimits
) -> Form | None:
    """The one form of the rollout's rows, None when no turn has any.

    Raises MixedForms, MalformedSegment, or InvalidInput naming the turn and what is wrong with it.
    """
    if not 1 <= len(turns) <= limits.turns_max:
        raise InvalidInput("turns", len(turns), f"must be 1 to {limits.turns_max}")
    for index, turn in enumerate(turns):
        name = f"turns[{index}]"
        _check_size(name, turn, limits)
        _check_columns(name, turn)
        for place, segment in enumerate(turn.segments):
            if isinstance(segment, PayloadSegment):
                segment.check()  # a file name that climbs out of the root stops here at the latest
            _check_place(f"{name}.segments[{place}]", segment, turn)
        _check_followers(name, turn)
    kinds = {kind_of(segment) for turn in turns for segment in turn.segments}
    forms = sorted({kind[0] for kind in kinds})
    if len(forms) > 1:
        raise MixedForms(rollout_id)
    _check_kinds(kinds, model)
    return forms[0] if forms else None


def _check_size(name: str, turn: Turn, limits: RolloutLimits) -> None:
    tokens = len(turn.prompt_token_ids_P) + len(turn.completion_token_ids_C)
    if tokens > limits.tokens_max:
        raise InvalidInput(name, tokens, f"must hold at most {limits.tokens_max} tokens")
    if len(turn.segments) > limits.segments_max:
        rule = f"must be at most {limits.segments_max}"
        raise InvalidInput(f"{name}.segments", len(turn.segments), rule)
    if len(turn.prompt_token_ids_P) == 0:
        # A sampled token at position 0 has no row to be predicted from.
        raise InvalidInput(f"{name}.prompt_token_ids", [], "must hold at least one token")


def _check_columns(name: str, turn: Turn) -> None:
    completion_tokens = len(turn.completion_token_ids_C)
    for column, values in _completion_columns(turn):
        if len(values) != completion_tokens:
            rule = f"must hold {completion_tokens} values, one per completion token"
            raise InvalidInput(f"{name}.{column}", len(values), rule)
    if not (np.isfinite(turn.temperature) and turn.temperature >= 0):
        raise InvalidInput(f"{name}.temperature", turn.temperature, "must be finite, not negative")
    for ids in (turn.prompt_token_ids_P, turn.completion_token_ids_C):
        if ids.min(initial=0) < 0:
            raise InvalidInput(f"{name}.token_ids", int(ids.min()), "must not be negative")
    # One NaN that trains poisons the whole step; what does not train is set to neutral anyway.
    if not np.isfinite(turn.logprobs_C[turn.sampled_C]).all():
        raise InvalidInput(f"{name}.logprobs", "NaN or infinity", "must be finite where sampled")
    if turn.advantages_C is not None and not np.isfinite(turn.advantages_C[turn.sampled_C]).all():
        raise InvalidInput(f"{name}.advantages", "NaN or infinity", "must be finite where sampled")


def _completion_columns(turn: Turn) -> Iterator[tuple[str, Sequence[object]]]:
    columns = {
        "logprobs": turn.logprobs_C,
        "sampled": turn.sampled_C,
        "weight_versions": turn.weight_versions_C,
        "advantages": turn.advantages_C,
    }
    for column, values in columns.items():
        if values is not None:
            yield column, values  # type: ignore[misc]  # all that is needed of them is len()


def _check_place(name: str, segment: AnySegment, turn: Turn) -> None:
    """Rows of tokens that the turn has: a row count of another sequence is refused (P1, P10)."""
    prompt_tokens = len(turn.prompt_token_ids_P)
    tokens = prompt_tokens + len(turn.completion_token_ids_C)
    field = FIELDS[segment.field]
    start, stop = field.positions(prompt_tokens=prompt_tokens, tokens=tokens)
    if segment.rows < 1 or segment.pos < start or segment.stop > stop:
        raise InvalidInput(
            name,
            f"{segment.field} [{segment.pos}, {segment.stop})",
            f"must lie in [{start}, {stop}) of {prompt_tokens} prompt tokens and {tokens} in all",
        )


def _check_followers(name: str, turn: Turn) -> None:
    """What is said of another field's elements needs those: no row without the row it is about."""
    for field in FIELDS.values():
        if field.follows is None:
            continue
        about = Ranges()
        for segment in by_field(turn.segments, field.follows):
            about.add(segment.pos, segment.stop)
        for segment in by_field(turn.segments, field.name):
            missing = about.missing(segment.pos, segment.stop)
            if missing:
                rule = f"must lie where {field.follows} has rows"
                raise InvalidInput(f"{name}.{field.name}", missing[0], rule)


def _check_kinds(kinds: set[Kind], model: ModelShape | None) -> None:
    for form, field, dtype, shape in kinds:
        if model is None:
            expected = next(kind[2:] for kind in sorted(kinds) if kind[1] == field)
        else:
            expected = FIELDS[field].kind(model)
            if form == "inline" and FIELDS[field].ragged is not None:
                expected = (expected[0], ())
        if (dtype, shape) != expected:
            raise InvalidInput(field, (dtype, shape), f"must be {expected}, as the model says")
