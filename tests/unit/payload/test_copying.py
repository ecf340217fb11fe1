"""The loop that copies blocks: the bytes and the checksums of the plain way, compiled and not."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sideband.payload.copying import COPY_BLOCKS
from sideband.payload.layout import checksum
from tests.unit.masks.ways import ARRAYS, WAYS, taking

CONTENT = np.random.default_rng(1).integers(0, 256, 40_000, dtype=np.uint8)
EDGES = [1, 63, 64, 65, 240, 241, 1023, 1024, 1025, 1088, 1089, 4095, 4096, 4097, 4160, 9000]
BEGIN, AROUND = 7, 70  # what no copy may touch lies around its output, more than a line of a cache


@pytest.fixture(params=[way for way in WAYS if way != ARRAYS], scope="module")
def any_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    with taking(request.param):
        yield


@pytest.fixture(scope="module")
def fd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A descriptor of a file with CONTENT."""
    path = tmp_path_factory.mktemp("content") / "file"
    path.write_bytes(CONTENT.tobytes())
    opened = os.open(path, os.O_RDONLY)
    yield opened
    os.close(opened)


class Cut:
    """CONTENT from BEGIN on as blocks of these sizes, and a room for any of them."""

    def __init__(self, *sizes: int) -> None:
        self.offsets = BEGIN + np.cumsum([0, *sizes], dtype=np.int64)
        bounds = self.offsets.tolist()
        self.blocks = [CONTENT[bounds[i] : bounds[i + 1]] for i in range(len(sizes))]
        self.checksums = np.array([checksum(block.data) for block in self.blocks], np.uint64)
        self.room = np.zeros(max(sizes), np.uint8)

    def copied(
        self, fd: int, out: NDArray[np.uint8], *, first: int = 0, stop: int = 1, skipped: int = 0
    ) -> int:
        loop: Any = COPY_BLOCKS.for_items(1 << 60)
        left: int = loop(fd, self.offsets, self.checksums, first, stop, skipped, self.room, out)
        return left


@pytest.mark.usefixtures("any_loop")
@given(
    sizes=st.lists(st.sampled_from(EDGES) | st.integers(1, 9500), min_size=1, max_size=4),
    shift=st.integers(0, 64),
    data=st.data(),
)
def test_any_part_of_any_blocks_is_copied_and_nothing_beside_it(
    fd: int, sizes: list[int], shift: int, data: st.DataObject
) -> None:
    cut = Cut(*sizes)
    first = data.draw(st.integers(0, len(sizes) - 1), "first")
    stop = data.draw(st.integers(first + 1, len(sizes)), "stop")
    skipped = data.draw(st.integers(0, sizes[first] - 1), "skipped")
    begin, last = int(cut.offsets[first]) + skipped, int(cut.offsets[stop - 1])
    end = data.draw(st.integers(max(begin, last) + 1, int(cut.offsets[stop])), "end")
    memory = np.full(end - begin + shift + AROUND, 77, np.uint8)
    out = memory[shift : shift + end - begin]
    assert cut.copied(fd, out, first=first, stop=stop, skipped=skipped) == stop
    assert out.tobytes() == CONTENT[begin:end].tobytes()
    assert set(memory[:shift].tolist() + memory[shift + end - begin :].tolist()) == {77}
    assert cut.room[: sizes[stop - 1]].tobytes() == cut.blocks[stop - 1].tobytes()


@pytest.mark.usefixtures("any_loop")
@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("sizes", [(3000, 1024, 5000), (700, 9000, 241)])
def test_it_stops_at_a_block_with_another_checksum(
    fd: int, bad: int, sizes: tuple[int, int, int]
) -> None:
    cut, out = Cut(*sizes), np.zeros(sum(sizes), np.uint8)
    cut.checksums[bad] ^= np.uint64(1)
    assert cut.copied(fd, out, stop=3) == bad
    good = sum(sizes[:bad])
    assert out[:good].tobytes() == CONTENT[BEGIN : BEGIN + good].tobytes()


@pytest.mark.usefixtures("any_loop")
def test_it_leaves_blocks_that_its_room_does_not_hold(fd: int) -> None:
    cut, out = Cut(1000, 1001), np.zeros(2001, np.uint8)
    cut.room = cut.room[:1000]
    assert cut.copied(fd, out, stop=2) == 1


@pytest.mark.usefixtures("any_loop")
def test_it_stops_where_the_file_ends(fd: int) -> None:
    cut, out = Cut(20_000, 15_000), np.zeros(36_000, np.uint8)
    cut.offsets[2] += 6_000
    cut.room = np.zeros(21_000, np.uint8)
    assert cut.copied(fd, out, stop=2) == 1


@pytest.mark.usefixtures("any_loop")
def test_it_stops_at_an_error_of_the_operating_system() -> None:
    cut, out = Cut(1000), np.zeros(1000, np.uint8)
    assert cut.copied(-1, out) == 0
