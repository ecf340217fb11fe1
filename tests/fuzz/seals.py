"""Checksums that fit any bytes, made by docs/payload-format.md alone: a writer that lies."""

import struct

import msgspec
import xxhash

PREFIX_BYTES = 32
ENTRY = struct.Struct("<QIIQ")  # offset, size, rows, checksum


def sealed(data: bytes) -> bytes:
    """``data`` with the checksums of its blocks and front made right, as far as it has them."""
    if len(data) < PREFIX_BYTES:
        return data
    found = bytearray(data)
    [header_bytes] = struct.unpack_from("<I", data, 12)
    header_stop = PREFIX_BYTES + header_bytes
    front_stop = header_stop + ENTRY.size * _block_count(data[PREFIX_BYTES:header_stop])
    if front_stop > len(data):
        return data
    for place in range(header_stop, front_stop, ENTRY.size):
        offset, size_bytes, rows, _ = ENTRY.unpack_from(data, place)
        digest = xxhash.xxh3_64_intdigest(data[offset : offset + size_bytes])
        ENTRY.pack_into(found, place, offset, size_bytes, rows, digest)
    front = found[:24] + found[PREFIX_BYTES:front_stop]
    struct.pack_into("<Q", found, 24, xxhash.xxh3_64_intdigest(bytes(front)))
    return bytes(found)


def _block_count(header: bytes) -> int:
    """What the sections say together; 0 where no header can be read."""
    try:
        sections = msgspec.json.decode(header, type=_Header).sections
    except msgspec.MsgspecError:
        return 0
    return sum(section.block_count for section in sections)


class _Section(msgspec.Struct):
    block_count: int


class _Header(msgspec.Struct):
    sections: list[_Section]
