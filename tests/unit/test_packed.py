"""Large arrays are encoded in pieces, to the very bytes that one call gives."""

from io import BytesIO
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.batch.packing import PackingPlan, plan_rows
from sideband.feed import codec
from sideband.feed.codec import Step, decode_step, encode_step
from sideband.feed.rows import RowsWire, encode_rows
from sideband.feed.rows_segments import InlineWire
from sideband.ids import RunId
from sideband.packed import JOINED_BYTES_MAX, packed_pieces
from sideband.testing.batches import WIDE_MODEL, make_sample


class Inner(msgspec.Struct, array_like=True, tag="inner"):
    """Tagged, as one of several kinds."""

    name: str
    data: memoryview | None


class Outer(msgspec.Struct, array_like=True):
    """Lists of such, of any length."""

    items: list[Inner]
    data: memoryview
    rest: list[int]


def views() -> st.SearchStrategy[memoryview]:
    large = st.integers(JOINED_BYTES_MAX - 2, JOINED_BYTES_MAX + 70_000)
    sizes = st.one_of(st.integers(0, 300), large)
    return sizes.map(lambda size: memoryview(bytes([size % 251]) * size))


@given(st.lists(st.tuples(st.text(max_size=3), st.none() | views()), max_size=18), views())
def test_the_pieces_are_what_one_call_gives(items: list[tuple[str, Any]], data: memoryview) -> None:
    value = Outer([Inner(*item) for item in items], data, [1, 2])
    pieces = list(packed_pieces(value, (Outer, Inner)))
    assert b"".join(pieces) == msgspec.msgpack.encode(value)
    given_views = [data, *(item[1] for item in items)]
    for piece in pieces:
        is_given = any(piece is view for view in given_views)
        assert is_given or len(piece) < JOINED_BYTES_MAX + 9


def test_a_large_step_is_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [make_sample(1, tokens=90_000, model=WIDE_MODEL)]
    plan = PackingPlan(seq_len=1 << 17)
    (row,) = [batch for rank in plan_rows(samples, plan) for batch in rank]
    wire = encode_rows(row, WIDE_MODEL)
    pieces = list(packed_pieces(wire, (RowsWire, InlineWire)))
    assert b"".join(pieces) == msgspec.msgpack.encode(wire)

    written: list[int] = []

    class Watched(BytesIO):
        def write(self, data: Any, /) -> int:
            written.append(memoryview(data).nbytes)
            return super().write(data)

    monkeypatch.setattr(codec, "BytesIO", Watched)
    body = encode_step(
        Step(
            run_id=RunId("run"),
            step=1,
            model=WIDE_MODEL,
            dp_size=1,
            cp_size=1,
            layout="contiguous",
            grid=plan_rows(samples, plan),
        )
    )
    assert len(body) == sum(written) > codec.WRITTEN_BYTES
    assert max(written) <= codec.WRITTEN_BYTES
    ((batch,),) = decode_step(body).grid
    assert msgspec.msgpack.encode(encode_rows(batch, WIDE_MODEL)) == msgspec.msgpack.encode(wire)
