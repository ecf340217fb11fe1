"""The bytes of version 1, written down once: the writer still makes them, the reader reads them.

The writer of the first file stored a kept set without ids as an empty row; today it is a gap.
"""

import json
import re
import secrets
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash

from sideband.masks.rows import MaskRows
from sideband.payload import (
    ChoicePayload,
    MaskColumn,
    PayloadReader,
    PayloadRoot,
    RoutingRows,
)
from sideband.payload.encodings import Encodings
from sideband.segments import PayloadSegment
from tests.unit.payload.support import WIDE, rows_read, write

REPOSITORY = Path(__file__).parent.parent.parent.parent
GOLDEN = REPOSITORY / "tests" / "golden" / "payload-v1.sbp"
# What the writer makes today of the same request, by what it is asked for.
WRITTEN = {
    "mask-gaps": Encodings(masks="csr-bits"),
    "others-rice": Encodings(masks="others-rice"),
    "packed": Encodings(routing="packed", masks="others-rice"),
}
ROWS = {
    2: [[0, 299], [256, 1]],
    3: [[17, 18], [44, 43]],
    4: [[5, 6], [9, 9]],  # an id twice: the row is left out
    5: [[298, 2], [1, 0]],
}
KEPT = {4: [7, 999], 5: [], 6: [5]}  # the set at position 5 is empty
SAMPLED = [999, 3, 5]
NAME = "req-1-000102030405060f.sbp"


@pytest.fixture
def fixed_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda count: "000102030405060f"[: 2 * count])


def golden_choice() -> ChoicePayload:
    starts = np.array([0, 2, 2, 3], np.int64)
    return ChoicePayload(
        choice=0,
        routing=RoutingRows(pos=2, rows_NLK=np.array(list(ROWS.values()), np.uint16)),
        masks=MaskColumn(
            pos=4,
            masks=MaskRows(starts, np.array([7, 999, 5], np.int32)),
            sampled_token_ids_N=np.array(SAMPLED, np.int32),
        ),
    )


def expected_rows(*, empty: bool) -> dict[str, dict[int, bytes]]:
    """Each position's bytes; with ``empty`` the row without ids is one."""
    return {
        "routed_experts": {
            pos: np.array(row, np.uint16).tobytes() for pos, row in ROWS.items() if pos != 4
        },
        "sampling_mask": {
            pos: np.array(ids, np.int32).tobytes() for pos, ids in KEPT.items() if ids or empty
        },
    }


def written(name: str) -> Path:
    return GOLDEN.with_name(f"payload-v1-{name}.sbp")


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.usefixtures("fixed_name")
def test_the_writer_still_makes_exactly_the_golden_bytes(root: PayloadRoot, name: str) -> None:
    report = write(root, golden_choice(), encodings=WRITTEN[name])
    hh = f"{xxhash.xxh3_64_intdigest(b'req-1') & 255:02x}"
    assert report.file == f"v3/run-1/{hh}/{NAME}"
    assert (root.path / report.file).read_bytes() == written(name).read_bytes()
    assert (report.rows_invalid, report.masks_empty) == (1, 1)
    assert [(s.pos, s.rows) for s in report.segments[0]] == [(2, 2), (5, 1), (4, 1), (6, 1)]


def check_rows(
    reader: PayloadReader, segments: tuple[PayloadSegment, ...], rows: dict[str, dict[int, bytes]]
) -> None:
    """All rows at once, and each alone."""
    for field in rows:
        own = [segment for segment in segments if segment.field == field]
        assert rows_read(reader, own, golden_choice()) == rows[field]
        for segment in own:
            for pos in range(segment.pos, segment.stop):
                one = segment.narrowed(pos, pos + 1)
                assert rows_read(reader, [one], golden_choice()) == {pos: rows[field][pos]}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.usefixtures("fixed_name")
def test_the_reader_reads_the_golden_files(
    root: PayloadRoot, reader: PayloadReader, name: str
) -> None:
    report = write(root, golden_choice(), encodings=WRITTEN[name])
    assert report.file is not None
    (root.path / report.file).write_bytes(written(name).read_bytes())
    check_rows(reader, report.segments[0], expected_rows(empty=False))
    assert reader.header(report.file).model == WIDE


@pytest.mark.usefixtures("fixed_name")
def test_the_reader_reads_the_first_golden_file(root: PayloadRoot, reader: PayloadReader) -> None:
    report = write(root, golden_choice())
    assert report.file is not None
    path, segments = root.path / report.file, report.segments[0]
    path.write_bytes(GOLDEN.read_bytes())
    masks = reader.header(report.file).sections[1]
    whole = msgspec.structs.replace(segments[2], offset=masks.offset, rows=3)
    check_rows(reader, (*segments[:2], whole), expected_rows(empty=True))
    assert reader.header(report.file).model == WIDE


