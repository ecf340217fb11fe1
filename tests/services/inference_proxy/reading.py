"""Reads what an answer of the proxy says: rows by position, whatever their form."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sideband.engines.inline import decode_npy_base64
from sideband.model import ModelShape
from sideband.payload.reader import PayloadReader
from sideband.payload.root import PayloadRoot
from sideband.segments import PayloadSegment
from tests.services.inference_proxy.stub_model import MODEL


def routing_of(
    answer: dict[str, Any], root: Path | None, model: ModelShape = MODEL
) -> dict[int, NDArray[np.uint8]]:
    """Routed layers' row of each position that the first choice covers."""
    rows: dict[int, NDArray[np.uint8]] = {}
    text = answer["choices"][0].get("routed_experts")
    if text is not None:
        array = decode_npy_base64(text, bytes_max=1 << 20)[:, list(model.layer_ids)]
        start = (answer.get("routed_experts_start") or {}).get("0", 0)
        return {start + i: row for i, row in enumerate(array)}
    for segment in segments_of(answer, "routed_experts"):
        assert root is not None
        out = np.zeros((segment.rows, *segment.shape), segment.dtype)
        reader = PayloadReader(PayloadRoot.open(root), model=model)
        try:
            reader.read_routing(segment, out)
        finally:
            reader.close()
        rows |= {segment.pos + i: row for i, row in enumerate(out)}
    return rows


def segments_of(answer: dict[str, Any], field: str, choice: str = "0") -> list[PayloadSegment]:
    """The segments of one field of one choice."""
    named = (answer.get("payload_segments") or {}).get(choice, [])
    found = msgspec.convert(named, list[PayloadSegment])
    return [segment for segment in found if segment.field == field]


def assert_rows(
    rows: dict[int, NDArray[np.uint8]], expected: NDArray[np.uint8], *, start: int = 0
) -> None:
    """``rows`` cover exactly [start, start + len(expected)) and equal it."""
    assert sorted(rows) == list(range(start, start + len(expected)))
    for i, row in enumerate(expected):
        np.testing.assert_array_equal(rows[start + i], row)
