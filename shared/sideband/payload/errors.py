"""What can be wrong with a payload file, its root, or what shall be written.

PayloadError
├── RootError                the payload root itself
│   ├── ForeignRoot          a non-empty folder without our marker: never wiped, never used
│   ├── MissingMarker        the folder is not a payload root
│   └── OtherRun             the root belongs to another run
├── PathEscapesRoot          a path that is not ours, or a link or device on the way
├── PayloadUnavailable       the bytes cannot be had
│   ├── PayloadNotFound      retryable: network filesystems cache the absence of a name
│   ├── StalePayload         retryable after reopening (ESTALE)
│   ├── PayloadTruncated     retryable: fewer bytes than promised
│   ├── NoDescriptorFree     retryable: other reads give theirs back (EMFILE, ENFILE)
│   └── ReadFailed           any other error of the operating system
├── UnreadablePayload        the bytes are not what they must be
│   ├── NotAPayload, UnreadableVersion, UnknownFlags, HeaderTooLarge, HeaderCorrupt
│   ├── TrailingBytes, SectionsMisplaced
│   ├── OtherRunPayload, PayloadMisfiled, OtherModelPayload
│   ├── UnsupportedEncoding
│   └── ChecksumMismatch, BlockMalformed
├── SegmentRefused           a segment asks for what the file does not have
│   ├── SegmentMismatch
│   ├── SegmentBeyondSection
│   └── SampledTokenMismatch
├── PayloadRefused           what shall be written breaks a rule: ``refusals``
└── WriteFailed              an error of the operating system while writing or deleting

``is_retryable``: whether the same read may succeed a moment later, after ``PayloadReader.forget``.
"""

import errno
from typing import ClassVar

from sideband.errors import PayloadError as PayloadErrorBase


class PayloadError(PayloadErrorBase):
    """Root of this tree. ``file`` is the path below the payload root, or "" where none is known."""

    is_retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, file: str = "") -> None:
        self.file = file
        super().__init__(f"{file}: {message}" if file else message)


class RootError(PayloadError):
    """The payload root is not usable. ``path`` is where it was looked for."""

    def __init__(self, path: str, message: str) -> None:
        self.path = path
        super().__init__(f"payload root {path}: {message}")


class ForeignRoot(RootError):
    """A folder with somebody else's files. It is neither used nor wiped."""

    def __init__(self, path: str, *, found: str) -> None:
        self.found = found
        super().__init__(path, f"holds {found!r} and no Sideband marker; give an empty folder")


class MissingMarker(RootError):
    """The folder is no payload root: its marker is absent or not readable as one."""

    def __init__(self, path: str, reason: str) -> None:
        self.reason = reason
        super().__init__(path, reason)


class OtherRun(RootError):
    """The root belongs to another run."""

    def __init__(self, path: str, *, found: str, expected: str) -> None:
        self.found, self.expected = found, expected
        super().__init__(path, f"belongs to run {found}, not {expected}")


class PathEscapesRoot(PayloadError):
    """A path that is not of our form, or that leads over a link or to something not plain."""

    def __init__(self, file: str, reason: str) -> None:
        self.reason = reason
        shown = file if len(file) <= 400 else file[:397] + "..."
        super().__init__(f"refused path {shown!r}: {reason}")
        self.file = file


class PayloadUnavailable(PayloadError):
    """The bytes cannot be had from the filesystem."""


class PayloadNotFound(PayloadUnavailable):
    """No such file. Retryable: a network filesystem may still remember that it was absent."""

    is_retryable = True

    def __init__(self, file: str) -> None:
        super().__init__("no such file", file=file)


class StalePayload(PayloadUnavailable):
    """The server forgot the handle (ESTALE). Retryable after ``PayloadReader.forget``."""

    is_retryable = True

    def __init__(self, file: str) -> None:
        super().__init__("stale file handle", file=file)


class PayloadTruncated(PayloadUnavailable):
    """Fewer bytes than promised. Retryable: the server may not show all of it yet."""

    is_retryable = True

    def __init__(self, file: str, *, expected_bytes: int, actual_bytes: int) -> None:
        self.expected_bytes, self.actual_bytes = expected_bytes, actual_bytes
        super().__init__(f"{actual_bytes} bytes, must be {expected_bytes}", file=file)


class NoDescriptorFree(PayloadUnavailable):
    """The process or the host has too many files open. Retryable: reads that end close theirs."""

    is_retryable = True

    def __init__(self, file: str) -> None:
        super().__init__("too many open files; raise the limit (ulimit -n)", file=file)


class ReadFailed(PayloadUnavailable):
    """Any other error of the operating system while opening or reading."""

    def __init__(self, file: str, error: OSError) -> None:
        self.errno = error.errno
        super().__init__(f"cannot be read: {error.strerror or error}", file=file)


class UnreadablePayload(PayloadError):
    """The bytes are there and are not what they must be."""


class NotAPayload(UnreadablePayload):
    """Another magic."""

    def __init__(self, file: str, magic: bytes) -> None:
        self.magic = magic
        super().__init__(f"begins with {magic!r}, not a payload", file=file)


