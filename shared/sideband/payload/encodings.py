"""How a block holds rows: a registry per kind of field, so that a format may grow by an entry.

An encoding turns rows into the bytes of one self-contained block and back. ``raw`` is marked as
``is_raw``: its stored bytes are the rows, so a reader may read whole blocks where they shall lie.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from sideband.errors import InvalidInput
from sideband.fields import Field
from sideband.masks import csr_bits, csr_floats, others_rice
from sideband.masks.rows import MaskRows, ScoreRows
from sideband.masks.starts import START_BYTES
from sideband.model import ModelShape
from sideband.payload import packed
from sideband.payload.columns import RowArray
from sideband.payload.layout import BLOCK_BYTES_TARGET, Buffer


class DecodeRouting(Protocol):
    """Fills ``out_NLK`` (C-contiguous) with its N rows from row ``first`` of a block of ``rows``.

    Raises ValueError on bytes that no writer makes.
    """

    def __call__(
        self, stored: memoryview, rows: int, *, first: int, out_NLK: RowArray, model: ModelShape
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingEncoding:
    """Routing rows [N, layers, top-k] as blocks.

    ``parts_of(rows, model)``: a block's bytes. ``block_bytes(rows, model)``: how many these are,
    exactly. ``rows_within(bytes, model)``: how many rows of a block fit there, at least one. Stored
    bytes are lent: no decoder keeps a view of them.
    """

    name: str
    is_raw: bool
    parts_of: Callable[[RowArray, ModelShape], Sequence[RowArray]]
    decode_rows: DecodeRouting
    block_bytes: Callable[[int, ModelShape], int]
    rows_within: Callable[[int, ModelShape], int]

    def encode_block(self, rows_NLK: RowArray, model: ModelShape) -> list[Buffer]:
        """The block's bytes in parts. The caller checks the ids."""
        return [part.data.cast("B") for part in self.parts_of(rows_NLK, model)]


class DecodeMasks(Protocol):
    """Decodes rows [first, first + N) of a block of ``rows`` rows, with N sampled tokens.

    Raises TokenNotOfRow when a row is another token's, InvalidInput on bytes that no writer makes.
    """

    def __call__(
        self,
        stored: memoryview,
        rows: int,
        vocab_size: int,
        *,
        first: int,
        sampled_N: NDArray[np.int32],
    ) -> MaskRows: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskEncoding:
    """Kept sets as blocks.

    ``parts_of(masks, sampled, vocab_size)``: a block's bytes. ``bytes_before(masks, vocab_size)``
    bounds them from above before each row and at the end, [N + 1]. No block of r rows takes less
    than a · r + b bytes, with (a, b) = ``bytes_min``.
    """

    name: str
    parts_of: Callable[[MaskRows, NDArray[np.int32], int], list[NDArray[np.uint8]]]
    decode_rows: DecodeMasks
    bytes_before: Callable[[MaskRows, int], NDArray[np.int64]]
    bytes_min: tuple[int, int]

    def encode_block(
        self, masks: MaskRows, sampled_N: NDArray[np.int32], vocab_size: int
    ) -> list[Buffer]:
        """The block's bytes in parts, empty ones left out."""
        return [part.data for part in self.parts_of(masks, sampled_N, vocab_size) if len(part)]


class DecodeScores(Protocol):
    """Decodes rows [first, first + count) of a block of ``rows`` rows; they own their memory.

    Raises InvalidInput on bytes that no writer makes.
    """

    def __call__(
        self, stored: memoryview, rows: int, vocab_size: int, *, first: int, count: int
    ) -> ScoreRows: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreEncoding:
    """Scores of kept ids as blocks; ``bytes_before`` and ``bytes_min`` as those of kept sets."""

    name: str
    parts_of: Callable[[ScoreRows], list[NDArray[np.uint8]]]
    decode_rows: DecodeScores
    bytes_before: Callable[[ScoreRows], NDArray[np.int64]]
    bytes_min: tuple[int, int]

    def encode_block(self, scores: ScoreRows) -> list[Buffer]:
        """The block's bytes in parts, empty ones left out."""
        return [part.data for part in self.parts_of(scores) if len(part)]


def _raw_parts(rows_NLK: RowArray, model: ModelShape) -> list[RowArray]:
    return [cast("RowArray", np.ascontiguousarray(rows_NLK))]


def _decode_raw(
    stored: memoryview, rows: int, *, first: int, out_NLK: RowArray, model: ModelShape
) -> None:
    row_bytes = out_NLK.nbytes // len(out_NLK)
    out_NLK.data.cast("B")[:] = stored[first * row_bytes :][: out_NLK.nbytes]


