"""Samples as bytes, as the ledger keeps collected rollouts: MessagePack, little-endian arrays.

A sample by handle costs about 9 bytes a token and its descriptors; an inline one its rows too.

Legend: T tokens of one sample.
"""

from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from sideband.batch.columns import Runs
from sideband.batch.types import Sample
from sideband.fields import FIELDS, Field
from sideband.ids import RolloutId, SampleId
from sideband.masks.rows import RaggedRows
from sideband.packed import JOINED_BYTES_MAX, packed_pieces
from sideband.segments import AnySegment, Form, InlineSegment, PayloadSegment

FORM_VERSION: Final = 1


class UnreadableSamples(ValueError):
    """Bytes that this version did not write."""


class _Runs(msgspec.Struct, array_like=True, frozen=True):
    dtype: Literal["<f4", "<i4"]
    values: memoryview
    lengths: memoryview

    @classmethod
    def of(cls, runs: Runs) -> "_Runs":
        dtype: Literal["<f4", "<i4"] = "<f4" if runs.values_R.dtype == np.float32 else "<i4"
        return cls(dtype, _bytes(runs.values_R.astype(dtype, copy=False)), _bytes(runs.lengths_R))

    def runs(self) -> Runs:
        return Runs(np.frombuffer(self.values, self.dtype), np.frombuffer(self.lengths, "<i4"))


class _Rows(msgspec.Struct, array_like=True, frozen=True, tag="rows"):
    """Inline routing rows."""

    field: Field
    pos: int
    dtype: Literal["uint8", "uint16"]
    shape: tuple[int, int, int]
    data: memoryview


class _Masks(msgspec.Struct, array_like=True, frozen=True, tag="masks"):
    """Inline rows of different length: kept sets, and what is said of them."""

    field: Field
    pos: int
    starts: memoryview
    values: memoryview


class _Sample(msgspec.Struct, array_like=True, frozen=True):
    sample_id: str
    rollout_id: str
    env_name: str
    policy_version: int
    token_ids: memoryview
    loss_mask: memoryview
    logprobs: memoryview
    advantages: _Runs
    temperatures: _Runs
    weight_versions: _Runs | None
    handles: list[PayloadSegment]
    inline: list[_Rows | _Masks]
    form: Form | None


class _Wire(msgspec.Struct, array_like=True, frozen=True):
    version: int
    samples: list[_Sample]


_DECODER: Final = msgspec.msgpack.Decoder(_Wire)
_APART: Final = (_Wire, _Sample, _Runs, _Rows, _Masks)  # what holds arrays


def encode_samples(samples: tuple[Sample, ...]) -> bytes:
    """All samples of one rollout. Copies their arrays, once: not for large ones on the loop."""
    return msgspec.msgpack.encode(_wire(samples))


def encoded_pieces(samples: tuple[Sample, ...]) -> Iterator[bytes | memoryview]:
    """The bytes that ``encode_samples`` gives, large arrays as they lie in memory: no call copies
    more than JOINED_BYTES_MAX and some.
    """
    wire = _wire(samples)
    if sum(map(size_of, samples)) <= JOINED_BYTES_MAX:
        return iter((msgspec.msgpack.encode(wire),))
    return packed_pieces(wire, _APART)


def _wire(samples: tuple[Sample, ...]) -> _Wire:
    return _Wire(FORM_VERSION, [_encoded(sample) for sample in samples])


def decode_samples(body: bytes | memoryview) -> tuple[Sample, ...]:
    """The samples in ``body``, as views of it. Raises UnreadableSamples."""
    try:
        wire = _DECODER.decode(body)
    except msgspec.MsgspecError as exc:
        raise UnreadableSamples(str(exc)) from exc
    if wire.version != FORM_VERSION:
        raise UnreadableSamples(f"samples are of form {wire.version}, not {FORM_VERSION}")
    return tuple(_decoded(sample) for sample in wire.samples)


def size_of(sample: Sample) -> int:
    """About how many bytes it will have, descriptors aside."""
    inline = 0
    for segment in sample.segments:
        if isinstance(segment, InlineSegment):
            data = segment.data
            inline += data.values_M.nbytes if isinstance(data, RaggedRows) else data.nbytes
    return 9 * len(sample) + inline


def _bytes(array: NDArray[Any]) -> memoryview:
    """The bytes of an array in C order, not copied where they lie so."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _encoded(sample: Sample) -> _Sample:
    # Segments keep their order within each form; a sample has only one.
    return _Sample(
        sample_id=sample.sample_id,
        rollout_id=sample.rollout_id,
        env_name=sample.env_name,
        policy_version=sample.policy_version,
        token_ids=_bytes(sample.token_ids_T.astype("<i4", copy=False)),
        loss_mask=_bytes(np.packbits(sample.loss_mask_T)),
        logprobs=_bytes(sample.logprobs_T.astype("<f4", copy=False)),
        advantages=_Runs.of(sample.advantages),
        temperatures=_Runs.of(sample.temperatures),
        weight_versions=None
        if sample.weight_versions is None
        else _Runs.of(sample.weight_versions),
        handles=[s for s in sample.segments if isinstance(s, PayloadSegment)],
        inline=[_inline(s) for s in sample.segments if isinstance(s, InlineSegment)],
        form=sample.form,
    )


def _inline(segment: InlineSegment) -> _Rows | _Masks:
    if isinstance(segment.data, RaggedRows):
        starts, values = segment.data.starts_N, segment.data.values_M
        return _Masks(segment.field, segment.pos, _bytes(starts), _bytes(values))
    rows, layers, top_k = segment.data.shape
    dtype: Literal["uint8", "uint16"] = "uint8" if segment.data.dtype == np.uint8 else "uint16"
    return _Rows(segment.field, segment.pos, dtype, (rows, layers, top_k), _bytes(segment.data))


def _decoded(wire: _Sample) -> Sample:
    token_ids_T: NDArray[np.int32] = np.frombuffer(wire.token_ids, "<i4")
    bits = np.unpackbits(np.frombuffer(wire.loss_mask, np.uint8), count=len(token_ids_T))
    return Sample(
        sample_id=SampleId(wire.sample_id),
        rollout_id=RolloutId(wire.rollout_id),
        env_name=wire.env_name,
        policy_version=wire.policy_version,
        token_ids_T=token_ids_T,
        loss_mask_T=bits.astype(np.bool_),
        logprobs_T=np.frombuffer(wire.logprobs, "<f4"),
        advantages=wire.advantages.runs(),
        temperatures=wire.temperatures.runs(),
        weight_versions=None if wire.weight_versions is None else wire.weight_versions.runs(),
        segments=(*wire.handles, *(_segment(one) for one in wire.inline)),
        form=wire.form,
    )


def _segment(wire: _Rows | _Masks) -> AnySegment:
    if isinstance(wire, _Masks):
        ragged = FIELDS[wire.field].ragged
        if ragged is None:
            raise UnreadableSamples(f"{wire.field} has no rows of different length")
        values = np.frombuffer(wire.values, ragged.dtype.newbyteorder("<"))
        data = ragged(np.frombuffer(wire.starts, "<i8"), values)
        return InlineSegment(field=wire.field, pos=wire.pos, data=data)
    rows = np.frombuffer(wire.data, f"<{'u1' if wire.dtype == 'uint8' else 'u2'}")
    return InlineSegment(field=wire.field, pos=wire.pos, data=rows.reshape(wire.shape))
