"""Write one request's rows as one payload file, all or nothing.

Rows are checked, encoded block by block and written aside without being joined; the file is synced,
renamed and its folders synced before the call returns (docs/payload-format.md). The disk is at work
from the first blocks on, and a large file is written while its rows are checked: what turns out to
be refused was never visible.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np

from sideband.errors import InvalidInput
from sideband.ids import RequestId, check_id
from sideband.model import ModelShape
from sideband.payload.assembly import (
    FileInMaking,
    Part,
    Ranges,
    mask_part,
    routing_part,
    score_part,
)
from sideband.payload.checks import check_masks, valid_runs
from sideband.payload.columns import ChoicePayload, RoutingRows
from sideband.payload.encodings import DEFAULT_ENCODINGS, Encodings
from sideband.payload.io import write_all
from sideband.payload.layout import CHOICE_MAX
from sideband.payload.paths import PayloadPath, new_path
from sideband.payload.refusals import DuplicateChoice
from sideband.payload.root import PayloadRoot, published
from sideband.payload.writeback import begin_writeback
from sideband.routing.rows import valid_rows
from sideband.segments import PayloadSegment

# Below, a thread costs more than it saves: a megabyte is checked in about a millisecond.
_OVERLAP_BYTES_MIN: Final = 1 << 20
_SAMPLE_ROWS: Final = 64
_WRITEBACK_BYTES: Final = 1 << 20  # a request to the disk of its own, and there is soon another


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteReport:
    """What was published. ``file`` is None when there was no row to write.

    ``segments`` has an entry for every choice; they are in the request's own positions.
    ``rows_invalid`` counts routing rows that were left out as gaps, ``masks_empty`` sampled tokens
    whose kept set holds nothing: they are gaps too.
    """

    file: str | None
    segments: Mapping[int, tuple[PayloadSegment, ...]]
    size_bytes: int
    rows_invalid: int
    masks_empty: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Request:
    """What was asked for, with ids and choices that can be."""

    root: PayloadRoot
    policy_version: int
    request_id: RequestId
    model: ModelShape
    choices: Sequence[ChoicePayload]
    encodings: Encodings

    @property
    def routings(self) -> list[tuple[int, RoutingRows]]:
        return [(c.choice, c.routing) for c in self.choices if c.routing is not None]

    def whole_ranges(self) -> dict[int, Ranges]:
        """By choice, all its routing rows: as if none were a gap."""
        return {
            choice: [(0, len(routing.rows_NLK))] if len(routing.rows_NLK) else []
            for choice, routing in self.routings
        }

    def valid_ranges(self) -> dict[int, Ranges]:
        """The valid ones. Raises WrongRowShape, IdOutOfRange."""
        return {choice: valid_runs(routing, self.model) for choice, routing in self.routings}

    def file(self, ranges: Mapping[int, Ranges]) -> FileInMaking:
        """The file of the routing rows in ``ranges`` and of the kept sets."""
        parts = [part for choice in self.choices for part in self._parts(choice, ranges)]
        return FileInMaking(
            run_id=self.root.run_id,
            request_id=self.request_id,
            policy_version=self.policy_version,
            model=self.model,
            parts=[part for part in parts if part.rows],
        )

    def _parts(self, choice: ChoicePayload, ranges: Mapping[int, Ranges]) -> Iterator[Part]:
        number, routing, masks = choice.choice, choice.routing, choice.masks
        if routing is not None:
            yield routing_part(number, routing, ranges[number], self.model, self.encodings)
        if masks is not None:
            yield mask_part(number, masks, self.model, self.encodings)
            if masks.scores is not None:
                yield score_part(number, masks, masks.scores, self.model)


def write_payload(
    root: PayloadRoot,
    *,
    policy_version: int,
    request_id: RequestId,
    model: ModelShape,
    choices: Sequence[ChoicePayload],
    encodings: Encodings = DEFAULT_ENCODINGS,
) -> WriteReport:
    """Publish the rows of one request. Blocks: use a thread.

    Returns only when the file would survive a power cut. Arrays must not change meanwhile.
    Raises a PayloadRefused when a row breaks a rule (nothing is written), HeaderTooLarge,
    PathEscapesRoot, WriteFailed (nothing is left but, at worst, a staging file for the sweep);
    InvalidInput for an id, a model, a choice or an encoding that cannot be.
    """
    check_id("request_id", request_id)
    model.check()
    encodings.check()
    _check_choices(choices)
    request = _Request(
        root=root,
        policy_version=policy_version,
        request_id=request_id,
        model=model,
        choices=choices,
        encodings=encodings,
    )
    for choice in choices:
        if choice.masks is not None:
            check_masks(choice.masks, model)
    path = new_path(policy_version, root.run_id, request_id)
    ranges: Mapping[int, Ranges] | None = None
    if _is_worth_overlapping(request):
        file, ranges = _write_while_checking(request, path)
        if file is not None and ranges is not None:
            return _report(request, path, file, ranges)
    if ranges is None:
        ranges = request.valid_ranges()
    file = request.file(ranges)
    if file.parts:
        with published(root, path) as fd:
            _write_body(fd, file)
            _write_front(fd, file)
    return _report(request, path, file, ranges)


def _check_choices(choices: Sequence[ChoicePayload]) -> None:
    seen: set[int] = set()
    for choice in choices:
        if not 0 <= choice.choice <= CHOICE_MAX:
            raise InvalidInput("choice", choice.choice, f"must lie in [0, {CHOICE_MAX}]")
        if choice.choice in seen:
            raise DuplicateChoice(choice.choice)
        seen.add(choice.choice)


def _is_worth_overlapping(request: _Request) -> bool:
    """Large, and a glance at the rows finds neither a gap nor a row of another shape."""
    model = request.model
    size_bytes = 0
    for _, routing in request.routings:
        rows_NLK = routing.rows_NLK
        if rows_NLK.shape[1:] != model.row_shape or rows_NLK.dtype != model.row_dtype:
            return False
        places = np.linspace(0, len(rows_NLK) - 1, min(_SAMPLE_ROWS, len(rows_NLK)), dtype=np.int64)
        if not valid_rows(rows_NLK[places], id_space=model.id_space).all():
            return False
        size_bytes += rows_NLK.nbytes
    return size_bytes > 0 and size_bytes >= _OVERLAP_BYTES_MIN


class _StartOver(Exception):  # it leaves no function of this module
    """What was written aside is no use: rows were left out, so that every place in the file moves;
    or no thread could be started."""


def _write_while_checking(
    request: _Request, path: PayloadPath
) -> tuple[FileInMaking | None, dict[int, Ranges] | None]:
    """Write the body as if no row were invalid while that is checked; then the front.

    Returns the file, or None when nothing was published since there were gaps after all or no
    thread; and the valid ranges if they were looked for. Raises what the checks raise, and nothing
    is published then either.
    """
    whole = request.whole_ranges()
    file = request.file(whole)
    ranges: dict[int, Ranges] | None = None
    try:
        with published(request.root, path) as fd, ThreadPoolExecutor(1) as pool:
            try:
                checked = pool.submit(request.valid_ranges)
            except RuntimeError as exc:  # the system's limit, or the interpreter shuts down
                raise _StartOver from exc
            _write_body(fd, file)
            ranges = checked.result()
            if ranges != whole:
                raise _StartOver
            _write_front(fd, file)
    except _StartOver:
        return None, ranges
    return file, ranges


def _write_body(fd: int, file: FileInMaking) -> None:
    """By blocks, since a long call keeps its core from all other threads. The disk takes up what is
    written while the rest is still made, so that little is left to wait for in the sync."""
    os.lseek(fd, file.front_bytes, os.SEEK_SET)
    begun_bytes = file.front_bytes
    for buffers in file.body():
        write_all(fd, buffers)
        if file.size_bytes - begun_bytes >= _WRITEBACK_BYTES:
            begin_writeback(fd, begun_bytes, file.size_bytes - begun_bytes)
            begun_bytes = file.size_bytes


def _write_front(fd: int, file: FileInMaking) -> None:
    front = file.front()
    os.lseek(fd, 0, os.SEEK_SET)
    write_all(fd, [front])


def _report(
    request: _Request, path: PayloadPath, file: FileInMaking, ranges: Mapping[int, Ranges]
) -> WriteReport:
    stored = sum(last - first for found in ranges.values() for first, last in found)
    columns = [choice.masks for choice in request.choices if choice.masks is not None]
    segments: dict[int, tuple[PayloadSegment, ...]] = {
        choice.choice: tuple(
            segment
            for part in file.parts
            if part.choice == choice.choice
            for segment in part.segments(str(path))
        )
        for choice in request.choices
    }
    return WriteReport(
        file=str(path) if file.parts else None,
        segments=segments,
        size_bytes=file.size_bytes if file.parts else 0,
        rows_invalid=sum(len(routing.rows_NLK) for _, routing in request.routings) - stored,
        masks_empty=sum(int((np.diff(one.masks.starts_N) == 0).sum()) for one in columns),
    )
