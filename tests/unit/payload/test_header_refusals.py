"""What a reader refuses before it reads a row, caused by forged files with right checksums."""

import tracemalloc

import pytest

from sideband.ids import RunId
from sideband.model import ModelShape
from sideband.payload import PayloadReader, PayloadRoot, errors
from sideband.payload.layout import BLOCK_BYTES_MAX, BLOCKS_MAX, HEADER_BYTES_MAX
from tests.unit.payload.forge import (
    FILE,
    ROUTING,
    Change,
    Forgery,
    Header,
    Index,
    both,
    dropped,
    entry,
    mask_segment,
    model,
    put,
    read_masks,
    refused,
    routing_segment,
    section,
    top,
)
from tests.unit.payload.support import WIDE, read_routing


def test_the_forgery_itself_is_a_right_file(root: PayloadRoot, reader: PayloadReader) -> None:
    Forgery().put(root)
    assert reader.header(FILE).model == WIDE
    assert read_routing(reader, routing_segment()).tobytes() == ROUTING[:16]
    last = routing_segment(row=2, rows=1, pos=5)
    assert read_routing(reader, last).tobytes() == ROUTING[16:]
    assert read_masks(reader, mask_segment()).ids_M.tolist() == [7, 999, 5]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 31])
def test_fewer_bytes_than_the_prefix(root: PayloadRoot, reader: PayloadReader, size: int) -> None:
    put(root, Forgery().file_bytes()[:size])
    error = refused(reader, errors.PayloadTruncated)
    assert (error.expected_bytes, error.actual_bytes) == (32, size)


@pytest.mark.parametrize("size", [32, 500, 2031, 2032, 2103, 2104, 2195])
def test_fewer_bytes_than_the_file_says(
    root: PayloadRoot, reader: PayloadReader, size: int
) -> None:
    data = Forgery().file_bytes()
    assert size < len(data)
    put(root, data[:size])
    error = refused(reader, errors.PayloadTruncated)
    assert (error.expected_bytes, error.actual_bytes) == (len(data), size)
    assert error.is_retryable


@pytest.mark.parametrize("data", [b"PK\x03\x04", b"SIDEBAN!" + bytes(100), bytes(64)])
def test_another_magic(root: PayloadRoot, reader: PayloadReader, data: bytes) -> None:
    put(root, data)
    assert refused(reader, errors.NotAPayload).magic == data[:8]


@pytest.mark.parametrize("version", [0, 2, 65535])
def test_another_version(root: PayloadRoot, reader: PayloadReader, version: int) -> None:
    Forgery(prefix={"version": version}).put(root)
    assert refused(reader, errors.UnreadableVersion).version == version


@pytest.mark.parametrize("flags", [1, 0x8000])
def test_a_flag(root: PayloadRoot, reader: PayloadReader, flags: int) -> None:
    Forgery(prefix={"flags": flags}).put(root)
    assert refused(reader, errors.UnknownFlags).flags == flags


@pytest.mark.parametrize("header_bytes", [HEADER_BYTES_MAX + 1, (1 << 32) - 1])
def test_a_header_over_its_limit_is_refused_before_it_is_allocated(
    root: PayloadRoot, reader: PayloadReader, header_bytes: int
) -> None:
    Forgery(prefix={"header_bytes": header_bytes}).put(root)
    error = refused(reader, errors.HeaderTooLarge)
    assert (error.actual, error.limit) == (header_bytes, HEADER_BYTES_MAX)


def test_a_header_larger_than_its_file(root: PayloadRoot, reader: PayloadReader) -> None:
    Forgery(prefix={"header_bytes": HEADER_BYTES_MAX}).put(root)
    refused(reader, errors.HeaderCorrupt)


@pytest.mark.parametrize("tail", [b"\0", b"more" * 1000])
def test_more_bytes_than_the_file_says(
    root: PayloadRoot, reader: PayloadReader, tail: bytes
) -> None:
    data = Forgery().file_bytes()
    put(root, data + tail)
    error = refused(reader, errors.TrailingBytes)
    assert (error.expected_bytes, error.actual_bytes) == (len(data), len(data) + len(tail))