RAW: Final = RoutingEncoding(
    name="raw",
    is_raw=True,
    parts_of=_raw_parts,
    decode_rows=_decode_raw,
    block_bytes=lambda rows, model: rows * model.row_size_bytes,
    rows_within=lambda size_bytes, model: max(1, size_bytes // model.row_size_bytes),
)
PACKED: Final = RoutingEncoding(
    name="packed",
    is_raw=False,
    parts_of=packed.parts_of,
    decode_rows=packed.decode_rows,
    block_bytes=packed.block_bytes,
    rows_within=packed.rows_within,
)
CSR_BITS: Final = MaskEncoding(
    name="csr-bits",
    parts_of=csr_bits.encode_block,
    decode_rows=csr_bits.decode_rows,
    bytes_before=csr_bits.bytes_before,
    bytes_min=(START_BYTES, START_BYTES),
)
OTHERS_RICE: Final = MaskEncoding(
    name="others-rice",
    parts_of=others_rice.encode_block,
    decode_rows=others_rice.decode_rows,
    bytes_before=others_rice.bytes_before,
    bytes_min=(1, 0),
)
CSR_F32: Final = ScoreEncoding(
    name="csr-f32",
    parts_of=csr_floats.encode_block,
    decode_rows=csr_floats.decode_rows,
    bytes_before=csr_floats.bytes_before,
    bytes_min=(START_BYTES, START_BYTES),
)
ROUTING_ENCODINGS: Final[Mapping[str, RoutingEncoding]] = MappingProxyType(
    {encoding.name: encoding for encoding in (RAW, PACKED)}
)
MASK_ENCODINGS: Final[Mapping[str, MaskEncoding]] = MappingProxyType(
    {encoding.name: encoding for encoding in (OTHERS_RICE, CSR_BITS)}
)

SCORE_ENCODINGS: Final[Mapping[str, ScoreEncoding]] = MappingProxyType({CSR_F32.name: CSR_F32})
RAGGED_ENCODINGS: Final[Mapping[Field, Mapping[str, MaskEncoding | ScoreEncoding]]] = (
    MappingProxyType({"sampling_mask": MASK_ENCODINGS, "sampling_mask_logprobs": SCORE_ENCODINGS})
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encodings:
    """What a writer uses, by name. Decisions 0013 and 0014 say why these are the defaults.

    Ids of one byte stay ``raw`` whatever ``routing`` says: there is nothing to leave out.
    """

    routing: str = RAW.name
    masks: str = OTHERS_RICE.name

    def check(self) -> "Encodings":
        """Self. Raises InvalidInput for a name that is not in the registry."""
        for part, name, known in (
            ("routing", self.routing, ROUTING_ENCODINGS),
            ("masks", self.masks, MASK_ENCODINGS),
        ):
            if name not in known:
                raise InvalidInput(f"encodings.{part}", name, f"must be one of {sorted(known)}")
        return self

    def routing_of(self, model: ModelShape) -> RoutingEncoding:
        """The encoding of the model's routing rows."""
        return RAW if model.row_dtype.itemsize == 1 else ROUTING_ENCODINGS[self.routing]


DEFAULT_ENCODINGS: Final = Encodings()


def routing_blocks(rows: int, model: ModelShape, encoding: RoutingEncoding = RAW) -> list[int]:
    """Boundaries that cut ``rows`` into blocks of about the target size, at least one row each."""
    return [*range(0, rows, encoding.rows_within(BLOCK_BYTES_TARGET, model)), rows]


def mask_blocks(masks: MaskRows, vocab_size: int, encoding: MaskEncoding) -> list[int]:
    """The same for kept sets, whose rows differ in size."""
    return _bounds(encoding.bytes_before(masks, vocab_size))


def score_blocks(scores: ScoreRows, encoding: ScoreEncoding) -> list[int]:
    """The same for scores."""
    return _bounds(encoding.bytes_before(scores))


def _bounds(before_N: NDArray[np.int64]) -> list[int]:
    """Boundaries of blocks, given the bytes before each row and before the end."""
    bounds = [0]
    while bounds[-1] < len(before_N) - 1:
        # Monotone, so each next boundary is one binary search away.
        limit = int(before_N[bounds[-1]] - before_N[0]) + BLOCK_BYTES_TARGET
        reached = int(np.searchsorted(before_N, limit, side="right")) - 1
        bounds.append(max(reached, bounds[-1] + 1))
    return bounds
