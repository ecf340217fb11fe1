"""The payload reader on changed files: a named error or the very rows, in little memory.

``--fuzz-seconds N``: how long each test goes on (default: one seed). Bytes that were changed on
their way never give other rows. A writer that lies under right checksums can store what it
likes, but what is read is what the page allows.
"""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from hypothesis import strategies as st

from sideband.payload import PayloadError, PayloadReader, PayloadRoot, WriteReport, encodings
from sideband.payload.columns import ChoicePayload
from sideband.payload.encodings import Encodings
from sideband.segments import PayloadSegment
from tests.fuzz.budget import Budget
from tests.fuzz.mutations import changed, overwritten
from tests.fuzz.seals import sealed
from tests.unit.payload.support import GAPS as ROUTING_GAPS
from tests.unit.payload.support import (
    WIDE,
    file_path,
    make_root,
    one_choice,
    read_routing,
    rows_given,
    rows_read,
    sampled_tokens,
    write,
)
from tests.unit.payload.test_golden import WRITTEN, expected_rows, golden_choice
from tests.unit.payload.test_golden import written as golden_path

PEAK_BYTES_MAX: Final = 2 << 20  # of files of a few kilobytes
KINDS: Final = [
    Encodings(routing=routing, masks=masks)
    for routing in ("raw", "packed")
    for masks in ("csr-bits", "others-rice")
]


class Target:
    """One good file, the segments of its rows and what they hold."""

    def __init__(
        self, root: PayloadRoot, choice: ChoicePayload, report: WriteReport, data: bytes
    ) -> None:
        self.root, self.choice, self.data = root, choice, data
        self.path: Path = file_path(root, report)
        self.segments: tuple[PayloadSegment, ...] = report.segments[0]
        self.rows: dict[str, dict[int, bytes]] = {}

    @contextmanager
    def reading(self, data: bytes) -> Iterator[PayloadReader]:
        """A reader of ``data`` in place of the file; what it allocates is bounded."""
        self.path.write_bytes(data)
        tracemalloc.start()
        try:
            with PayloadReader(self.root, model=None) as reader:
                yield reader
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < PEAK_BYTES_MAX


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> list[Target]:
    """A file of each encoding in small blocks, and the golden files."""
    root = make_root(tmp_path_factory.mktemp("fuzz") / "payloads")
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encodings, "BLOCK_BYTES_TARGET", 40)
        for number, kind in enumerate(KINDS):
            choice = one_choice(number)
            report = write(root, choice, encodings=kind)
            found.append(Target(root, choice, report, file_path(root, report).read_bytes()))
            found[-1].rows = rows_given(choice, gaps=ROUTING_GAPS)
    for name, kind in WRITTEN.items():
        report = write(root, golden_choice(), encodings=kind)
        found.append(Target(root, golden_choice(), report, golden_path(name).read_bytes()))
        found[-1].rows = expected_rows(empty=False)
    return found


def test_the_good_files_are_right(targets: list[Target]) -> None:
    for target in targets:
        for data in (target.data, sealed(target.data)):
            with target.reading(data) as reader:
                for segment in target.segments:
                    assert rows_read(reader, [segment], target.choice).items() <= (
                        target.rows[segment.field].items()
                    )


def test_changed_files_are_refused_or_right(targets: list[Target], budget: Budget) -> None:
    originals = [target.data for target in targets]

    def check(data: st.DataObject) -> bool:
        target, refused = data.draw(st.sampled_from(targets), "file"), False
        if data.draw(st.booleans(), "same size"):
            found = overwritten(data, target.data)
        else:
            found = changed(data, target.data, originals)
        with target.reading(found) as reader:
            for segment in target.segments:
                try:
                    rows = rows_read(reader, [segment], target.choice)
                except PayloadError:
                    refused = True
                    continue
                expected = target.rows[segment.field]
                assert rows == {pos: expected[pos] for pos in range(segment.pos, segment.stop)}
        return refused

    budget.spend(check)


def test_lies_under_right_checksums_stay_in_bounds(targets: list[Target], budget: Budget) -> None:
    def check(data: st.DataObject) -> bool:
        target, refused = data.draw(st.sampled_from(targets), "file"), False
        with target.reading(sealed(overwritten(data, target.data))) as reader:
            for segment in target.segments:
                try:
                    check_allowed(reader, segment, target.choice)
                except PayloadError:
                    refused = True
        return refused

    budget.spend(check)


def check_allowed(reader: PayloadReader, segment: PayloadSegment, choice: ChoicePayload) -> None:
    """Rows of the asked shape; kept sets ascend, lie in the vocabulary and keep what was drawn."""
    if segment.field == "routed_experts":
        assert read_routing(reader, segment).shape == (segment.rows, *segment.shape)
        return
    sampled_N = sampled_tokens(choice, segment)
    masks = reader.read_masks(segment, sampled_N)
    assert len(masks) == segment.rows
    for row, sampled in enumerate(sampled_N):
        ids = masks[row]
        assert (np.diff(ids) > 0).all()
        assert ((ids >= 0) & (ids < WIDE.vocab_size)).all()
        assert not len(ids) or sampled in ids