def test_a_file_of_any_stated_size_is_compared_with_the_real_one(
    root: PayloadRoot, reader: PayloadReader
) -> None:
    Forgery(prefix={"file_bytes": (1 << 64) - 1}).put(root)
    assert refused(reader, errors.PayloadTruncated).expected_bytes == (1 << 64) - 1


def test_a_wrong_header_checksum(root: PayloadRoot, reader: PayloadReader) -> None:
    data = bytearray(Forgery().file_bytes())
    data[24] ^= 1
    put(root, bytes(data))
    assert refused(reader, errors.HeaderCorrupt).reason == "wrong checksum"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b"\xff\xfe",
        b'{"run_id":"\xff"}',
        b"[" * 1900,
        b'{"run_id":' + b"[" * 1900,
        b'{"policy_version":' + b"1" * 1900 + b"}",
        b'{"policy_version":NaN}',
        b'{"policy_version":1e999}',
    ],
)
def test_a_header_that_is_not_ours(root: PayloadRoot, reader: PayloadReader, text: bytes) -> None:
    Forgery(header_text=text).put(root)
    refused(reader, errors.HeaderCorrupt)


@pytest.mark.parametrize(
    "change",
    [
        top(extra=1),
        top(run_id=7),
        top(policy_version=-1),
        top(policy_version="3"),
        top(policy_version=3.5),
        both(top(sections=[]), lambda header, index: index.clear()),
        top(sections=None),
        model(extra=1),
        model(layer_ids=[]),
        model(layer_ids=[3, 1]),
        model(layer_ids=[1, 1]),
        model(layer_ids=[1, 4]),
        model(layer_ids=[-1, 3]),
        model(num_layers=0),
        model(num_layers=1 << 70),
        model(top_k=0),
        model(top_k=301),
        model(id_space=0),
        model(id_space=70_000),
        model(vocab_size=(1 << 24) + 1),
        model(id_space=200),  # then rows are uint8
        model(layer_ids=[1]),
        model(top_k=3),
        model(vocab_size=999),
        section(0, extra=1),
        dropped(0, "runs"),
        section(0, choice=-1),
        section(0, field=""),
        section(0, field="x" * 65),
        section(0, field="sampling_mask"),
        section(1, field="routed_experts"),
        section(0, encoding=""),
        section(0, dtype="uint8"),
        section(0, dtype="float99"),
        section(1, dtype="uint16"),
        section(0, shape=[4]),
        section(0, shape=[]),
        section(0, shape=[0, 2]),
        section(1, shape=[1001]),
        section(0, layer_ids=[0, 1]),
        section(0, layer_ids=[1]),
        section(1, layer_ids=[1, 3]),
        section(0, rows=0),
        section(0, rows=4),
        section(0, rows=1 << 40),
        section(0, runs=[]),
        section(0, runs=[[2, 0, 3], [5, 3, 0]]),
        section(0, runs=[[2, 0, 2], [5, 2, 2]]),
        section(0, runs=[[2, 0, 2], [4, 2, 1]]),  # they touch: one run
        section(0, runs=[[2, 0, 2], [3, 2, 1]]),  # two rows at position 3
        section(0, runs=[[5, 0, 2], [2, 2, 1]]),
        section(0, runs=[[2, 1, 3]]),
        section(0, runs=[[-1, 0, 3]]),
        section(0, runs=[[(1 << 31) - 2, 0, 3]]),
        section(0, runs=[[2, 0]]),
        section(0, block_count=0),
        section(0, block_count=-1),
        section(0, block_count=200),  # more than the file has bytes for
        section(0, offset=-1),
        section(0, offset=(1 << 48) + 1),
        section(0, size_bytes=1 << 60),
    ],
)
def test_a_header_that_breaks_a_rule(
    root: PayloadRoot, reader: PayloadReader, change: Change
) -> None:
    Forgery(change=change).put(root)
    assert refused(reader, errors.HeaderCorrupt).reason != "wrong checksum"


