"""Steps and chunks for the feed's tests, packed by the real packing."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sideband.batch.columns import Runs
from sideband.batch.packing import PackingPlan, pack
from sideband.batch.types import Chunk, Layout, MicroBatch, Sample
from sideband.feed.codec import Step
from sideband.ids import RunId
from sideband.masks.rows import RaggedRows
from sideband.model import ModelShape
from sideband.segments import AnySegment, Form, InlineSegment
from sideband.testing.batches import WIDE_MODEL, make_sample

RUN = RunId("run-a")


def make_step(
    *,
    step: int = 1,
    samples: Sequence[Sample] | None = None,
    form: Form | None = "handle",
    model: ModelShape | None = WIDE_MODEL,
    dp_size: int = 2,
    cp_size: int = 2,
    layout: Layout = "contiguous",
    seq_len: int = 32,
    run_id: RunId = RUN,
) -> Step:
    """A step of a few short samples."""
    if samples is None:
        samples = [
            make_sample(serial, tokens=9 + serial, prompt_tokens=3, form=form, breaks=(5,))
            for serial in range(5)
        ]
    plan = PackingPlan(seq_len=seq_len, dp_size=dp_size, cp_size=cp_size, layout=layout)
    return Step(
        run_id=run_id,
        step=step,
        model=model,
        dp_size=dp_size,
        cp_size=cp_size,
        layout=layout,
        grid=tuple(tuple(row) for row in pack(samples, plan)),
    )


def assert_same_rows(got: MicroBatch | Chunk, expected: MicroBatch | Chunk) -> None:
    """Bitwise equality of everything that travels."""
    assert type(got) is type(expected)
    for name in got.__slots__:
        _assert_same(name, getattr(got, name), getattr(expected, name))


def _assert_same(name: str, got: object, expected: object) -> None:
    if isinstance(got, np.ndarray) and isinstance(expected, np.ndarray):
        _assert_arrays(name, got, expected)
    elif isinstance(got, Runs) and isinstance(expected, Runs):
        _assert_arrays(name, got.values_R, expected.values_R)
        _assert_arrays(name, got.lengths_R, expected.lengths_R)
    elif name == "segments" and isinstance(got, tuple) and isinstance(expected, tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            _assert_segments(one, other)
    else:
        assert got == expected, name


def _assert_segments(got: AnySegment, expected: AnySegment) -> None:
    if not isinstance(got, InlineSegment) or not isinstance(expected, InlineSegment):
        assert got == expected
        return
    assert (got.field, got.pos) == (expected.field, expected.pos)
    if isinstance(got.data, RaggedRows) and isinstance(expected.data, RaggedRows):
        assert type(got.data) is type(expected.data)
        assert got.data.equals(expected.data)
    else:
        assert isinstance(got.data, np.ndarray)
        assert isinstance(expected.data, np.ndarray)
        _assert_arrays("data", got.data, expected.data)


def _assert_arrays(name: str, got: NDArray[np.generic], expected: NDArray[np.generic]) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), name
    assert got.tobytes() == expected.tobytes(), name