class UnreadableVersion(UnreadablePayload):
    """A version of the format that this reader does not know."""

    def __init__(self, file: str, version: int) -> None:
        self.version = version
        super().__init__(f"version {version} of the format, only 1 is known", file=file)


class UnknownFlags(UnreadablePayload):
    """A flag that this reader does not know."""

    def __init__(self, file: str, flags: int) -> None:
        self.flags = flags
        super().__init__(f"unknown flags {flags:#06x}", file=file)


class HeaderTooLarge(UnreadablePayload):
    """A header or block index over its limit; also raised by the writer."""

    def __init__(self, file: str, part: str, actual: int, *, limit: int) -> None:
        self.part, self.actual, self.limit = part, actual, limit
        super().__init__(f"{part} {actual} over the limit of {limit}", file=file)


class HeaderCorrupt(UnreadablePayload):
    """The header's checksum is wrong, or a value in it breaks a rule."""

    def __init__(self, file: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"corrupt header: {reason}", file=file)


class TrailingBytes(UnreadablePayload):
    """More bytes than the file says it has."""

    def __init__(self, file: str, *, expected_bytes: int, actual_bytes: int) -> None:
        self.expected_bytes, self.actual_bytes = expected_bytes, actual_bytes
        super().__init__(f"{actual_bytes} bytes, must be {expected_bytes}", file=file)


class SectionsMisplaced(UnreadablePayload):
    """Sections or blocks overlap, leave a hole, or end elsewhere than the file."""

    def __init__(self, file: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"misplaced: {reason}", file=file)


class OtherRunPayload(UnreadablePayload):
    """A file of another run, by its path or by its header."""

    def __init__(self, file: str, *, found: str, expected: str) -> None:
        self.found, self.expected = found, expected
        super().__init__(f"belongs to run {found}, not {expected}", file=file)


class PayloadMisfiled(UnreadablePayload):
    """The header names another policy version or request than the path."""

    def __init__(self, file: str, *, part: str, found: object) -> None:
        self.part, self.found = part, found
        super().__init__(f"its header says {part} {found}", file=file)


class OtherModelPayload(UnreadablePayload):
    """A file of another model. ``differing`` names the keys of the fingerprint."""

    def __init__(self, file: str, differing: tuple[str, ...]) -> None:
        self.differing = differing
        super().__init__(f"written by another model: {', '.join(differing)} differ", file=file)


class UnsupportedEncoding(UnreadablePayload):
    """A section in an encoding that this reader does not know. Other sections stay readable."""

    def __init__(self, file: str, encoding: str) -> None:
        self.encoding = encoding
        super().__init__(f"unsupported encoding {encoding!r}", file=file)


class ChecksumMismatch(UnreadablePayload):
    """A block whose bytes are not those that were written."""

    def __init__(self, file: str, *, block: int, offset: int) -> None:
        self.block, self.offset = block, offset
        super().__init__(f"block {block} at byte {offset} has a wrong checksum", file=file)


class BlockMalformed(UnreadablePayload):
    """A block that breaks its encoding though its checksum is right: a faulty or hostile writer."""

    def __init__(self, file: str, *, block: int, reason: str) -> None:
        self.block, self.reason = block, reason
        super().__init__(f"block {block}: {reason}", file=file)


class SegmentRefused(PayloadError):
    """A segment asks for what the file does not have."""


class SegmentMismatch(SegmentRefused):
    """The segment's ``part`` is not that of the section, or its rows lie across a gap."""

    def __init__(self, file: str, *, part: str, found: object, expected: object) -> None:
        self.part, self.found, self.expected = part, found, expected
        super().__init__(f"segment says {part} {found}, the file {expected}", file=file)


class SegmentBeyondSection(SegmentRefused):
    """The segment's rows end after those of its section."""

    def __init__(self, file: str, *, row: int, rows: int, section_rows: int) -> None:
        self.row, self.rows, self.section_rows = row, rows, section_rows
        message = f"rows [{row}, {row + rows}) of a section with {section_rows}"
        super().__init__(message, file=file)


class SampledTokenMismatch(SegmentRefused):
    """The kept set at ``row`` of the segment is not that of the token that the reader has there."""

    def __init__(self, file: str, *, row: int, token_id: int) -> None:
        self.row, self.token_id = row, token_id
        message = f"the kept set at row {row} of the segment is not that of token {token_id}"
        super().__init__(message, file=file)


class WriteFailed(PayloadError):
    """An error of the operating system while writing or deleting. ``errno`` says which."""

    def __init__(self, file: str, error: OSError) -> None:
        self.errno = error.errno
        super().__init__(f"cannot be written: {error.strerror or error}", file=file)


def read_error(file: str, error: OSError) -> PayloadUnavailable:
    """The named error for what the operating system said while opening or reading ``file``."""
    if error.errno == errno.ENOENT:
        return PayloadNotFound(file)
    if error.errno == errno.ESTALE:
        return StalePayload(file)
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return NoDescriptorFree(file)
    return ReadFailed(file, error)