def test_two_sections_of_one_field_and_choice(root: PayloadRoot, reader: PayloadReader) -> None:
    def twice(header: Header, index: Index) -> None:
        header["sections"][1] = header["sections"][0] | {"block_count": 1}

    Forgery(change=twice).put(root)
    assert "two sections" in refused(reader, errors.HeaderCorrupt).reason


def test_an_index_over_its_limit_is_refused_before_it_is_allocated(
    root: PayloadRoot, reader: PayloadReader
) -> None:
    Forgery(change=section(0, block_count=BLOCKS_MAX)).put(root)
    assert refused(reader, errors.HeaderTooLarge).actual == BLOCKS_MAX + 1
    tracemalloc.start()
    refused(reader, errors.HeaderTooLarge)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


def other_run(header: Header, index: Index) -> None:
    header["run_id"] = "run-2"


def test_a_file_whose_header_names_another_run(root: PayloadRoot, reader: PayloadReader) -> None:
    Forgery(change=other_run).put(root)
    error = refused(reader, errors.OtherRunPayload)
    assert (error.found, error.expected) == ("run-2", "run-1")


def test_a_path_of_another_run(root: PayloadRoot, reader: PayloadReader) -> None:
    file = FILE.replace("run-1", "run-2")
    Forgery(change=other_run).put(root, file)
    assert refused(reader, errors.OtherRunPayload, file).found == "run-2"
    with PayloadReader(make_other(root), model=None) as other:
        assert other.header(file).run_id == "run-2"


def make_other(root: PayloadRoot) -> PayloadRoot:
    return PayloadRoot(root.path, RunId("run-2"))


@pytest.mark.parametrize(
    ("file", "part"),
    [
        (FILE.replace("v3", "v4"), "policy_version"),
        (FILE.replace("req-1", "req-2"), "request_id"),
        (FILE.replace("req-1-", "req-1-a-"), "request_id"),
        ("v3/run-1/00/req-1.sbp", "request_id"),  # a name that no writer gives
    ],
)
def test_a_file_under_the_name_of_another(
    root: PayloadRoot, reader: PayloadReader, file: str, part: str
) -> None:
    Forgery().put(root, file)
    assert refused(reader, errors.PayloadMisfiled, file).part == part


def test_a_file_of_another_model(root: PayloadRoot) -> None:
    Forgery().put(root)
    other = ModelShape(num_layers=4, layer_ids=(1, 2), top_k=2, id_space=300, vocab_size=1001)
    with PayloadReader(root, model=other) as reader:
        assert refused(reader, errors.OtherModelPayload).differing == ("layer_ids", "vocab_size")
    with PayloadReader(root, model=WIDE) as reader:
        reader.header(FILE)


@pytest.mark.parametrize(
    "change",
    [
        section(0, offset=2048),
        section(0, offset=2176),
        section(1, offset=2112),
        section(1, offset=2240),
        section(0, size_bytes=23),
        section(0, size_bytes=25),
        section(1, size_bytes=19),
        section(0, size_bytes=1 << 40),
        entry(0, 0, 2111),
        entry(1, 0, 2112),
        entry(1, 0, (1 << 64) - 1),
        entry(2, 0, 2112),
        entry(0, 1, 0),
        entry(0, 1, 15),
        entry(0, 1, BLOCK_BYTES_MAX + 1),
        entry(0, 1, (1 << 32) - 1),
        entry(0, 2, 0),
        entry(0, 2, 1),
        entry(0, 2, (1 << 32) - 1),
        both(entry(0, 2, 1), entry(1, 2, 2)),  # the right sum, but not what raw rows weigh
        both(section(1, rows=9, runs=[[4, 0, 9]]), entry(2, 2, 9)),
    ],
)
def test_sections_and_blocks_that_do_not_tile(
    root: PayloadRoot, reader: PayloadReader, change: Change
) -> None:
    Forgery(change=change).put(root)
    refused(reader, errors.SectionsMisplaced)


def test_sections_that_end_before_the_file(root: PayloadRoot, reader: PayloadReader) -> None:
    Forgery(tail=bytes(64)).put(root)
    assert "sections end" in refused(reader, errors.SectionsMisplaced).reason
