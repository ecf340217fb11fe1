"""Pack samples into micro batches and micro batches into a step's grid.

First-fit decreasing by (-length, sample id), then balanced over DP ranks: equal inputs give equal
micro batches, whatever order they come in. Bins are keyed by what must never mix: the form of the
rows, the fields present, the routing's dtype and shape, the masks' vocabulary.

Legend: T tokens of one sample, L tokens of a packed row.

Errors: InvalidInput for a plan that cannot be cut, and for samples that are empty, longer than
the row, twice the same, or mixed in themselves.
"""

from collections import Counter
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import overload

import numpy as np

from sideband.batch.balance import CostWeights, balance
from sideband.batch.columns import Runs
from sideband.batch.first_fit import first_fit
from sideband.batch.rows import (
    NEUTRAL_ADVANTAGE,
    NEUTRAL_LOGPROB,
    NEUTRAL_TEMPERATURE,
    UNKNOWN_WEIGHT_VERSION,
)
from sideband.batch.turns import Kind, kind_of
from sideband.batch.types import Layout, MicroBatch, Sample, SequenceSpan
from sideband.errors import InvalidInput
from sideband.segments import AnySegment, shift

PackingKey = tuple[Kind, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingPlan:
    """How rows are filled. ``seq_len`` bounds a packed row, pads included.

    A row is padded to a multiple of R × ``pad_multiple`` (zigzag: 2R ×), no further; zigzag also
    pads each sequence to a multiple of 2R.
    """

    seq_len: int
    dp_size: int = 1
    cp_size: int = 1
    layout: Layout = "contiguous"
    pad_multiple: int = 1
    costs: CostWeights = field(default_factory=CostWeights)

    def __post_init__(self) -> None:
        for name in ("seq_len", "dp_size", "cp_size", "pad_multiple"):
            if getattr(self, name) < 1:
                raise InvalidInput(name, getattr(self, name), "must be at least 1")
        if self.layout not in {"contiguous", "zigzag"}:
            raise InvalidInput("layout", self.layout, "must be contiguous or zigzag")
        if self.seq_len % self.row_multiple:
            rule = f"must be a multiple of {self.row_multiple} ({self.layout}, CP {self.cp_size})"
            raise InvalidInput("seq_len", self.seq_len, rule)

    @property
    def sequence_multiple(self) -> int:
        """Each sequence is padded to a multiple of this."""
        return 2 * self.cp_size if self.layout == "zigzag" else 1

    @property
    def row_multiple(self) -> int:
        """Each row is padded to a multiple of this, and so is a dummy's length."""
        parts = 2 * self.cp_size if self.layout == "zigzag" else self.cp_size
        return parts * self.pad_multiple


class PlannedRows(Sequence[MicroBatch]):
    """One data rank's micro batches that are decided and not yet filled.

    Each access fills the row anew: who goes through them one by one never holds two. The samples
    must not change meanwhile.
    """

    def __init__(self, rows: Sequence[Sequence[Sample]], plan: PackingPlan) -> None:
        self._rows, self._plan = rows, plan

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> "PlannedRows": ...
    def __getitem__(self, index: int | slice) -> "MicroBatch | PlannedRows":
        if isinstance(index, slice):
            return PlannedRows(self._rows[index], self._plan)
        return build_micro_batch(self._rows[index], self._plan)


def pack(samples: Sequence[Sample], plan: PackingPlan) -> list[list[MicroBatch]]:
    """The step's grid: one list of micro batches per DP rank, all of equal length.

    Every token of every sample lies in exactly one micro batch. Samples must be truncated to
    ``plan.seq_len`` before. No samples give one dummy per rank.
    """
    return [list(rows) for rows in plan_rows(samples, plan)]


def plan_rows(samples: Sequence[Sample], plan: PackingPlan) -> list[PlannedRows]:
    """The grid of ``pack``, of which no row is filled yet: it costs nothing per token."""
    ordered = sorted(samples, key=lambda sample: (-len(sample), sample.sample_id))
    _check(ordered, plan)
    by_key: dict[PackingKey, list[Sample]] = {}
    for sample in ordered:
        by_key.setdefault(packing_key(sample), []).append(sample)
    rows: list[Sequence[Sample]] = [
        [group[index] for index in bin_]
        for group in by_key.values()
        for bin_ in first_fit(
            [round_up(len(sample), plan.sequence_multiple) for sample in group],
            capacity=plan.seq_len,
        )
    ]
    grid = balance(rows, dp_size=plan.dp_size, cost=partial(_cost, plan), dummy=tuple)
    return [PlannedRows(own, plan) for own in grid]


def _cost(plan: PackingPlan, row: Sequence[Sample]) -> float:
    lengths = [len(sample) for sample in row]
    tokens = sum(round_up(length, plan.sequence_multiple) for length in lengths)
    return plan.costs.of_row(_row_tokens(tokens, plan), lengths)


def _row_tokens(tokens: int, plan: PackingPlan) -> int:
    """Tokens of a row, pads included, whose padded sequences hold ``tokens``."""
    return max(round_up(tokens, plan.row_multiple), plan.row_multiple)


def _check(ordered: Sequence[Sample], plan: PackingPlan) -> None:
    for sample in ordered:
        lengths = [len(column) for column in _columns(sample)]
        if any(length != len(sample) for length in lengths):
            rule = f"every column must hold {len(sample)} tokens"
            raise InvalidInput(f"sample {sample.sample_id}", lengths, rule)
        if not 1 <= len(sample) <= plan.seq_len:
            rule = f"must hold 1 to {plan.seq_len} tokens (truncate first)"
            raise InvalidInput(f"sample {sample.sample_id}", len(sample), rule)
    sample_id, count = max(
        Counter(sample.sample_id for sample in ordered).items(),
        key=lambda item: item[1],
        default=("", 1),
    )
    if count > 1:
        raise InvalidInput("sample_id", sample_id, f"must be in a step once, is {count} times")


def _columns(sample: Sample) -> Iterator[Sized]:
    yield from (sample.loss_mask_T, sample.logprobs_T, sample.advantages, sample.temperatures)
    if sample.weight_versions is not None:
        yield sample.weight_versions


def packing_key(sample: Sample) -> PackingKey:
    """What must be equal within a micro batch. Raises InvalidInput when the sample itself mixes."""
    kinds = {kind_of(segment) for segment in sample.segments}
    forms = {kind[0] for kind in kinds}
    if len(forms) > 1 or len({kind[1] for kind in kinds}) < len(kinds):
        rule = "must be of one form, dtype and shape per field"
        raise InvalidInput(f"sample {sample.sample_id}", sorted(kinds), rule)
    if sample.form != next(iter(forms), None):
        raise InvalidInput(
            f"sample {sample.sample_id}", sample.form, "must name its segments' form"
        )
    return tuple(sorted(kinds))


def round_up(tokens: int, multiple: int) -> int:
    """The least multiple that is not below ``tokens``."""
    return -(-tokens // multiple) * multiple


def build_micro_batch(samples: Sequence[Sample], plan: PackingPlan) -> MicroBatch:
    """One row of ``samples`` in order, each padded to the plan's multiple, then the row.

    Without samples it is a dummy: the shortest row that can be cut, all padding, trains nothing.
    """
    spans: list[SequenceSpan] = []
    segments: list[AnySegment] = []
    start = 0
    for sample in samples:
        stop = start + round_up(len(sample), plan.sequence_multiple)
        spans.append(
            SequenceSpan(
                start=start,
                stop=stop,
                length=len(sample),
                sample_id=sample.sample_id,
                env_name=sample.env_name,
                policy_version=sample.policy_version,
            )
        )
        segments.extend(shift(sample.segments, start) if start else sample.segments)
        start = stop
    row_tokens = _row_tokens(start, plan)
    if row_tokens > start:
        spans.append(_padding(start, row_tokens))
    return _filled(samples, tuple(spans), tuple(segments))


def _padding(start: int, stop: int) -> SequenceSpan:
    return SequenceSpan(
        start=start, stop=stop, length=0, sample_id=None, env_name="", policy_version=0
    )


def _filled(
    samples: Sequence[Sample], spans: tuple[SequenceSpan, ...], segments: tuple[AnySegment, ...]
) -> MicroBatch:
    row_tokens = spans[-1].stop
    token_ids_L = np.zeros(row_tokens, np.int32)
    loss_mask_L = np.zeros(row_tokens, np.bool_)
    logprobs_L = np.full(row_tokens, NEUTRAL_LOGPROB, np.float32)
    for sample, span in zip(samples, spans, strict=False):  # the row's padding has no sample
        real = slice(span.start, span.start + span.length)
        token_ids_L[real] = sample.token_ids_T
        loss_mask_L[real] = sample.loss_mask_T
        logprobs_L[real] = sample.logprobs_T
    versions = [sample.weight_versions for sample in samples]
    return MicroBatch(
        token_ids_L=token_ids_L,
        loss_mask_L=loss_mask_L,
        logprobs_L=logprobs_L,
        advantages=_runs([s.advantages for s in samples], spans, np.float32(NEUTRAL_ADVANTAGE)),
        temperatures=_runs(
            [s.temperatures for s in samples], spans, np.float32(NEUTRAL_TEMPERATURE)
        ),
        weight_versions=_runs(versions, spans, np.int32(UNKNOWN_WEIGHT_VERSION))
        if any(column is not None for column in versions)
        else None,
        spans=spans,
        segments=segments,
        form=samples[0].form if samples else None,
    )


def _runs(
    columns: Sequence[Runs | None],
    spans: tuple[SequenceSpan, ...],
    neutral: np.float32 | np.int32,
) -> Runs:
    """The row's column: each sample's own, neutral on pads and for a sample without one."""
    parts: list[Runs] = []
    for index, span in enumerate(spans):
        column = columns[index] if index < len(columns) else None
        pads = span.stop - span.start
        if column is not None:
            parts.append(column)
            pads -= span.length
        if pads:
            parts.append(_constant(neutral, pads))
    runs = Runs.concatenate(parts)
    assert len(runs) == spans[-1].stop, "a sample's column is as long as its tokens"
    return runs


def _constant(value: np.float32 | np.int32, tokens: int) -> Runs:
    return Runs(np.array([value]), np.array([tokens], np.int32))
