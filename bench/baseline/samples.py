"""Samples that carry their rows: Python lists of scalars, routing as bytes with a shape.

The shape of the public trainers that replay routing: one flat sample per branch, a list per column,
the routing array as raw bytes since lists of ids would be several times slower still.
"""

import msgspec
import numpy as np

from sideband.batch.types import Sample
from sideband.payload.columns import RowArray


class RoutingBytes(msgspec.Struct, array_like=True, gc=False):
    """An array of rows as bytes."""

    data: bytes
    shape: tuple[int, int, int]
    dtype: str

    def array(self) -> RowArray:
        """The rows [T, layers, top-k]."""
        rows: RowArray = np.frombuffer(self.data, self.dtype).reshape(self.shape)
        return rows


class InlineSample(msgspec.Struct, array_like=True, gc=False):
    """One branch of a rollout, everything inside."""

    sample_id: str
    env_name: str
    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    advantages: list[float]
    temperatures: list[float]
    routing: RoutingBytes


def inline_sample(sample: Sample, rows_TLK: RowArray) -> InlineSample:
    """The same sample with its rows in it; the last token's row is there too, as padding."""
    assert len(rows_TLK) == len(sample)
    tokens, layers, top_k = rows_TLK.shape
    return InlineSample(
        sample_id=sample.sample_id,
        env_name=sample.env_name,
        token_ids=sample.token_ids_T.tolist(),
        loss_mask=sample.loss_mask_T.tolist(),
        logprobs=sample.logprobs_T.tolist(),
        advantages=sample.advantages.expand().tolist(),
        temperatures=sample.temperatures.expand().tolist(),
        routing=RoutingBytes(rows_TLK.tobytes(), (tokens, layers, top_k), rows_TLK.dtype.name),
    )
