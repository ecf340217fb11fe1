"""Read rows of payload files: whole blocks, each verified, straight into the caller's array.

A reader refuses before it allocates; the order of refusals is in docs/payload-format.md. It is
thread-safe and meant for many threads that each read some segments. Blocking.
"""

import os
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from sideband.fields import FIELDS
from sideband.masks.rows import MaskRows, ScoreRows
from sideband.model import ModelShape
from sideband.payload.blocks import verify_blocks
from sideband.payload.columns import RowArray
from sideband.payload.errors import (
    OtherModelPayload,
    OtherRunPayload,
    PayloadMisfiled,
    read_error,
)
from sideband.payload.folders import closed_on_error
from sideband.payload.handles import OpenFiles, OpenPayload, OpenSection
from sideband.payload.header import (
    PayloadHeader,
    checked_index,
    decode_header,
    index_bytes,
    parse_prefix,
)
from sideband.payload.io import read_exactly
from sideband.payload.layout import PREFIX_BYTES
from sideband.payload.paths import PayloadPath, parse_path
from sideband.payload.root import PayloadRoot
from sideband.payload.rows import read_mask_rows, read_routing_rows, read_score_rows
from sideband.payload.sections import check_index, check_sections
from sideband.segments import PayloadSegment

OPEN_FILES_MAX: Final = 256  # a quarter of the usual limit on descriptors
_FIRST_READ_BYTES: Final = 16 * 1024  # holds the whole front of an ordinary file


class PayloadReader:
    """Reads segments of one run's files. ``model``: files of another model are refused.

    Every method raises PayloadErrors as docs/payload-format.md lists them. When ``is_retryable``
    is set on one, call ``forget`` and try again; what an output array holds meanwhile is undefined.
    """

    def __init__(
        self,
        root: PayloadRoot,
        *,
        model: ModelShape | None,
        open_files_max: int = OPEN_FILES_MAX,
    ) -> None:
        self._root = root
        self._model = model
        self._files = OpenFiles(self._open, files_max=open_files_max)

    def read_routing(self, segment: PayloadSegment, out: RowArray) -> None:
        """Fill ``out`` [rows, layers, top-k] (C-contiguous, the segment's dtype) with its rows."""
        assert out.shape == (segment.rows, *segment.shape), "the caller sizes the output"
        assert out.dtype == segment.dtype, "the caller allocates the segment's dtype"
        assert out.flags.c_contiguous, "rows are read in place"
        with self._files.use(segment.file) as payload:
            read_routing_rows(payload, segment, out)

    def read_masks(
        self, segment: PayloadSegment, sampled_token_ids_N: NDArray[np.int32]
    ) -> MaskRows:
        """The kept sets of the segment, one row per position.

        ``sampled_token_ids_N`` [rows]: the tokens that were sampled at these positions. Each must
        be in its own set (SampledTokenMismatch): rows of other tokens never pass for these.
        """
        assert len(sampled_token_ids_N) == segment.rows, "one token for each row"
        with self._files.use(segment.file) as payload:
            return read_mask_rows(payload, segment, sampled_token_ids_N)

    def read_ragged(
        self, segment: PayloadSegment, sampled_token_ids_N: NDArray[np.int32]
    ) -> MaskRows | ScoreRows:
        """The rows of any field about sampled tokens whose rows differ in length.

        Kept sets are those of ``read_masks``. Scores are read alone: whether they have the lengths
        of their kept sets is known to who reads both.
        """
        if FIELDS[segment.field].ragged is not ScoreRows:
            return self.read_masks(segment, sampled_token_ids_N)
        with self._files.use(segment.file) as payload:
            return read_score_rows(payload, segment)

    def header(self, file: str) -> PayloadHeader:
        """The checked header of a file."""
        with self._files.use(file) as payload:
            return payload.header

    def verify(self, file: str) -> int:
        """Read every block of a file and hold it against its checksum; how many there are."""
        with self._files.use(file) as payload:
            return sum(
                verify_blocks(payload, opened.blocks) for opened in payload.sections.values()
            )

    def forget(self, file: str) -> None:
        """Reopen ``file`` at its next use: after a stale handle, a short read, a deletion."""
        self._files.forget(file)

    def forget_all(self) -> None:
        """The same for all files: a deleted file keeps its bytes on the disk while it is open."""
        self._files.close()

    def close(self) -> None:
        """Close all descriptors. Reads that run in other threads finish first on theirs."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, file: str) -> OpenPayload:
        path = parse_path(file, run_id=self._root.run_id)
        fd = self._root.open_file(path)
        with closed_on_error(fd):
            return self._read_front(fd, file, path)

    def _read_front(self, fd: int, file: str, path: PayloadPath) -> OpenPayload:
        try:
            size_bytes = os.fstat(fd).st_size
            front = memoryview(os.pread(fd, _FIRST_READ_BYTES, 0))
        except OSError as exc:
            raise read_error(file, exc) from exc
        prefix = parse_prefix(front, size_bytes=size_bytes, file=file)
        header_stop = PREFIX_BYTES + prefix.header_bytes
        front = _grown(fd, front, header_stop, file)
        header = decode_header(front[PREFIX_BYTES:header_stop], file=file)
        front_stop = header_stop + index_bytes(header, prefix, file=file)
        front = _grown(fd, front, front_stop, file)[:front_stop]
        index = checked_index(front, prefix, file=file)
        check_sections(header, file=file)
        self._check_origin(header, file, path)
        check_index(header, index, front_bytes=front_stop, file_bytes=prefix.file_bytes, file=file)
        return OpenPayload(file=file, fd=fd, header=header, sections=_opened(header, index))

    def _check_origin(self, header: PayloadHeader, file: str, path: PayloadPath) -> None:
        """A file belongs to the run, version and request that its path names, and to the model."""
        if header.run_id != self._root.run_id:
            raise OtherRunPayload(file, found=header.run_id, expected=self._root.run_id)
        if header.policy_version != path.policy_version:
            raise PayloadMisfiled(file, part="policy_version", found=header.policy_version)
        if header.request_id != path.request_id:
            raise PayloadMisfiled(file, part="request_id", found=header.request_id)
        if self._model is not None and header.model != self._model:
            differing = tuple(
                name
                for name in ModelShape.__struct_fields__
                if getattr(header.model, name) != getattr(self._model, name)
            )
            raise OtherModelPayload(file, differing)


def _grown(fd: int, front: memoryview, wanted_bytes: int, file: str) -> memoryview:
    """At least the first ``wanted_bytes`` of the file, which is known to be that long."""
    if len(front) >= wanted_bytes:
        return front
    grown = memoryview(bytearray(wanted_bytes))
    grown[: len(front)] = front
    read_exactly(fd, [grown[len(front) :]], len(front), file=file)
    return grown


def _opened(header: PayloadHeader, index: NDArray[np.void]) -> dict[int, OpenSection]:
    sections: dict[int, OpenSection] = {}
    first = 0
    for section in header.sections:
        blocks = index[first : first + section.block_count]
        first += section.block_count
        sections[section.offset] = OpenSection(section=section, index=blocks)
    return sections
