"""What a reader refuses when rows are asked for, and what the operating system does to it."""

import errno
import os
import struct
from typing import Any

import numpy as np
import pytest

from sideband.errors import InvalidInput
from sideband.payload import PayloadReader, PayloadRoot, encodings, errors
from sideband.payload.columns import RowArray
from tests.unit.masks.ways import ARRAYS, taking
from tests.unit.payload.forge import (
    FILE,
    MASKS,
    ROUTING,
    Forgery,
    both,
    entry,
    mask_segment,
    put,
    read_masks,
    refused,
    routing_segment,
    section,
)
from tests.unit.payload.support import (
    RUN,
    WIDE,
    all_files,
    of_field,
    one_choice,
    read_routing,
    write,
)

SEGMENTS: list[tuple[dict[str, Any], type[errors.PayloadError], str]] = [
    ({"offset": 0}, errors.SegmentMismatch, "offset"),
    ({"offset": 2113}, errors.SegmentMismatch, "offset"),
    ({"offset": 2176}, errors.SegmentMismatch, "field"),  # the masks' section
    ({"offset": 1 << 50}, errors.SegmentMismatch, "offset"),
    ({"dtype": "uint8"}, errors.SegmentMismatch, "dtype"),
    ({"shape": (2, 3)}, errors.SegmentMismatch, "shape"),
    ({"shape": (4,)}, errors.SegmentMismatch, "shape"),
    ({"rows": 3}, errors.SegmentMismatch, "rows"),  # across the gap
    ({"row": 1}, errors.SegmentMismatch, "rows"),
    ({"row": -1, "rows": 1}, errors.SegmentMismatch, "rows"),
    ({"rows": 0}, errors.SegmentMismatch, "rows"),
    ({"row": 3, "rows": 0}, errors.SegmentMismatch, "rows"),
    ({"row": 2}, errors.SegmentBeyondSection, ""),
    ({"row": 3, "rows": 1}, errors.SegmentBeyondSection, ""),
    ({"rows": 4}, errors.SegmentBeyondSection, ""),
    ({"row": 1 << 70, "rows": 1}, errors.SegmentBeyondSection, ""),
]


@pytest.mark.parametrize(("facts", "error", "part"), SEGMENTS)
def test_a_segment_that_asks_for_what_the_file_has_not(
    root: PayloadRoot,
    reader: PayloadReader,
    facts: dict[str, Any],
    error: type[errors.PayloadError],
    part: str,
) -> None:
    Forgery().put(root)
    with pytest.raises(error) as caught:
        read_routing(reader, routing_segment(**facts))
    assert getattr(caught.value, "part", "") == part
    assert caught.value.file == FILE


def test_masks_are_not_read_as_routing_nor_routing_as_masks(
    root: PayloadRoot, reader: PayloadReader
) -> None:
    Forgery().put(root)
    with pytest.raises(errors.SegmentMismatch):
        read_masks(reader, routing_segment())
    with pytest.raises(errors.SegmentMismatch):
        read_routing(reader, mask_segment())


def test_kept_sets_of_other_tokens_never_pass(root: PayloadRoot, reader: PayloadReader) -> None:
    """A segment that names rows next to its own: each of them is intact."""
    Forgery().put(root)
    whole = np.array([7, 1, 5], np.int32)  # 7 is in the first set too, and the second is empty
    assert len(reader.read_masks(mask_segment(), whole)) == 3
    with pytest.raises(errors.SampledTokenMismatch) as caught:
        reader.read_masks(mask_segment(row=2, rows=1), np.array([999], np.int32))
    error = caught.value
    assert (error.row, error.token_id, error.is_retryable) == (0, 999, False)
    with pytest.raises(errors.SampledTokenMismatch) as caught:
        reader.read_masks(mask_segment(), np.array([999, 3, 6], np.int32))
    assert caught.value.row == 2


@pytest.mark.parametrize("name", encodings.MASK_ENCODINGS)
def test_a_kept_set_next_to_its_own_never_passes_in_any_encoding(
    root: PayloadRoot, reader: PayloadReader, name: str
) -> None:
    choice = one_choice()
    assert choice.masks is not None
    report = write(root, choice, encodings=encodings.Encodings(masks=name))
    segment = of_field(report.segments[0], "sampling_mask")[0]
    sampled_N = choice.masks.sampled_token_ids_N
    assert reader.read_masks(segment, sampled_N[: segment.rows]).ids_M.size
    with pytest.raises(errors.SampledTokenMismatch):
        reader.read_masks(segment.narrowed(segment.pos + 1, segment.pos + 2), sampled_N[:1])


def test_a_writer_uses_no_encoding_that_it_does_not_know(root: PayloadRoot) -> None:
    with pytest.raises(InvalidInput, match=r"encodings\.masks"):
        write(root, one_choice(), encodings=encodings.Encodings(masks="raw"))
    assert all_files(root) == set()


