"""How a segment travels: what it is on the wire, and what cannot be one."""

import msgspec
import pytest

from sideband.segments import MalformedSegment, PayloadSegment

GOOD = {
    "field": "routed_experts",
    "file": "v12/run-1/0a/request.7-0123456789abcdef.sbp",
    "offset": 4096,
    "row": 0,
    "pos": 3,
    "rows": 4,
    "dtype": "uint8",
    "shape": (45, 8),
}
MASK = {"field": "sampling_mask", "dtype": "int32", "shape": (151936,)}


def test_a_segment_survives_the_wire() -> None:
    segment = PayloadSegment(**GOOD)  # type: ignore[arg-type]  # a table of plain values
    assert segment.check() is segment
    assert msgspec.json.decode(msgspec.json.encode(segment), type=PayloadSegment) == segment
    assert PayloadSegment(**{**GOOD, **MASK}).check().rows == 4  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("file", "../v1/run/00/x.sbp"),
        ("file", "/v1/run/00/x.sbp"),
        ("file", "v1/../00/x.sbp"),
        ("file", "v1/./00/x.sbp"),
        ("file", "v1/run/00/../x.sbp"),
        ("file", "v1/run/00/x.sbp\n"),
        ("file", "v1/run/00/x.sbp/"),
        ("file", "v1//00/x.sbp"),
        ("file", "v1/run/zz/x.sbp"),
        ("file", "v\u0661/run/00/x.sbp"),
        ("file", "v1/run/00/x\0.sbp"),
        ("file", "v1/run/00/x"),
        ("file", ""),
        ("offset", -1),
        ("offset", 1 << 60),
        ("row", -1),
        ("row", 1 << 31),
        ("pos", -1),
        ("pos", 1 << 31),
        ("rows", 0),
        ("rows", -4),
        ("rows", 1 << 31),
        ("dtype", "int32"),
        ("dtype", "float32"),
        ("shape", (45,)),
        ("shape", (0, 8)),
        ("shape", (45, 0)),
        ("shape", (1 << 20, 8)),
        ("shape", (45, 8, 1)),
        ("shape", ()),
    ],
)
def test_a_segment_that_cannot_exist_is_refused(part: str, value: object) -> None:
    segment = PayloadSegment(**{**GOOD, part: value})  # type: ignore[arg-type]  # bad on purpose
    with pytest.raises(MalformedSegment, match=f"segment.{part}"):
        segment.check()


@pytest.mark.parametrize(
    ("part", "value"),
    [("dtype", "uint8"), ("shape", (45, 8)), ("shape", (0,)), ("shape", (1 << 25,)), ("shape", ())],
)
def test_a_mask_segment_that_cannot_exist_is_refused(part: str, value: object) -> None:
    segment = PayloadSegment(**{**GOOD, **MASK, part: value})  # type: ignore[arg-type]
    with pytest.raises(MalformedSegment, match=f"segment.{part}"):
        segment.check()


@pytest.mark.parametrize(
    "change",
    [
        {"field": "routed"},
        {"dtype": "int64"},
        {"rows": 1.5},
        {"rows": "4"},
        {"extra": 1},
        {"shape": ["a"]},
        {"file": None},
    ],
)
def test_the_wire_takes_no_other_kind_of_segment(change: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**GOOD, **change}, PayloadSegment)
