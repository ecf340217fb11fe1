"""Packed routing ids against the page's sentences, at every width and row range."""

from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.model import ModelShape
from sideband.payload import PayloadReader, PayloadRoot, errors
from sideband.payload.columns import RowArray
from sideband.payload.encodings import PACKED, RAW, Encodings
from sideband.testing.payloads import random_choice
from tests.unit.payload.forge import FILE, ROUTING, Forgery, routing_segment, section
from tests.unit.payload.support import NARROW, of_field, one_choice, read_routing, write

WIDTHS = range(9, 17)
EDGES = [size for bits in WIDTHS for size in ((1 << bits - 1) + 1, 1 << bits)]


def model_of(id_space: int, *, layers: int = 2, top_k: int = 3) -> ModelShape:
    return ModelShape(
        num_layers=layers,
        layer_ids=tuple(range(layers)),
        top_k=top_k,
        id_space=id_space,
        vocab_size=1000,
    )


def by_hand(ids: list[int], id_space: int) -> bytes:
    """Low bytes, then a plane for each bit above them, bit 0 of a plane in its first byte."""
    stored = bytes(value & 255 for value in ids)
    for bit in range(8, (id_space - 1).bit_length()):
        plane = sum((value >> bit & 1) << place for place, value in enumerate(ids))
        stored += plane.to_bytes(-(-len(ids) // 8), "little")
    return stored


def encoded(rows: RowArray, model: ModelShape) -> bytes:
    return b"".join(bytes(part) for part in PACKED.encode_block(rows, model))


def decoded(stored: bytes, rows: int, first: int, last: int, model: ModelShape) -> RowArray:
    out = np.full((last - first, *model.row_shape), 77, model.row_dtype)
    PACKED.decode_rows(memoryview(stored), rows, first=first, out_NLK=out, model=model)
    return out


@pytest.mark.parametrize("id_space", [2, 255, 256, *EDGES])
@given(data=st.data())
def test_any_rows_of_every_width_come_back(id_space: int, data: st.DataObject) -> None:
    layers, top_k = data.draw(st.integers(1, 3)), data.draw(st.integers(1, min(3, id_space)))
    model = model_of(id_space, layers=layers, top_k=top_k)
    count = data.draw(st.integers(1, 12))
    ids = data.draw(
        st.lists(
            st.integers(0, id_space - 1),
            min_size=count * layers * top_k,
            max_size=count * layers * top_k,
        )
    )
    rows = cast("RowArray", np.array(ids, model.row_dtype)).reshape(count, layers, top_k)
    stored = encoded(rows, model)
    assert stored == by_hand(ids, id_space)
    assert len(stored) == PACKED.block_bytes(count, model)
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first + 1, count))
    assert np.array_equal(decoded(stored, count, first, last, model), rows[first:last])


def test_rows_in_any_memory_order_are_packed_alike() -> None:
    model = model_of(512)
    rows: RowArray = np.arange(0, 480, 8, dtype=np.uint16).reshape(10, 2, 3)
    for turned in (np.asfortranarray(rows), np.repeat(rows, 2, axis=0)[::2]):
        assert encoded(cast("RowArray", turned), model) == encoded(rows, model)


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (by_hand([1] * 11, 300), "13 bytes for 12 ids"),
        (by_hand([1] * 12, 300) + b"\0", "15 bytes for 12 ids"),
        (by_hand([1] * 12, 300)[:-1] + b"\x10", "spare bits"),
        (by_hand([*[1] * 11, 300], 300), "an id of 300 in an id space of 300"),
        (by_hand([511, *[1] * 11], 300), "an id of 511"),
    ],
)
def test_what_no_writer_makes_is_refused(stored: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decoded(stored, 2, 0, 2, model_of(300))


@given(stored=st.binary(min_size=12, max_size=16), id_space=st.sampled_from([257, 300, 512, 700]))
def test_any_bytes_are_rows_or_refused(stored: bytes, id_space: int) -> None:
    model = model_of(id_space)
    try:
        rows = decoded(stored, 2, 0, 2, model)
    except ValueError:
        return
    assert rows.max() < id_space
    assert encoded(rows, model) == stored


def test_a_file_of_packed_rows_reads_back_and_is_smaller(
    root: PayloadRoot, reader: PayloadReader
) -> None:
    """At 512 ids nine bits of sixteen."""
    model = model_of(512, layers=40, top_k=22)
    choice = random_choice(
        np.random.default_rng(0), model, prompt_tokens=500, completion_tokens=1, gaps=(7, 300)
    )
    assert choice.routing is not None
    sizes = {}
    for name in ("raw", "packed"):
        report = write(root, choice, model=model, encodings=Encodings(routing=name))
        header = reader.header(report.file or "")
        assert header.sections[0].encoding == name
        sizes[name] = header.sections[0].size_bytes
        for segment in of_field(report.segments[0], "routed_experts"):
            for part in (segment, segment.narrowed(segment.pos + 1, segment.stop - 1)):
                expected = choice.routing.rows_NLK[part.pos : part.stop]
                assert np.array_equal(read_routing(reader, part), expected)
    assert sizes["packed"] / sizes["raw"] == pytest.approx(9 / 16, abs=1e-4)


def test_ids_of_one_byte_stay_raw(root: PayloadRoot, reader: PayloadReader) -> None:
    report = write(
        root, one_choice(model=NARROW), model=NARROW, encodings=Encodings(routing="packed")
    )
    assert reader.header(report.file or "").sections[0].encoding == RAW.name


def test_damage_under_right_checksums_is_named(root: PayloadRoot, reader: PayloadReader) -> None:
    """300 ids need nine bits, which hold 512."""
    ids = np.frombuffer(ROUTING, np.uint16).tolist()
    blocks = [(2, by_hand(ids[:8], 300)), (1, by_hand(ids[8:], 300))]
    masks, packed = Forgery().blocks[1], section(0, encoding="packed")
    segment = routing_segment()
    Forgery(blocks=[blocks, masks], change=packed).put(root)
    assert read_routing(reader, segment).tobytes() == ROUTING[:16]
    reader.forget(FILE)
    blocks[0] = (2, by_hand([*ids[:7], 511], 300))
    Forgery(blocks=[blocks, masks], change=packed).put(root)
    assert read_routing(reader, segment.narrowed(2, 3)).tobytes() == ROUTING[:8]
    with pytest.raises(errors.BlockMalformed, match="an id of 511"):
        read_routing(reader, segment)
    reader.forget(FILE)
    Forgery(blocks=[[(2, blocks[0][1][:-1]), blocks[1]], masks], change=packed).put(root)
    with pytest.raises(errors.SectionsMisplaced, match="is not its rows"):
        reader.header(FILE)