def test_an_unknown_encoding_is_refused_only_where_it_is_read(
    root: PayloadRoot, reader: PayloadReader
) -> None:
    Forgery(change=section(0, encoding="delta")).put(root)
    with pytest.raises(errors.UnsupportedEncoding) as caught:
        read_routing(reader, routing_segment())
    assert caught.value.encoding == "delta"
    assert len(read_masks(reader, mask_segment())) == 3
    Forgery(change=section(1, encoding="raw")).put(root)
    reader.forget(FILE)
    with pytest.raises(errors.UnsupportedEncoding):
        read_masks(reader, mask_segment())
    assert read_routing(reader, routing_segment()).tobytes() == ROUTING[:16]


@pytest.mark.parametrize("dtype", ["float32", "float99", "🦆"])
def test_a_field_of_a_later_writer_does_not_hide_the_others(
    root: PayloadRoot, reader: PayloadReader, dtype: str
) -> None:
    later = {"field": "hidden_states", "encoding": "raw", "dtype": dtype}
    shape = [1 << 31] * 9
    Forgery(change=section(1, **later, shape=shape, layer_ids=[9])).put(root)
    assert read_routing(reader, routing_segment()).tobytes() == ROUTING[:16]
    with pytest.raises(errors.SegmentMismatch):
        read_masks(reader, mask_segment())


def test_a_wrong_block_checksum_names_the_block(root: PayloadRoot, reader: PayloadReader) -> None:
    data = bytearray(Forgery().file_bytes())
    data[2112 + 20] ^= 0x40  # in the second routing block
    put(root, bytes(data))
    assert read_routing(reader, routing_segment()).tobytes() == ROUTING[:16]
    with pytest.raises(errors.ChecksumMismatch) as caught:
        read_routing(reader, routing_segment(row=2, rows=1))
    assert (caught.value.block, caught.value.offset) == (1, 2112 + 16)
    assert not caught.value.is_retryable


@pytest.mark.parametrize(
    "stored",
    [
        struct.pack("<4II", 0, 2, 1, 3, 0),  # starts run backwards
        struct.pack("<4II", 0, 2, 2, 3, 7 | 1000 << 10 | 5 << 20),  # outside the vocabulary
        struct.pack("<4II", 0, 2, 2, 3, 999 | 7 << 10 | 5 << 20),  # not ascending
        struct.pack("<4II", 0, 2, 2, 1 << 31, 0),
        MASKS[:16] + MASKS[16:] * 5,
    ],
)
def test_a_block_that_breaks_its_encoding_though_its_checksum_is_right(
    root: PayloadRoot, reader: PayloadReader, stored: bytes
) -> None:
    routing = Forgery().blocks[0]
    Forgery(blocks=[routing, [(3, stored)]]).put(root)
    with pytest.raises(errors.BlockMalformed) as caught:
        read_masks(reader, mask_segment())
    assert caught.value.block == 0
    assert read_routing(reader, routing_segment()).tobytes() == ROUTING[:16]


def test_more_rows_than_a_block_has_starts_for(root: PayloadRoot, reader: PayloadReader) -> None:
    lie = both(section(1, rows=4, runs=[[4, 0, 4]]), entry(2, 2, 4))
    Forgery(change=lie).put(root)
    with pytest.raises(errors.BlockMalformed):
        read_masks(reader, mask_segment(rows=4))


