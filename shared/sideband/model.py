"""The model fingerprint that travels from engine to trainer: what payloads must agree on."""

from typing import Final, Literal

import msgspec
import numpy as np

from sideband.errors import InvalidInput

LAYERS_MAX: Final = 1024  # the deepest public MoE has 93 decoder layers
TOP_K_MAX: Final = 256
ID_SPACE_MAX: Final = 1 << 16  # uint16 ids at rest
VOCAB_SIZE_MAX: Final = 1 << 24

RowDtype = Literal["uint8", "uint16", "int32", "float32"]


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layer ids, widths and id spaces of one model; equal on both ends or the feed refuses.

    ``layer_ids`` are the global decoder layer ids (0-based, ascending) that own a learned router;
    ``num_layers`` counts all decoder layers, MTP layers excluded. ``id_space`` counts routed plus
    zero-compute experts: it alone decides the dtype, never the largest id seen.
    Raises InvalidInput from ``check``.
    """

    num_layers: int
    layer_ids: tuple[int, ...]
    top_k: int
    id_space: int
    vocab_size: int

    def check(self) -> "ModelShape":
        """Self, after every bound was checked."""
        if not 1 <= self.num_layers <= LAYERS_MAX:
            raise InvalidInput("num_layers", self.num_layers, f"must lie in [1, {LAYERS_MAX}]")
        if list(self.layer_ids) != sorted(set(self.layer_ids)) or not self.layer_ids:
            raise InvalidInput("layer_ids", self.layer_ids, "must be ascending, unique, not empty")
        if self.layer_ids[0] < 0 or self.layer_ids[-1] >= self.num_layers:
            raise InvalidInput("layer_ids", self.layer_ids, f"must lie in [0, {self.num_layers})")
        if not 1 <= self.top_k <= min(TOP_K_MAX, self.id_space):
            raise InvalidInput("top_k", self.top_k, f"must lie in [1, {TOP_K_MAX}] and id_space")
        if not 1 <= self.id_space <= ID_SPACE_MAX:
            raise InvalidInput("id_space", self.id_space, f"must lie in [1, {ID_SPACE_MAX}]")
        if not 1 <= self.vocab_size <= VOCAB_SIZE_MAX:
            raise InvalidInput("vocab_size", self.vocab_size, f"must lie in [1, {VOCAB_SIZE_MAX}]")
        return self

    @property
    def row_dtype(self) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
        """uint8 up to 256 expert ids, uint16 above."""
        return np.dtype(np.uint8) if self.id_space <= 256 else np.dtype(np.uint16)

    @property
    def row_shape(self) -> tuple[int, int]:
        """(routed layers, top-k) of one routing row."""
        return (len(self.layer_ids), self.top_k)

    @property
    def row_size_bytes(self) -> int:
        """Bytes of one routing row at rest: routed layers × top-k × itemsize."""
        return len(self.layer_ids) * self.top_k * self.row_dtype.itemsize
