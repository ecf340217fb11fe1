"""The header and block index of a payload file: made by the writer, refused or read by the reader.

``encode_front`` and ``parse_front`` are each other's inverse. Parsing takes bytes and the file's
real size, does no I/O, and allocates nothing that was not compared with that size before.
"""

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from sideband.model import ModelShape
from sideband.payload.errors import (
    HeaderCorrupt,
    HeaderTooLarge,
    NotAPayload,
    PayloadTruncated,
    TrailingBytes,
    UnknownFlags,
    UnreadableVersion,
)
from sideband.payload.layout import (
    BLOCK_ENTRY,
    BLOCKS_MAX,
    CHECKSUM,
    CHOICE_MAX,
    FILE_BYTES_MAX,
    FLAGS,
    HEADER_BYTES_MAX,
    MAGIC,
    PREFIX,
    PREFIX_BYTES,
    ROWS_MAX,
    VERSION,
    Buffer,
    aligned,
    checksum,
)

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Count = Annotated[int, msgspec.Meta(ge=1, le=ROWS_MAX)]
Position = Annotated[int, msgspec.Meta(ge=0, le=ROWS_MAX)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=FILE_BYTES_MAX)]
Run = tuple[Position, Position, Count]  # position, row, rows


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One field of one choice. Keys and their meaning: docs/payload-format.md."""

    choice: Annotated[int, msgspec.Meta(ge=0, le=CHOICE_MAX)]
    field: Name
    encoding: Name
    dtype: Name
    shape: tuple[Count, ...]
    layer_ids: tuple[Position, ...]
    offset: Offset
    size_bytes: Offset
    rows: Count
    runs: tuple[Run, ...]
    block_count: Annotated[int, msgspec.Meta(ge=1, le=BLOCKS_MAX)]


class PayloadHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose file this is and what it holds."""

    run_id: str
    request_id: str
    policy_version: Position
    model: ModelShape
    sections: tuple[Section, ...]


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """The first 32 bytes, checked against every limit."""

    header_bytes: int
    file_bytes: int
    checksum: int


_HEADER: Final = msgspec.json.Decoder(PayloadHeader)
_RESERVED: Final = FILE_BYTES_MAX  # stands for an offset that is not known yet: the longest one


def front_bytes(header: PayloadHeader) -> tuple[int, int]:
    """(header bytes, offset of the first section) with room for every offset and size.

    The length of the JSON depends on the offsets and they on it; so the header is sized for the
    longest ones and ends in spaces. Raises HeaderTooLarge.
    """
    longest = [
        msgspec.structs.replace(section, offset=_RESERVED, size_bytes=_RESERVED)
        for section in header.sections
    ]
    header_bytes = len(msgspec.json.encode(msgspec.structs.replace(header, sections=longest)))
    if header_bytes > HEADER_BYTES_MAX:
        raise HeaderTooLarge("", "header bytes", header_bytes, limit=HEADER_BYTES_MAX)
    blocks = total_blocks(header.sections)
    if blocks > BLOCKS_MAX:
        raise HeaderTooLarge("", "blocks", blocks, limit=BLOCKS_MAX)
    return header_bytes, aligned(PREFIX_BYTES + header_bytes + blocks * BLOCK_ENTRY.itemsize)


def encode_front(
    header: PayloadHeader, index: NDArray[np.void], *, header_bytes: int, file_bytes: int
) -> bytes:
    """All bytes before the first section; ``header_bytes`` as ``front_bytes`` said."""
    text = msgspec.json.encode(header).ljust(header_bytes)
    assert len(text) == header_bytes, "front_bytes sized the header for its longest form"
    body = text + index.tobytes()
    prefix = PREFIX.pack(MAGIC, VERSION, FLAGS, header_bytes, file_bytes)
    front = prefix + CHECKSUM.pack(checksum(prefix, body)) + body
    return front.ljust(aligned(len(front)), b"\0")


def parse_prefix(data: Buffer, *, size_bytes: int, file: str) -> Prefix:
    """The prefix at the start of ``data``, for a file of ``size_bytes``.

    Raises NotAPayload, UnreadableVersion, UnknownFlags, HeaderTooLarge, PayloadTruncated,
    TrailingBytes.
    """
    magic = bytes(data[: len(MAGIC)])
    if not MAGIC.startswith(magic):
        raise NotAPayload(file, magic)
    if min(len(data), size_bytes) < PREFIX_BYTES:
        raise PayloadTruncated(file, expected_bytes=PREFIX_BYTES, actual_bytes=size_bytes)
    _, version, flags, header_bytes, file_bytes = PREFIX.unpack_from(data)
    if version != VERSION:
        raise UnreadableVersion(file, version)
    if flags != FLAGS:
        raise UnknownFlags(file, flags)
    if header_bytes > HEADER_BYTES_MAX:
        raise HeaderTooLarge(file, "header bytes", header_bytes, limit=HEADER_BYTES_MAX)
    if file_bytes > size_bytes:
        raise PayloadTruncated(file, expected_bytes=file_bytes, actual_bytes=size_bytes)
    if file_bytes < size_bytes:
        raise TrailingBytes(file, expected_bytes=file_bytes, actual_bytes=size_bytes)
    if PREFIX_BYTES + header_bytes > file_bytes:
        raise HeaderCorrupt(file, f"{header_bytes} header bytes in a file of {file_bytes}")
    (stored_checksum,) = CHECKSUM.unpack_from(data, PREFIX.size)
    return Prefix(header_bytes=header_bytes, file_bytes=file_bytes, checksum=stored_checksum)


def decode_header(text: bytes | memoryview, *, file: str) -> PayloadHeader:
    """The header out of its JSON, each value within its own bounds. Raises HeaderCorrupt."""
    try:
        return _HEADER.decode(text)
    except msgspec.MsgspecError as exc:
        raise HeaderCorrupt(file, str(exc)) from exc


def index_bytes(header: PayloadHeader, prefix: Prefix, *, file: str) -> int:
    """Bytes of the block index. Raises HeaderTooLarge, HeaderCorrupt when it cannot fit."""
    blocks = total_blocks(header.sections)
    if blocks > BLOCKS_MAX:
        raise HeaderTooLarge(file, "blocks", blocks, limit=BLOCKS_MAX)
    size_bytes = blocks * BLOCK_ENTRY.itemsize
    if PREFIX_BYTES + prefix.header_bytes + size_bytes > prefix.file_bytes:
        raise HeaderCorrupt(file, f"{blocks} blocks in a file of {prefix.file_bytes} bytes")
    return size_bytes


def checked_index(view: memoryview, prefix: Prefix, *, file: str) -> NDArray[np.void]:
    """The block index out of the whole front, after its checksum. Raises HeaderCorrupt."""
    if checksum(view[: PREFIX.size], view[PREFIX_BYTES:]) != prefix.checksum:
        raise HeaderCorrupt(file, "wrong checksum")
    return np.frombuffer(view[PREFIX_BYTES + prefix.header_bytes :], BLOCK_ENTRY)


def total_blocks(sections: Sequence[Section]) -> int:
    """Entries that the block index must have."""
    return sum(section.block_count for section in sections)