@pytest.mark.parametrize(
    ("number", "error", "retryable"),
    [
        (errno.ENOENT, errors.PayloadNotFound, True),
        (errno.ESTALE, errors.StalePayload, True),
        (errno.EIO, errors.ReadFailed, False),
        (errno.EACCES, errors.ReadFailed, False),
        (errno.EMFILE, errors.NoDescriptorFree, True),
        (errno.ENFILE, errors.NoDescriptorFree, True),
    ],
)
@pytest.mark.parametrize("call", ["open", "fstat", "pread", "preadv"])
def test_errors_of_the_operating_system_are_translated(
    root: PayloadRoot,
    reader: PayloadReader,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    number: int,
    error: type[errors.PayloadError],
    retryable: bool,
) -> None:
    Forgery().put(root)

    def fail(*args: object, **kwargs: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch, taking(ARRAYS):
        patch.setattr(os, call, fail)
        with pytest.raises(errors.PayloadError) as caught:
            read_routing(reader, routing_segment())
    assert type(caught.value) is error
    assert caught.value.is_retryable is retryable
    assert caught.value.file == FILE
    assert getattr(caught.value, "errno", number) == number
    reader.forget(FILE)
    assert read_routing(reader, routing_segment()).tobytes() == ROUTING[:16]


def test_short_reads_are_read_on(
    root: PayloadRoot, reader: PayloadReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    Forgery().put(root)
    whole = os.preadv

    def one_byte(fd: int, buffers: list[memoryview], offset: int) -> int:
        return whole(fd, [buffers[0][:1]], offset)

    first = os.pread
    monkeypatch.setattr(os, "preadv", one_byte)
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: first(fd, min(size, 40), offset))
    with taking(ARRAYS):
        assert read_routing(reader, routing_segment()).tobytes() == ROUTING[:16]
        assert read_masks(reader, mask_segment()).ids_M.tolist() == [7, 999, 5]


def test_a_file_that_shrinks_under_an_open_reader_is_truncated(
    root: PayloadRoot, reader: PayloadReader
) -> None:
    Forgery().put(root)
    reader.header(FILE)
    os.truncate(root.path / FILE, 2112 + 10)
    with pytest.raises(errors.PayloadTruncated) as caught:
        read_routing(reader, routing_segment())
    assert (caught.value.expected_bytes, caught.value.actual_bytes) == (2128, 2122)


def test_a_torn_file_heals_when_its_rest_arrives(root: PayloadRoot, reader: PayloadReader) -> None:
    data = Forgery().file_bytes()
    put(root, data[:-1])
    refused(reader, errors.PayloadTruncated)
    put(root, data)
    assert read_masks(reader, mask_segment()).ids_M.tolist() == [7, 999, 5]


def test_a_file_that_is_not_there(root: PayloadRoot, reader: PayloadReader) -> None:
    assert refused(reader, errors.PayloadNotFound).is_retryable
    (root.path / "v3" / RUN).mkdir(parents=True)
    refused(reader, errors.PayloadNotFound)
    Forgery().put(root)
    reader.header(FILE)


def test_nothing_is_written_beside_the_rows_that_were_asked_for(
    root: PayloadRoot, reader: PayloadReader
) -> None:
    Forgery().put(root)
    out = np.full((4, 2, 2), 77, np.uint16)
    reader.read_routing(routing_segment(), out[1:3])
    assert out[0].tolist() == out[3].tolist() == [[77, 77], [77, 77]]


INVERTED = encodings.RoutingEncoding(
    name="inverted",
    is_raw=False,
    parts_of=lambda rows, model: [np.invert(rows)],
    decode_rows=lambda stored, rows, *, first, out_NLK, model: _invert_into(
        stored, rows, first, out_NLK
    ),
    block_bytes=encodings.RAW.block_bytes,
    rows_within=encodings.RAW.rows_within,
)


def _invert_into(stored: memoryview, rows: int, first: int, out: RowArray) -> None:
    if len(stored) * len(out) != rows * out.nbytes:
        raise ValueError("another number of rows")
    given = np.frombuffer(stored, out.dtype).reshape(rows, *out.shape[1:])
    np.invert(given[first : first + len(out)], out=out)


def test_an_encoding_is_added_by_an_entry_in_the_registry(
    root: PayloadRoot, reader: PayloadReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = {"inverted": INVERTED, "raw": encodings.RAW}
    monkeypatch.setattr("sideband.payload.rows.ROUTING_ENCODINGS", registry)
    rows = np.frombuffer(ROUTING, np.uint16).reshape(3, 2, 2)
    blocks = [(2, np.invert(rows[:2]).tobytes()), (1, bytes(ROUTING[:8]))]
    masks = Forgery().blocks[1]
    change = section(0, encoding="inverted")
    Forgery(blocks=[blocks, masks], change=change).put(root)
    assert read_routing(reader, routing_segment()).tobytes() == ROUTING[:16]
    for row in (0, 1):
        one = routing_segment(row=row, rows=1, pos=2 + row)
        assert read_routing(reader, one).tobytes() == rows[row].tobytes()
    Forgery(blocks=[[(2, b"x"), (1, b"y")], masks], change=change).put(root)
    reader.forget(FILE)
    with pytest.raises(errors.BlockMalformed, match="another number of rows"):
        read_routing(reader, routing_segment(offset=2112))


@pytest.mark.parametrize("name", encodings.ROUTING_ENCODINGS)
def test_blocks_of_every_routing_encoding_decode_alike(name: str) -> None:
    encoding = encodings.ROUTING_ENCODINGS[name]
    rows = np.frombuffer(ROUTING, np.uint16).reshape(3, 2, 2)
    stored = b"".join(bytes(part) for part in encoding.encode_block(rows, WIDE))
    assert len(stored) == encoding.block_bytes(3, WIDE)
    for first in range(3):
        out = np.zeros((3 - first, 2, 2), np.uint16)
        encoding.decode_rows(memoryview(stored), 3, first=first, out_NLK=out, model=WIDE)
        assert np.array_equal(out, rows[first:])
