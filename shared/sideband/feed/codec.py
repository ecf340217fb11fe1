"""Steps over HTTP and chunks over ZMQ as bytes: docs/feed-protocol.md sections 1 and 2.

Decoded arrays are read-only views of the body, so a held step costs what its body costs. A decoder
checks everything (lengths, ranges, tiling, places) and raises MalformedStep, which names
the element; it never allocates more than the bytes that it was given account for.

Legend: L tokens of a packed row, E tokens that travel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Final, TypeVar

import msgspec

from sideband.batch.chunks import cut_chunks
from sideband.batch.types import Chunk, Layout, MicroBatch
from sideband.errors import InvalidInput
from sideband.feed.errors import MalformedStep, UnreadableStep
from sideband.feed.limits import (
    CP_SIZE_MAX,
    DP_SIZE_MAX,
    MICRO_BATCHES_MAX,
    STEP_BODY_BYTES_MAX,
    STEP_MAX,
)
from sideband.feed.rows import RowsWire, decode_rows, encode_rows
from sideband.feed.rows_segments import InlineWire
from sideband.feed.spans import encode_spans
from sideband.ids import RunId, check_id
from sideband.model import ModelShape
from sideband.packed import packed_pieces

STEP_CONTENT_TYPE: Final = "application/vnd.sideband.step+msgpack"
WRITTEN_BYTES: Final = 1 << 20  # of a step, copied in one call
STEP_MAGIC: Final = "sideband.step"
STEP_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """The grid of one step: ``grid[dp_rank]`` are that data rank's micro batches, equally many.

    Rows may be filled only when they are looked at (``packing.plan_rows``). Without a ``model`` no
    micro batch has segments.
    """

    run_id: RunId
    step: int
    model: ModelShape | None
    dp_size: int
    cp_size: int
    layout: Layout
    grid: Sequence[Sequence[MicroBatch]]

    @property
    def micro_batch_count(self) -> int:
        """Micro batches of each data rank."""
        return len(self.grid[0])


class _StepHead(msgspec.Struct, array_like=True):
    """The elements that every version shares; the rest is skipped, not read."""

    magic: str
    version: int


class _StepWire(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    magic: str
    version: int
    run_id: str
    step: int
    model: ModelShape | None
    dp_size: int
    cp_size: int
    layout: Layout
    grid: list[list[RowsWire]]


W = TypeVar("W")


def encode_step(step: Step) -> bytes:
    """The body of ``PUT /v1/steps/{step}``. The grid must be rectangular and not empty.

    Looks at each micro batch once, in order, and drops it: at its peak it holds the body and one.
    """
    assert len(step.grid) == step.dp_size, "one list of micro batches per data rank"
    assert len({len(row) for row in step.grid}) == 1, "data ranks get equally many micro batches"
    head = (
        STEP_MAGIC,
        STEP_VERSION,
        step.run_id,
        step.step,
        step.model,
        step.dp_size,
        step.cp_size,
        step.layout,
    )
    body = BytesIO()  # grows in place, and gives its bytes away without a copy
    body.write(_array_header(len(head) + 1))
    for element in head:
        body.write(msgspec.msgpack.encode(element))
    body.write(_array_header(len(step.grid)))
    for row in step.grid:
        body.write(_array_header(len(row)))
        for batch in row:
            for piece in _pieces(encode_rows(batch, step.model)):
                body.write(piece)
    return body.getvalue()


def _pieces(rows: RowsWire) -> Iterator[bytes | memoryview]:
    """The row encoded, none of the pieces large: a call holds the interpreter until it ends."""
    if not rows.inline:  # inline rows are what makes one large
        yield msgspec.msgpack.encode(rows)
        return
    for piece in packed_pieces(rows, (RowsWire, InlineWire)):
        for at in range(0, len(piece), WRITTEN_BYTES):
            yield memoryview(piece)[at : at + WRITTEN_BYTES]


def _array_header(count: int) -> bytes:
    """The shortest MessagePack header of an array, as every encoder writes it."""
    assert count < 1 << 16, "no list of a step may be longer than 4096"
    return bytes((0x90 | count,)) if count < 16 else b"\xdc" + count.to_bytes(2, "big")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenStep:
    """A step of which all but the rows is checked; ``micro_batch`` checks one of them."""

    run_id: RunId
    step: int
    model: ModelShape | None
    dp_size: int
    cp_size: int
    layout: Layout
    rows: Sequence[Sequence[RowsWire]]

    @property
    def micro_batch_count(self) -> int:
        """Micro batches of each data rank."""
        return len(self.rows[0])

    def micro_batch(self, dp_rank: int, index: int) -> MicroBatch:
        """One micro batch, as views of the body. Raises MalformedStep."""
        element = f"grid[{dp_rank}][{index}]"
        rows = self.rows[dp_rank][index]
        batch = decode_rows(element, rows, self.model, is_chunk=False).micro_batch()
        _check_layout(element, batch, cp_size=self.cp_size, layout=self.layout)
        return batch


def open_step(body: bytes | bytearray | memoryview) -> OpenStep:
    """The step in ``body`` without its rows. Raises UnreadableStep or MalformedStep."""
    view = memoryview(body)
    if view.nbytes > STEP_BODY_BYTES_MAX:
        rule = f"holds {view.nbytes} bytes, at most {STEP_BODY_BYTES_MAX} are read"
        raise MalformedStep("body", rule)
    head = _decode("body", view, _StepHead)
    if head.magic != STEP_MAGIC:
        raise MalformedStep("magic", f"must be {STEP_MAGIC!r}")
    if head.version != STEP_VERSION:
        raise UnreadableStep(head.version, readable=STEP_VERSION)
    wire = _decode("body", view, _StepWire)
    _check_step(wire)
    return OpenStep(
        run_id=RunId(wire.run_id),
        step=wire.step,
        model=wire.model,
        dp_size=wire.dp_size,
        cp_size=wire.cp_size,
        layout=wire.layout,
        rows=wire.grid,
    )


def decode_step(body: bytes | bytearray | memoryview) -> Step:
    """The step in ``body``, fully checked. Raises UnreadableStep or MalformedStep."""
    step = open_step(body)
    return Step(
        run_id=step.run_id,
        step=step.step,
        model=step.model,
        dp_size=step.dp_size,
        cp_size=step.cp_size,
        layout=step.layout,
        grid=tuple(
            tuple(step.micro_batch(dp, index) for index in range(step.micro_batch_count))
            for dp in range(step.dp_size)
        ),
    )


def encode_chunks(
    batch: MicroBatch, model: ModelShape | None, *, cp_size: int, layout: Layout
) -> tuple[bytes, ...]:
    """The body frame of MICRO_BATCH for each CP rank of one micro batch, cut in one pass."""
    spans = encode_spans(batch.spans)
    return tuple(
        msgspec.msgpack.encode(encode_rows(chunk, model, spans=spans))
        for chunk in cut_chunks(batch, cp_size=cp_size, layout=layout)
    )


def encode_chunk(chunk: Chunk, model: ModelShape | None) -> bytes:
    """The body frame of MICRO_BATCH."""
    return msgspec.msgpack.encode(encode_rows(chunk, model))


def decode_chunk(body: bytes | bytearray | memoryview, model: ModelShape | None) -> Chunk:
    """The chunk in a body frame, fully checked against the step's model. Raises MalformedStep."""
    wire = _decode("chunk", memoryview(body), RowsWire)
    return decode_rows("chunk", wire, model, is_chunk=True).chunk()


