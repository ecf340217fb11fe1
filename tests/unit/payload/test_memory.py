"""What reading holds beyond its rows is bounded, into however many blocks a writer cut them."""

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from sideband.payload import PayloadReader, PayloadRoot
from sideband.payload.layout import aligned
from tests.unit.payload.forge import FILE, Forgery, both, mask_segment, routing_segment, section
from tests.unit.payload.support import make_root

BLOCKS = 20_000  # of one row, in each of two sections
INDEX_BYTES = 2 * 24 * BLOCKS
FRONT_BYTES = 32 + 2000 + INDEX_BYTES
ROUTING_AT = aligned(FRONT_BYTES)
MASKS_AT = aligned(ROUTING_AT + 8 * BLOCKS)
BEYOND_BYTES = 3 << 20  # as objects the blocks of one section weigh three times as much


class Peak:
    """Bytes that were held at once."""

    size_bytes = 0


@contextmanager
def measured() -> Iterator[Peak]:
    found = Peak()
    tracemalloc.start()
    try:
        yield found
        found.size_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def cut_root(tmp_path_factory: pytest.TempPathFactory) -> PayloadRoot:
    """A root with one file whose blocks have one row each."""
    root = make_root(tmp_path_factory.mktemp("cut") / "payloads")
    routing = [(1, struct.pack("<4H", *divmod(row, 256), 7, 9)) for row in range(BLOCKS)]
    masks = [(1, struct.pack("<2IH", 0, 1, row % 1000)) for row in range(BLOCKS)]
    Forgery(
        blocks=[routing, masks],
        change=both(
            section(0, rows=BLOCKS, runs=[[2, 0, BLOCKS]]),
            section(1, rows=BLOCKS, runs=[[4, 0, BLOCKS]]),
        ),
    ).put(root)
    return root


@pytest.fixture
def cut_reader(cut_root: PayloadRoot) -> Iterator[PayloadReader]:
    with PayloadReader(cut_root, model=None) as reader:
        yield reader


def test_opening_holds_the_block_index_once(cut_reader: PayloadReader) -> None:
    with measured() as peak:
        header = cut_reader.header(FILE)
    assert sum(one.block_count for one in header.sections) == 2 * BLOCKS
    assert INDEX_BYTES < peak.size_bytes < 1.5 * INDEX_BYTES + (1 << 20)


def test_routing_rows_of_many_blocks(cut_reader: PayloadReader) -> None:
    cut_reader.header(FILE)
    segment = routing_segment(offset=ROUTING_AT, rows=BLOCKS)
    out = np.empty((BLOCKS, 2, 2), np.uint16)
    with measured() as peak:
        cut_reader.read_routing(segment, out)
    rows = np.arange(BLOCKS)
    assert (out[:, 0, 0] * 256 + out[:, 0, 1] == rows).all()
    assert (out[:, 1] == (7, 9)).all()
    assert peak.size_bytes < BEYOND_BYTES


def test_kept_sets_of_many_blocks(cut_reader: PayloadReader) -> None:
    cut_reader.header(FILE)
    tokens = (np.arange(BLOCKS) % 1000).astype(np.int32)
    with measured() as peak:
        found = cut_reader.read_masks(mask_segment(offset=MASKS_AT, rows=BLOCKS), tokens)
    assert found.ids_M.tolist() == tokens.tolist()
    assert found.starts_N.tolist() == list(range(BLOCKS + 1))
    assert peak.size_bytes < 3 * (found.ids_M.nbytes + found.starts_N.nbytes) + BEYOND_BYTES


def test_verifying_many_blocks(cut_reader: PayloadReader) -> None:
    cut_reader.header(FILE)
    with measured() as peak:
        assert cut_reader.verify(FILE) == 2 * BLOCKS
    assert peak.size_bytes < BEYOND_BYTES
