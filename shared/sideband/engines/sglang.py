"""Rows as SGLang sends them in ``meta_info``, read into what the library works with. Pure.

``routed_experts`` is base64 of bare little-endian int32 ids [rows, all decoder layers, top-k]
without a shape; ``output_token_sampling_mask`` has a list of ids per sampled token, by weight.

Errors: InvalidInlineRouting, InvalidInlineMask (InvalidInput).
"""

from typing import cast

import numpy as np

from sideband.engines.base64_text import decode_base64
from sideband.engines.inline import InvalidInlineMask, InvalidInlineRouting
from sideband.engines.long_text import LongText
from sideband.engines.npy import begin_of
from sideband.model import ModelShape
from sideband.routing.rows import RowArray


def decode_sglang_rows(text: object, model: ModelShape) -> RowArray | None:
    """Rows of all decoder layers in the model's own dtype; None stays None.

    A layer without a router is zeros there, and so is a row that was not captured. Ids are checked
    before they are narrowed. Raises InvalidInlineRouting.
    """
    if text is None:
        return None
    if not isinstance(text, (str, LongText)):
        raise InvalidInlineRouting(type(text).__name__, "must be a base64 string")
    try:
        ids_M = np.frombuffer(decode_base64(text), "<i4")
    except ValueError as exc:  # half a number, too
        raise InvalidInlineRouting(begin_of(text), "must be base64 of int32 ids") from exc
    width = model.num_layers * model.top_k
    if len(ids_M) % width:
        raise InvalidInlineRouting(
            f"{len(ids_M)} ids", f"must be whole rows of {model.num_layers} × {model.top_k} ids"
        )
    if len(ids_M) and not 0 <= int(ids_M.min()) <= int(ids_M.max()) < model.id_space:
        raise InvalidInlineRouting(
            f"expert ids {int(ids_M.min())}..{int(ids_M.max())}",
            f"must lie in the id space [0, {model.id_space})",
        )
    rows = ids_M.astype(model.row_dtype).reshape(-1, model.num_layers, model.top_k)
    return cast("RowArray", rows)


def ascending_masks(masks: object) -> list[list[int]] | None:
    """Kept sets with their ids in order; None stays None. Raises InvalidInlineMask."""
    if masks is None:
        return None
    if not isinstance(masks, list) or not all(
        isinstance(row, list) and set(map(type, row)) <= {int} for row in masks
    ):
        raise InvalidInlineMask(type(masks).__name__, "must be a list of lists of token ids")
    return [sorted(row) for row in masks]
