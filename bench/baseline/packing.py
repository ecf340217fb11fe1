"""Pack inline samples and encode them: joined lists, one message per data rank for all its ranks.

Kept as cheap as the approach allows: routing bytes are joined once per micro batch, scalars that
are constant per sample travel once where the field repeats them per token (environment names), and
each message is encoded once however many ranks it goes to.
"""

from collections.abc import Sequence
from itertools import chain
from typing import TypeVar

import msgspec

from bench.baseline.samples import InlineSample, RoutingBytes
from sideband.batch.first_fit import first_fit

V = TypeVar("V")


class InlineMicroBatch(msgspec.Struct, array_like=True, gc=False):
    """A packed row with every column in it."""

    input_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    advantages: list[float]
    temperatures: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    sample_ids: list[str]
    env_names: list[str]
    routing: RoutingBytes


def pack_inline(
    samples: Sequence[InlineSample], *, seq_len: int, dp_size: int, row_multiple: int
) -> list[list[InlineMicroBatch]]:
    """The grid, first-fit decreasing; the last micro batches are dummies where needed."""
    ordered = sorted(samples, key=lambda sample: (-len(sample.token_ids), sample.sample_id))
    bins = first_fit([len(sample.token_ids) for sample in ordered], capacity=seq_len)
    batches = [_micro_batch([ordered[i] for i in bin_], row_multiple) for bin_ in bins]
    while len(batches) % dp_size:
        batches.append(_dummy(batches[0], row_multiple))
    return [batches[rank::dp_size] for rank in range(dp_size)]


def encode_inline(grid: Sequence[Sequence[InlineMicroBatch]]) -> list[bytes]:
    """One message per data rank; all its CP ranks receive it whole."""
    encoder = msgspec.msgpack.Encoder()
    return [encoder.encode(row) for row in grid]


def decode_inline(message: bytes) -> list[InlineMicroBatch]:
    """What a rank reads back."""
    return msgspec.msgpack.decode(message, type=list[InlineMicroBatch])


def _micro_batch(samples: Sequence[InlineSample], row_multiple: int) -> InlineMicroBatch:
    lengths = [len(sample.token_ids) for sample in samples]
    pads = -sum(lengths) % row_multiple
    _, layers, top_k = samples[0].routing.shape
    row_bytes = len(samples[0].routing.data) // lengths[0]
    parts = [sample.routing.data for sample in samples]
    data = b"".join([*parts, bytes(pads * row_bytes)])  # one copy, as small as it gets
    return InlineMicroBatch(
        input_ids=_joined([sample.token_ids for sample in samples], [0] * pads),
        loss_mask=_joined([sample.loss_mask for sample in samples], [False] * pads),
        logprobs=_joined([sample.logprobs for sample in samples], [0.0] * pads),
        advantages=_joined([sample.advantages for sample in samples], [0.0] * pads),
        temperatures=_joined([sample.temperatures for sample in samples], [1.0] * pads),
        position_ids=list(chain.from_iterable(range(length) for length in [*lengths, pads])),
        sequence_lengths=lengths,
        sample_ids=[sample.sample_id for sample in samples],
        env_names=[sample.env_name for sample in samples],
        routing=RoutingBytes(data, (sum(lengths) + pads, layers, top_k), samples[0].routing.dtype),
    )


def _joined(columns: Sequence[list[V]], pads: list[V]) -> list[V]:
    return list(chain(*columns, pads))


def _dummy(like: InlineMicroBatch, row_multiple: int) -> InlineMicroBatch:
    _, layers, top_k = like.routing.shape
    row_bytes = len(like.routing.data) // like.routing.shape[0]
    return InlineMicroBatch(
        input_ids=[0] * row_multiple,
        loss_mask=[False] * row_multiple,
        logprobs=[0.0] * row_multiple,
        advantages=[0.0] * row_multiple,
        temperatures=[1.0] * row_multiple,
        position_ids=[0] * row_multiple,
        sequence_lengths=[],
        sample_ids=[],
        env_names=[],
        routing=RoutingBytes(
            bytes(row_multiple * row_bytes), (row_multiple, layers, top_k), like.routing.dtype
        ),
    )