def _decode(element: str, body: memoryview, kind: type[W]) -> W:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as exc:  # truncated, wrong types, too deep, not UTF-8
        raise MalformedStep(element, str(exc)) from exc
    except (UnicodeDecodeError, RecursionError) as exc:
        raise MalformedStep(element, str(exc)) from exc


def _check_step(wire: _StepWire) -> None:
    try:
        check_id("run_id", wire.run_id)
        if wire.model is not None:
            wire.model.check()
    except InvalidInput as exc:
        raise MalformedStep(exc.field, str(exc)) from exc
    for name, value, upper in (
        ("step", wire.step, STEP_MAX),
        ("dp_size", wire.dp_size, DP_SIZE_MAX),
        ("cp_size", wire.cp_size, CP_SIZE_MAX),
    ):
        if not 1 <= value <= upper:
            raise MalformedStep(name, f"is {value}, must lie in [1, {upper}]")
    counts = {len(row) for row in wire.grid}
    if len(wire.grid) != wire.dp_size or len(counts) != 1:
        raise MalformedStep("grid", f"must be {wire.dp_size} lists of equal length")
    if not 1 <= counts.pop() <= MICRO_BATCHES_MAX:
        raise MalformedStep("grid", f"must hold 1 to {MICRO_BATCHES_MAX} micro batches per rank")


def _check_layout(element: str, batch: MicroBatch, *, cp_size: int, layout: Layout) -> None:
    """A row must divide over the context-parallel ranks in the step's layout."""
    if layout == "contiguous":
        divides = len(batch) % cp_size == 0
    else:
        divides = all((span.stop - span.start) % (2 * cp_size) == 0 for span in batch.spans)
    if not divides:
        raise MalformedStep(element, f"does not divide over {cp_size} ranks in {layout} layout")
