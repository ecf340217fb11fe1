"""How a block holds rows: a registry per kind of field, so that a format may grow by an entry.

An encoding turns rows into the bytes of one self-contained block and back. ``raw`` is marked as
``is_raw``: its stored bytes are the rows, so a reader may read whole blocks where they shall lie.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from sideband.errors import InvalidInput
from sideband.fields import Field
from sideband.masks import csr_bits, csr_floats, others_rice
from sideband.masks.rows import MaskRows, ScoreRows
from sideband.payload.columns import RowArray
from sideband.payload.layout import BLOCK_BYTES_TARGET, Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingEncoding:
    """Routing rows [N, layers, top-k] as blocks.

    ``decode_block`` fills ``out`` (C-contiguous, the block's rows) and raises ValueError on bytes
    that no writer makes. Stored bytes are lent: no decoder keeps a view of them.
    """

    name: str
    is_raw: bool
    encode_block: Callable[[RowArray], list[Buffer]]
    decode_block: Callable[[memoryview, RowArray], None]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreEncoding:
    """Scores of kept ids as blocks; ``bytes_before`` and ``bytes_min`` as those of kept sets.

    ``decode_block(stored, rows, vocab_size)`` raises InvalidInput on bytes that no writer makes.
    """

    name: str
    parts_of: Callable[[ScoreRows], list[NDArray[np.uint8]]]
    decode_block: Callable[[memoryview, int, int], ScoreRows]
    bytes_before: Callable[[ScoreRows], NDArray[np.int64]]
    bytes_min: tuple[int, int]

    def encode_block(self, scores: ScoreRows) -> list[Buffer]:
        """The block's bytes in parts, empty ones left out."""
        return [part.data for part in self.parts_of(scores) if len(part)]


def _encode_raw(rows_NLK: RowArray) -> list[Buffer]:
    return [np.ascontiguousarray(rows_NLK).data.cast("B")]


def _decode_raw(stored: memoryview, out: RowArray) -> None:
    out.data.cast("B")[:] = stored


RAW: Final = RoutingEncoding(
    name="raw", is_raw=True, encode_block=_encode_raw, decode_block=_decode_raw
)
CSR_BITS: Final = MaskEncoding(
    name="csr-bits",
    parts_of=csr_bits.encode_block,
    decode_rows=csr_bits.decode_rows,
    bytes_before=csr_bits.bytes_before,
    bytes_min=(csr_bits.START_BYTES, csr_bits.START_BYTES),
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
    decode_block=csr_floats.decode_block,
    bytes_before=csr_floats.bytes_before,
    bytes_min=(csr_floats.START_BYTES, csr_floats.START_BYTES),
)
ROUTING_ENCODINGS: Final[Mapping[str, RoutingEncoding]] = MappingProxyType({RAW.name: RAW})
MASK_ENCODINGS: Final[Mapping[str, MaskEncoding]] = MappingProxyType(
    {encoding.name: encoding for encoding in (OTHERS_RICE, CSR_BITS)}
)

SCORE_ENCODINGS: Final[Mapping[str, ScoreEncoding]] = MappingProxyType({CSR_F32.name: CSR_F32})
RAGGED_ENCODINGS: Final[Mapping[Field, Mapping[str, MaskEncoding | ScoreEncoding]]] = (
    MappingProxyType({"sampling_mask": MASK_ENCODINGS, "sampling_mask_logprobs": SCORE_ENCODINGS})
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encodings:
    """What a writer uses, by name. docs/decisions/0013-kept-sets-without-the-sampled-id.md."""

    masks: str = OTHERS_RICE.name

    def check(self) -> "Encodings":
        """Self. Raises InvalidInput for a name that is not in the registry."""
        if self.masks not in MASK_ENCODINGS:
            raise InvalidInput("encodings.masks", self.masks, f"must be in {set(MASK_ENCODINGS)}")
        return self


DEFAULT_ENCODINGS: Final = Encodings()


def routing_blocks(rows: int, row_size_bytes: int) -> list[int]:
    """Boundaries that cut ``rows`` into blocks of about the target size, at least one row each."""
    step = max(1, BLOCK_BYTES_TARGET // row_size_bytes)
    return [*range(0, rows, step), rows]


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
