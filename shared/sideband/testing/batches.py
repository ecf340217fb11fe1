"""Samples whose every value tells where it belongs, so that any misalignment shows.

Token ids, logprobs, expert ids, kept sets and the rows of handles are functions of (serial,
position). ``rows_by_position`` turns segments of either form into a plain dictionary: what the
tests of packing and cutting compare.

Legend: T tokens, L routed layers, K experts per layer.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sideband.batch.columns import Runs
from sideband.batch.types import Sample
from sideband.fields import FIELDS, Field
from sideband.ids import RolloutId, SampleId
from sideband.masks.rows import MaskRows, ScoreRows
from sideband.model import ModelShape
from sideband.segments import AnySegment, Form, InlineSegment, PayloadSegment

WIDE_MODEL: Final = ModelShape(
    num_layers=7, layer_ids=(1, 2, 5), top_k=2, id_space=300, vocab_size=5003
)
NARROW_MODEL: Final = ModelShape(
    num_layers=4, layer_ids=(0, 3), top_k=3, id_space=256, vocab_size=5003
)
Row = tuple[str, int, int] | bytes  # (file, offset, row) by handle, the row's bytes inline


def token_ids_of(
    serial: int, positions_T: NDArray[np.int64], model: ModelShape
) -> NDArray[np.int32]:
    """Neighbours in position and in serial differ."""
    return ((serial * 977 + positions_T * 13 + 1) % model.vocab_size).astype(np.int32)


def logprobs_of(serial: int, positions_T: NDArray[np.int64]) -> NDArray[np.float32]:
    """Exact in float32 below a million positions."""
    return (-(positions_T + serial / 8) / 64).astype(np.float32)


def routing_of(
    serial: int, positions_T: NDArray[np.int64], model: ModelShape
) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """[T, L, K] with K distinct ids per layer."""
    layers: NDArray[np.int64] = np.array(model.layer_ids)[None, :, None]
    places = np.arange(model.top_k)[None, None, :] * (model.id_space // model.top_k)
    base = serial * 97 + positions_T[:, None, None] * 31 + layers * 7
    ids: NDArray[np.int64] = (base + places) % model.id_space
    return ids.astype(np.uint8) if model.id_space <= 256 else ids.astype(np.uint16)


def masks_of(serial: int, token_ids_T: NDArray[np.int32], model: ModelShape) -> MaskRows:
    """0 to 3 kept ids per row (0 is "no replay"); the token itself is always one of the kept."""
    counts = (token_ids_T + serial) % 4
    kept = (token_ids_T[:, None] + np.arange(4)[None, :] * 11) % model.vocab_size
    used = np.arange(4)[None, :] < counts[:, None]
    kept = np.sort(np.where(used, kept, model.vocab_size), axis=1)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return MaskRows(starts, kept[kept < model.vocab_size].astype(np.int32))


def scores_of(masks: MaskRows) -> ScoreRows:
    """A logprob for each kept id, a function of the id alone."""
    return ScoreRows(masks.starts_N, (-(masks.ids_M + 1) / 64).astype(np.float32))


def routing_segment(
    serial: int, start: int, stop: int, *, form: Form, model: ModelShape = WIDE_MODEL
) -> AnySegment:
    """Routing rows of positions [start, stop) of sequence ``serial``."""
    if form == "handle":
        return _handle(serial, start, stop, "routed_experts", model)
    rows = routing_of(serial, np.arange(start, stop), model)
    return InlineSegment(field="routed_experts", pos=start, data=rows)


def mask_segment(
    serial: int, start: int, stop: int, *, form: Form, model: ModelShape = WIDE_MODEL
) -> AnySegment:
    """Kept sets of positions [start, stop) of sequence ``serial``."""
    if form == "handle":
        return _handle(serial, start, stop, "sampling_mask", model)
    token_ids = token_ids_of(serial, np.arange(start, stop), model)
    return InlineSegment(field="sampling_mask", pos=start, data=masks_of(serial, token_ids, model))


def score_segment(
    serial: int, start: int, stop: int, *, form: Form, model: ModelShape = WIDE_MODEL
) -> AnySegment:
    """Logprobs of the kept ids at positions [start, stop) of sequence ``serial``."""
    if form == "handle":
        return _handle(serial, start, stop, "sampling_mask_logprobs", model)
    token_ids = token_ids_of(serial, np.arange(start, stop), model)
    scores = scores_of(masks_of(serial, token_ids, model))
    return InlineSegment(field="sampling_mask_logprobs", pos=start, data=scores)


SEGMENT_MAKERS: Final = {
    "routed_experts": routing_segment,
    "sampling_mask": mask_segment,
    "sampling_mask_logprobs": score_segment,
}


def _handle(serial: int, start: int, stop: int, field: Field, model: ModelShape) -> PayloadSegment:
    dtype, shape = FIELDS[field].kind(model)
    return PayloadSegment(
        field=field,
        file=f"v0/run/{serial % 256:02x}/request-{serial}.sbp",
        offset=4096 * (1 + list(FIELDS).index(field)),
        row=start + 100 * serial,  # rows of different sequences differ even in one file
        pos=start,
        rows=stop - start,
        dtype=dtype,
        shape=shape,
    ).check()


def make_sample(
    serial: int,
    *,
    tokens: int,
    prompt_tokens: int = 1,
    form: Form | None = "inline",
    with_masks: bool = True,
    with_scores: bool = False,
    with_weight_versions: bool = False,
    model: ModelShape = WIDE_MODEL,
    breaks: Sequence[int] = (),
    gaps: Iterable[tuple[int, int]] = (),
) -> Sample:
    """One sample of ``tokens`` tokens, ``prompt_tokens`` of them untrained, its last row absent.

    ``with_scores`` adds logprobs to the masks. ``breaks`` are positions where segments are split;
    ``gaps`` are ranges without routing rows.
    """
    positions = np.arange(tokens)
    sampled = positions >= prompt_tokens
    segments: list[AnySegment] = []
    if form is not None:
        for start, stop in _ranges(tokens - 1, breaks, gaps):
            segments.append(routing_segment(serial, start, stop, form=form, model=model))
        if with_masks and prompt_tokens < tokens:
            makers = [mask_segment, score_segment] if with_scores else [mask_segment]
            sampled_ranges = _ranges(tokens, (prompt_tokens, *breaks), ((0, prompt_tokens),))
            segments += [
                make(serial, start, stop, form=form, model=model)
                for make in makers
                for start, stop in sampled_ranges
            ]
    return Sample(
        sample_id=SampleId(f"sample-{serial:06d}"),
        rollout_id=RolloutId(f"rollout-{serial:06d}"),
        env_name=f"env-{serial % 3}",
        policy_version=serial % 5,
        token_ids_T=token_ids_of(serial, positions, model),
        loss_mask_T=sampled,
        logprobs_T=np.where(sampled, logprobs_of(serial, positions), np.float32(0)),
        advantages=Runs.of(np.where(sampled, np.float32(serial + 0.5), np.float32(0))),
        temperatures=Runs.of(np.where(sampled, np.float32(0.7), np.float32(1))),
        weight_versions=Runs.of(np.where(sampled, positions // 3, -1).astype(np.int32))
        if with_weight_versions
        else None,
        segments=tuple(segments),
        form=form if segments else None,
    )


def _ranges(
    stop: int, breaks: Iterable[int], gaps: Iterable[tuple[int, int]]
) -> list[tuple[int, int]]:
    covered = np.ones(max(stop, 0), np.bool_)
    for first, last in gaps:
        covered[first:last] = False
    begins = covered & ~np.concatenate(([False], covered[:-1]))[: len(covered)]
    for position in breaks:
        if position < stop:
            begins[position] = covered[position]
    firsts = np.flatnonzero(begins)
    ends = covered & np.concatenate((begins | ~covered, [True]))[1:]
    return list(zip(firsts.tolist(), (np.flatnonzero(ends) + 1).tolist(), strict=True))


def rows_by_position(segments: Iterable[AnySegment], field: Field) -> dict[int, Row]:
    """Each covered position's row as plain data. Raises ValueError when two rows meet."""
    rows: dict[int, Row] = {}
    for segment in segments:
        if segment.field != field:
            continue
        for index in range(segment.rows):
            if segment.pos + index in rows:
                raise ValueError(f"two rows of {field} at position {segment.pos + index}")
            rows[segment.pos + index] = row_at(segment, index)
    return rows


def row_at(segment: AnySegment, index: int) -> Row:
    """Row ``index`` of a segment as plain data."""
    if isinstance(segment, PayloadSegment):
        return (segment.file, segment.offset, segment.row + index)
    return segment.data[index].tobytes()