def test_the_golden_file_is_what_the_page_says_without_our_code() -> None:
    data = GOLDEN.read_bytes()
    magic, version, flags, header_bytes, file_bytes, stored = struct.unpack("<8sHHIQQ", data[:32])
    assert (magic, version, flags, file_bytes) == (b"SIDEBAND", 1, 0, len(data))
    header = json.loads(data[32 : 32 + header_bytes])
    blocks = sum(section["block_count"] for section in header["sections"])
    front = 32 + header_bytes + 24 * blocks
    assert xxhash.xxh3_64_intdigest(data[:24] + data[32:front]) == stored
    routing, masks = header["sections"]
    assert (header["run_id"], header["request_id"], header["policy_version"]) == (
        "run-1",
        "req-1",
        3,
    )
    assert header["model"] == {
        "num_layers": 4,
        "layer_ids": [1, 3],
        "top_k": 2,
        "id_space": 300,
        "vocab_size": 1000,
    }
    assert routing["offset"] % 64 == 0
    assert routing["offset"] - front < 64
    assert not any(data[front : routing["offset"]])
    assert routing["runs"] == [[2, 0, 2], [5, 2, 1]]
    assert (routing["field"], routing["encoding"], routing["dtype"], routing["shape"]) == (
        "routed_experts",
        "raw",
        "uint16",
        [2, 2],
    )
    body = data[routing["offset"] : routing["offset"] + routing["size_bytes"]]
    assert body == b"".join(expected_rows(empty=True)["routed_experts"].values())
    assert (masks["encoding"], masks["dtype"], masks["shape"], masks["layer_ids"]) == (
        "csr-bits",
        "int32",
        [1000],
        [],
    )
    packed = 7 | 999 << 10 | 5 << 20  # 1000 ids need 10 bits
    assert data[masks["offset"] :] == struct.pack("<4II", 0, 2, 2, 3, packed)
    entries = [struct.unpack_from("<QIIQ", data, 32 + header_bytes + 24 * i) for i in range(blocks)]
    for section, (offset, size_bytes, rows, checksum) in zip(
        (routing, masks), entries, strict=True
    ):
        assert (offset, size_bytes, rows) == (
            section["offset"],
            section["size_bytes"],
            section["rows"],
        )
        assert xxhash.xxh3_64_intdigest(data[offset : offset + size_bytes]) == checksum


def test_kept_sets_without_sampled_ids_are_what_the_page_says_without_our_code() -> None:
    data = written("others-rice").read_bytes()
    header = json.loads(data[32 : 32 + struct.unpack_from("<I", data, 12)[0]])
    masks = header["sections"][1]
    assert (masks["encoding"], masks["runs"]) == ("others-rice", [[4, 0, 1], [6, 1, 1]])
    # {7, 999} without 999 and {5} without 5: one gap of 7, whose remainder has 8 bits (1000 // 4 is
    # 250), and its quotient 0; tags of 999 and 5.
    tags = [(token * 0x9E3779B1 & 0xFFFFFFFF) >> 28 for token in (999, 5)]
    assert data[masks["offset"] :] == bytes([1, 0, tags[0] | tags[1] << 4, 7, 1])


def test_packed_ids_are_what_the_page_says_without_our_code() -> None:
    data = written("packed").read_bytes()
    header = json.loads(data[32 : 32 + struct.unpack_from("<I", data, 12)[0]])
    routing = header["sections"][0]
    assert (routing["encoding"], routing["dtype"]) == ("packed", "uint16")
    ids = [one for pos in (2, 3, 5) for pair in ROWS[pos] for one in pair]  # 300 need nine bits
    plane = sum((one >> 8) << place for place, one in enumerate(ids))
    body = bytes(one & 255 for one in ids) + plane.to_bytes(2, "little")
    assert data[routing["offset"] : routing["offset"] + routing["size_bytes"]] == body


def test_the_page_shows_the_golden_bytes() -> None:
    page = (REPOSITORY / "docs" / "payload-format.md").read_text()
    dump = page.split("## Golden bytes")[1].split("```text\n")[1].split("```")[0]
    data = b""
    for line in dump.splitlines():
        found = re.fullmatch(r"([0-9a-f]{8})  ((?:[0-9a-f]{2} ?){1,16}) +\|(.{1,16})\|", line)
        assert found, line
        assert int(found[1], 16) == len(data)
        data += bytes.fromhex(found[2])
    assert GOLDEN.read_bytes().startswith(data)
    assert len(data) == 64


def test_a_segment_of_the_golden_file_is_checked_like_any_other(
    root: PayloadRoot, reader: PayloadReader
) -> None:
    report = write(root, golden_choice())
    assert all(isinstance(s.check(), PayloadSegment) for s in report.segments[0])
    assert reader.header(report.file or "").sections[1].rows == 2
