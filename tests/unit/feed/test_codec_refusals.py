"""Each way in which a step body or a chunk can be wrong has its named place.

The cases edit the decoded MessagePack lists of a good body: the paths are those of
docs/feed-protocol.md, so that this table also holds the page to the code.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from sideband.batch.chunks import cut_chunk
from sideband.feed import codec
from sideband.feed.codec import decode_chunk, decode_step, encode_chunk, encode_step
from sideband.feed.errors import MalformedStep, UnreadableStep
from sideband.segments import Form
from sideband.testing.batches import NARROW_MODEL, WIDE_MODEL, make_sample
from tests.unit.feed.builders import make_step

Edit = Callable[[Any], Any]
Path = tuple[int | str, ...]

# Positions in the arrays of docs/feed-protocol.md.
GRID = 8
PIECES, TOKENS, LOSS, LOGPROBS, ADVANTAGES, TEMPERATURES, VERSIONS, SPANS, FORM, HANDLES, INLINE = (
    range(1, 12)
)
BATCH: Path = (GRID, 0, 0)


def edited(body: bytes, path: Path, edit: Edit) -> bytes:
    tree = msgspec.msgpack.decode(body)
    place = tree
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = edit(place[path[-1]])
    return msgspec.msgpack.encode(tree)


def u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def i32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def good_step(form: Form | None) -> bytes:
    samples = [
        make_sample(
            i, tokens=9 + i, prompt_tokens=3, form=form, breaks=(5,), with_weight_versions=True
        )
        for i in range(5)
    ]
    return encode_step(make_step(samples=samples, form=form))


def test_the_good_bodies_are_good() -> None:
    for form in ("handle", "inline", None):
        decode_step(good_step(form))


HEAD_CASES: list[tuple[Path, Edit, str]] = [
    ((0,), lambda _: "sideband.steps", "magic"),
    ((2,), lambda _: "run/a", "run_id"),
    ((2,), lambda _: "a" * 129, "run_id"),
    ((3,), lambda _: 0, "step"),
    ((3,), lambda _: 1 << 31, "step"),
    ((4, "top_k"), lambda _: 0, "top_k"),
    ((4, "layer_ids"), lambda _: [2, 1], "layer_ids"),
    ((4, "surprise"), lambda _: 1, "body"),
    ((5,), lambda _: 0, "dp_size"),
    ((5,), lambda _: 3, "grid"),
    ((6,), lambda _: 0, "cp_size"),
    ((6,), lambda _: 4, "grid[0][0]"),
    ((6,), lambda _: 1025, "cp_size"),
    ((7,), lambda _: "spiral", "body"),
    ((7,), lambda _: "zigzag", "grid[0][0]"),
    ((GRID,), lambda _: [], "grid"),
    ((GRID,), lambda grid: [[], []], "grid"),
    ((GRID, 0), lambda row: row * 2, "grid"),
    ((GRID, 0, 0), lambda rows: rows[:-1], "body"),
    ((GRID, 0, 0), lambda rows: [*rows, 1], "body"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "edit", "element"), HEAD_CASES)
def test_a_wrong_head_is_named(path: Path, edit: Edit, element: str) -> None:
    body = good_step("handle")
    if path == (4, "surprise"):
        tree = msgspec.msgpack.decode(body)
        tree[4]["surprise"] = 1
        body = msgspec.msgpack.encode(tree)
    else:
        body = edited(body, path, edit)
    with pytest.raises(MalformedStep) as caught:
        decode_step(body)
    assert caught.value.element == element, str(caught.value)


def test_another_version_is_refused_before_the_rest_is_read() -> None:
    with pytest.raises(UnreadableStep) as caught:
        decode_step(msgspec.msgpack.encode(["sideband.step", 2, "whatever", {}]))
    assert (caught.value.version, caught.value.readable) == (2, 1)


def test_a_body_over_the_limit_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "STEP_BODY_BYTES_MAX", 100)
    with pytest.raises(MalformedStep, match="at most 100 are read"):
        decode_step(good_step("handle"))


ROW_CASES: list[tuple[Path, Edit, str]] = [
    ((0,), lambda _: 0, "row_tokens"),
    ((0,), lambda _: (1 << 24) + 1, "row_tokens"),
    ((PIECES,), lambda _: u32(0, 4, 0), "pieces"),
    ((TOKENS,), lambda data: data[:-4], "token_ids"),
    ((TOKENS,), lambda data: data[:-1], "token_ids"),
    ((TOKENS,), lambda data: i32(-1) + data[4:], "token_ids"),
    ((LOSS,), lambda data: data + b"\0", "loss_mask"),
    ((LOGPROBS,), lambda data: data + b"\0\0\0\0", "logprobs"),
    ((ADVANTAGES, 1), lambda _: u32(1), "advantages.values"),
    ((ADVANTAGES,), lambda _: [b"\0" * 4, u32(1)], "advantages.lengths"),
    ((ADVANTAGES,), lambda _: [b"\0" * 8, u32(1 << 31, 1 << 31)], "advantages.lengths"),
    ((ADVANTAGES,), lambda runs: [runs[0] + b"\0" * 4, runs[1] + u32(0)], "advantages.lengths"),
    ((TEMPERATURES, 0), lambda data: data + b"\0" * 4, "temperatures.values"),
    ((VERSIONS, 1), lambda data: data + b"\0", "weight_versions.lengths"),
    ((SPANS, 0), lambda data: u32(0) + data[4:], "spans.sizes"),
    ((SPANS, 0), lambda data: data[:-4], "spans.sizes"),
    ((SPANS, 0), lambda data: u32((1 << 32) - 1) + data[4:], "spans.sizes"),
    ((SPANS, 1), lambda data: u32(1 << 20) + data[4:], "spans.lengths"),
    ((SPANS, 1), lambda data: u32(0) + data[4:], "spans.sample_ids[0]"),
    ((SPANS, 2), lambda data: data[:-4], "spans.policy_versions"),
    ((SPANS, 3), lambda data: u32(99) + data[4:], "spans.env_indices"),
    ((SPANS, 4), lambda names: ["ü" * 129, *names[1:]], "spans.env_names"),
    ((SPANS, 5, 0), lambda _: "..", "spans.sample_ids[0]"),
    ((SPANS, 5, 0), lambda _: None, "spans.sample_ids[0]"),
    ((SPANS, 5), lambda ids: ids[:-1], "spans.sizes"),
    ((FORM,), lambda _: 3, "form"),
    ((FORM,), lambda _: -1, "form"),
    ((FORM,), lambda _: 0, "handles"),
    ((HANDLES,), lambda _: None, "handles"),
    ((HANDLES, 0), lambda files: files[:0], "handles.table"),
    ((HANDLES, 1), lambda kinds: kinds[:0], "handles.table"),
    ((HANDLES, 0, 0), lambda _: "v0/run/../x.sbp", "handles.table[0]"),
    ((HANDLES, 0, 0), lambda _: "/etc/passwd", "handles.table[0]"),
    ((HANDLES, 1, 0, 1), lambda _: "uint8", "handles.kinds"),
    ((HANDLES, 1, 0, 2), lambda _: [3, 9], "handles.kinds"),
    ((HANDLES, 2), lambda data: data[:-1], "handles.table"),
    ((HANDLES, 2), lambda data: data[:22] + u32(0) + data[26:], "handles.table[0]"),
    ((HANDLES, 2), lambda data: data[:6] + b"\xff" * 8 + data[14:], "handles.table[0]"),
    ((HANDLES, 2), lambda data: data + data[:26], "segments"),
    ((HANDLES, 2), lambda data: data[:18] + u32(31) + data[22:], "segments"),
    ((INLINE,), lambda _: [["routed_experts", 0, "uint16", [3, 2], b"", b""]], "inline"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "edit", "element"), ROW_CASES)
def test_a_wrong_row_is_named(path: Path, edit: Edit, element: str) -> None:
    with pytest.raises(MalformedStep) as caught:
        decode_step(edited(good_step("handle"), (*BATCH, *path), edit))
    assert caught.value.element == f"grid[0][0].{element}", str(caught.value)


def routing_index(body: bytes) -> int:
    inline = msgspec.msgpack.decode(body)[GRID][0][0][INLINE]
    return next(i for i, part in enumerate(inline) if part[0] == "routed_experts")


def mask_index(body: bytes) -> int:
    inline = msgspec.msgpack.decode(body)[GRID][0][0][INLINE]
    return next(
        i for i, part in enumerate(inline) if part[0] == "sampling_mask" and len(part[5]) >= 12
    )


ROUTING_CASES: list[tuple[int, Edit, str]] = [
    (1, lambda _: -1, "pos"),
    (1, lambda _: 1 << 24, "pos"),
    (2, lambda _: "uint8", ""),
    (2, lambda _: "int32", ""),
    (3, lambda _: [3, 3], ""),
    (3, lambda _: [1 << 40, 1 << 40], ""),
    (4, lambda data: data[:-1], "data"),
    (4, lambda _: b"", "data"),
    (4, lambda data: b"\xff\xff" + data[2:], "data"),
    (5, lambda _: i32(1), "ids"),
]


@pytest.mark.parametrize(("part", "edit", "element"), ROUTING_CASES)
def test_wrong_inline_routing_is_named(part: int, edit: Edit, element: str) -> None:
    body = good_step("inline")
    index = routing_index(body)
    with pytest.raises(MalformedStep) as caught:
        decode_step(edited(body, (*BATCH, INLINE, index, part), edit))
    place = f"grid[0][0].inline[{index}]"
    assert caught.value.element == (f"{place}.{element}" if element else place)


MASK_CASES: list[tuple[int, Edit, str]] = [
    (2, lambda _: "uint16", ""),
    (3, lambda _: [9], ""),
    (4, lambda _: b"", "data"),
    (4, lambda data: u32((1 << 32) - 1) + data[4:], "ids"),
    (5, lambda data: data[:-4], "ids"),
    (5, lambda data: i32(-5) + data[4:], "ids"),
    (5, lambda data: i32(5003) + data[4:], "ids"),
]


@pytest.mark.parametrize(("part", "edit", "element"), MASK_CASES)
def test_wrong_inline_masks_are_named(part: int, edit: Edit, element: str) -> None:
    body = good_step("inline")
    index = mask_index(body)
    with pytest.raises(MalformedStep) as caught:
        decode_step(edited(body, (*BATCH, INLINE, index, part), edit))
    place = f"grid[0][0].inline[{index}]"
    assert caught.value.element == (f"{place}.{element}" if element else place)


def test_kept_ids_out_of_order_within_a_row_are_named() -> None:
    part = ["sampling_mask", 3, "int32", [5003], u32(0, 2, 0, 1), i32(7, 7, 2)]
    body = edited(good_step("inline"), (*BATCH, INLINE), lambda _: [part])
    with pytest.raises(MalformedStep, match="must ascend, each once"):
        decode_step(body)
    part[5] = i32(6, 7, 2)  # a new row may begin lower
    decode_step(edited(good_step("inline"), (*BATCH, INLINE), lambda _: [part]))


def test_segments_need_a_model() -> None:
    for form in ("handle", "inline"):
        with pytest.raises(MalformedStep, match="a step without a model has no segments"):
            decode_step(edited(good_step(form), (4,), lambda _: None))


def test_a_segment_of_another_model_is_refused() -> None:
    other = msgspec.to_builtins(NARROW_MODEL)
    with pytest.raises(MalformedStep, match="the model has"):
        decode_step(edited(good_step("handle"), (4,), lambda _: other))


def test_spare_bits_of_the_loss_mask_are_zero() -> None:
    samples = [make_sample(0, tokens=9, form=None)]
    step = make_step(samples=samples, form=None, model=None, dp_size=1, cp_size=1, seq_len=9)
    body = encode_step(step)
    decode_step(body)
    with pytest.raises(MalformedStep, match="spare bits"):
        decode_step(edited(body, (*BATCH, LOSS), lambda data: data[:-1] + b"\x80"))


def good_chunk() -> bytes:
    batch = make_step(cp_size=2).grid[0][0]
    return encode_chunk(cut_chunk(batch, cp_rank=0, cp_size=2, layout="contiguous"), WIDE_MODEL)


CHUNK_CASES: list[tuple[Path, Edit, str]] = [
    ((PIECES,), lambda _: None, "pieces"),
    ((PIECES,), lambda _: b"", "pieces"),
    ((PIECES,), lambda data: data[:-4], "pieces"),
    ((PIECES,), lambda _: u32(5, 5, 0), "pieces"),
    ((PIECES,), lambda _: u32(4, 8, 0, 0, 2, 0), "pieces"),
    ((PIECES,), lambda _: u32(0, 99, 0), "pieces"),
    ((PIECES,), lambda _: u32(0, 16, 2), "pieces"),
    ((PIECES,), lambda _: u32(0, 32, 1), "pieces"),
    ((PIECES,), lambda _: u32(0, 4, 1, 4, 8, 0), "pieces"),
    ((PIECES,), lambda _: u32(20, 30, 0), "token_ids"),
    ((TOKENS,), lambda data: data[:-4], "token_ids"),
    ((PIECES,), lambda data: u32(1, 16) + data[8:], "segments"),
]


@pytest.mark.parametrize(("path", "edit", "element"), CHUNK_CASES)
def test_a_wrong_chunk_is_named(path: Path, edit: Edit, element: str) -> None:
    decode_chunk(good_chunk(), WIDE_MODEL)
    with pytest.raises(MalformedStep) as caught:
        decode_chunk(edited(good_chunk(), path, edit), WIDE_MODEL)
    assert caught.value.element == f"chunk.{element}", str(caught.value)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x91" * 5000, b"\x9c", b"\xdd\xff\xff\xff\xff"])
def test_bytes_that_are_no_messagepack_are_named(body: bytes) -> None:
    with pytest.raises(MalformedStep) as caught:
        decode_step(body)
    assert caught.value.element == "body"
    with pytest.raises(MalformedStep) as caught:
        decode_chunk(body, WIDE_MODEL)
    assert caught.value.element == "chunk"
