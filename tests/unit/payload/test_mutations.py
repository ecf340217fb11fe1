"""A damaged file is refused or read right: no crash, no hang, no large allocation, no wrong row."""

import tracemalloc
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.payload import PayloadError, PayloadReader, PayloadRoot, encodings
from sideband.payload.errors import NotAPayload, PayloadTruncated, TrailingBytes
from sideband.segments import PayloadSegment
from tests.unit.payload.forge import Forgery, mask_segment, put, read_masks, routing_segment
from tests.unit.payload.support import (
    GAPS,
    file_path,
    make_root,
    of_field,
    one_choice,
    rows_given,
    rows_read,
    write,
)

FIELDS = ("routed_experts", "sampling_mask")


class Target:
    """One small file of several blocks, what its segments are, and its rows."""

    def __init__(self, root: PayloadRoot) -> None:
        self.root = root
        self.choice = one_choice()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(encodings, "BLOCK_BYTES_TARGET", 40)
            self.report = write(root, self.choice)
        self.path: Path = file_path(root, self.report)
        self.data = self.path.read_bytes()
        self.rows = rows_given(self.choice, gaps=GAPS)
        self.segments: tuple[PayloadSegment, ...] = self.report.segments[0]

    def try_with(self, data: bytes) -> int:
        """How many fields can still be read; what is read must be right."""
        self.path.write_bytes(data)
        read = 0
        with PayloadReader(self.root, model=None) as reader:
            for field in FIELDS:
                try:
                    found = rows_read(reader, of_field(self.segments, field), self.choice)
                except PayloadError:
                    continue
                assert found == self.rows[field]
                read += 1
        return read


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(make_root(tmp_path_factory.mktemp("mutations") / "payloads"))


def test_the_file_itself_is_right(target: Target) -> None:
    assert target.try_with(target.data) == 2


def test_every_byte_changed_is_noticed_unless_it_is_padding(target: Target) -> None:
    unnoticed = []
    for place in range(len(target.data)):
        data = bytearray(target.data)
        data[place] ^= 1 << (place % 8)
        if target.try_with(bytes(data)) == 2:
            unnoticed.append(place)
    sections = [segment.offset for segment in target.segments]
    # The gaps before sections belong to nothing: zeros that nobody reads.
    assert all(any(0 < offset - place < 64 for offset in sections) for place in unnoticed)
    assert not any(target.data[place] for place in unnoticed)
    assert len(unnoticed) < 2 * 64


def test_every_prefix_is_torn(target: Target) -> None:
    for size in range(len(target.data)):
        target.path.write_bytes(target.data[:size])
        with PayloadReader(target.root, model=None) as reader:
            with pytest.raises(PayloadTruncated) as caught:
                reader.header(target.report.file or "")
            assert caught.value.is_retryable


@given(tail=st.binary(min_size=1, max_size=200))
def test_anything_appended_is_refused(target: Target, tail: bytes) -> None:
    target.path.write_bytes(target.data + tail)
    with PayloadReader(target.root, model=None) as reader, pytest.raises(TrailingBytes):
        reader.header(target.report.file or "")


@given(data=st.data())
def test_spliced_and_overwritten_files_are_refused_or_right(
    target: Target, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(target.data)))
    stop = data.draw(st.integers(start, len(target.data)))
    middle = data.draw(
        st.one_of(st.binary(max_size=40), st.just(target.data[start:stop][::-1]), st.just(b""))
    )
    target.try_with(target.data[:start] + middle + target.data[stop:])


@given(data=st.binary(max_size=3000))
def test_any_bytes_after_our_magic_are_refused(target: Target, data: bytes) -> None:
    assert target.try_with(b"SIDEBAND" + data) == 0


@given(data=st.binary(min_size=8, max_size=100))
def test_any_other_bytes_are_no_payload(target: Target, data: bytes) -> None:
    target.path.write_bytes(data)
    if data[:8] == b"SIDEBAND":
        return
    with PayloadReader(target.root, model=None) as reader, pytest.raises(NotAPayload):
        reader.header(target.report.file or "")


NUMBERS = st.one_of(
    st.integers(-2, 70),
    st.integers(0, 1 << 72),
    st.sampled_from([64, 2048, 2112, 2176, 2196, 1 << 31, (1 << 32) - 1, 1 << 48, (1 << 64) - 1]),
)
KEYS = ("choice", "offset", "size_bytes", "rows", "runs", "block_count", "shape", "layer_ids")


@given(data=st.data())
def test_numbers_that_lie_under_right_checksums_are_refused_or_harmless(
    target: Target, data: st.DataObject
) -> None:
    """The forged file says anything at all about itself; the reader must stay in bounds."""

    def lie(header: dict[str, object], index: list[list[int]]) -> None:
        for _ in range(data.draw(st.integers(1, 3))):
            sections = header["sections"]
            assert isinstance(sections, list)
            if data.draw(st.booleans()):
                entry = data.draw(st.sampled_from(index))
                place = data.draw(st.integers(0, 3))
                entry[place] = max(0, data.draw(NUMBERS)) & ((1 << (64, 32, 32, 64)[place]) - 1)
                continue
            section = data.draw(st.sampled_from(sections))
            key = data.draw(st.sampled_from(KEYS))
            value: object = data.draw(NUMBERS)
            if key in {"shape", "layer_ids"}:
                value = data.draw(st.lists(NUMBERS, max_size=3))
            elif key == "runs":
                value = data.draw(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=3))
            section[key] = value

    put(target.root, Forgery(change=lie).file_bytes())
    tracemalloc.start()
    with PayloadReader(target.root, model=None) as reader:
        for segment in (routing_segment(), mask_segment(), routing_segment(row=2, rows=1)):
            out = np.empty((segment.rows, 2, 2), np.uint16)
            with suppress(PayloadError):
                if segment.field == "routed_experts":
                    reader.read_routing(segment, out)
                else:
                    assert len(read_masks(reader, segment)) == segment.rows
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20
