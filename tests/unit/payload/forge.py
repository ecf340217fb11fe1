"""Payload files made by the page alone, with right checksums, so that any lie can be told in them.

Not by the library's writer: a fault that writer and reader share would stay hidden.
"""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from sideband.masks.rows import MaskRows
from sideband.payload import PayloadError, PayloadReader, PayloadRoot
from sideband.segments import PayloadSegment

Header = dict[str, Any]
Index = list[list[int]]  # offset, size, rows, checksum of each block
Change = Callable[[Header, Index], None]
Block = tuple[int, bytes]  # rows, stored bytes
FILE = "v3/run-1/00/req-1-0123456789abcdef.sbp"
MODEL: Header = {
    "num_layers": 4,
    "layer_ids": [1, 3],
    "top_k": 2,
    "id_space": 300,
    "vocab_size": 1000,
}
ROUTING = struct.pack("<12H", *range(12))  # 3 rows of 8 bytes
SAMPLED = [999, 3, 5]  # the second has no kept set
MASKS = struct.pack("<4II", 0, 2, 2, 3, 7 | 999 << 10 | 5 << 20)


@dataclass
class Forgery:
    """A correct file of 3 routing rows (2, 3 | 5) in two blocks and 3 mask rows, until changed.

    ``change`` edits the header and the block index after both were placed; checksums are made last.
    """

    blocks: list[list[Block]] = field(
        default_factory=lambda: [[(2, ROUTING[:16]), (1, ROUTING[16:])], [(3, MASKS)]]
    )
    change: Change = lambda header, index: None
    prefix: dict[str, int] = field(default_factory=dict)
    header_text: bytes | None = None
    tail: bytes = b""

    def file_bytes(self) -> bytes:
        text, index, front = self._placed()
        text = self.header_text if self.header_text is not None else text
        packed = b"".join(struct.pack("<QIIQ", *entry) for entry in index)
        sections = [b"".join(stored for _, stored in blocks) for blocks in self.blocks]
        body = b""
        for section in sections:
            body += bytes(-(front + len(body)) % 64) + section
        front_data = text.ljust(front - 32 - len(packed)) + packed
        values = {"version": 1, "flags": 0, "header_bytes": front - 32 - len(packed)}
        values |= {"file_bytes": front + len(body) + len(self.tail)} | self.prefix
        prefix = struct.pack("<8sHHIQ", b"SIDEBAND", *values.values())
        checksum = xxhash.xxh3_64_intdigest(prefix + front_data)
        return prefix + struct.pack("<Q", checksum) + front_data + body + self.tail

    def _placed(self) -> tuple[bytes, list[list[int]], int]:
        """Header text, block index and the bytes of the front, with room for any edit."""
        front = 32 + 2000 + 24 * sum(map(len, self.blocks))
        reached, index = front, []
        header: Header = {
            "run_id": "run-1",
            "request_id": "req-1",
            "policy_version": 3,
            "model": dict(MODEL),
            "sections": [],
        }
        for number, blocks in enumerate(self.blocks):
            reached += -reached % 64
            offset = reached
            for rows, stored in blocks:
                index.append([reached, len(stored), rows, xxhash.xxh3_64_intdigest(stored)])
                reached += len(stored)
            header["sections"].append(
                {
                    **(ROUTING_SECTION if number == 0 else MASK_SECTION),
                    "offset": offset,
                    "size_bytes": reached - offset,
                    "block_count": len(blocks),
                }
            )
        self.change(header, index)
        front = 32 + 2000 + 24 * len(index)
        return json.dumps(header).encode(), index, front

    def put(self, root: PayloadRoot, file: str = FILE) -> str:
        return put(root, self.file_bytes(), file)


ROUTING_SECTION: Header = {
    "choice": 0,
    "field": "routed_experts",
    "encoding": "raw",
    "dtype": "uint16",
    "shape": [2, 2],
    "layer_ids": [1, 3],
    "rows": 3,
    "runs": [[2, 0, 2], [5, 2, 1]],
}
MASK_SECTION: Header = {
    "choice": 0,
    "field": "sampling_mask",
    "encoding": "csr-bits",
    "dtype": "int32",
    "shape": [1000],
    "layer_ids": [],
    "rows": 3,
    "runs": [[4, 0, 3]],
}


def put(root: PayloadRoot, data: bytes, file: str = FILE) -> str:
    path: Path = root.path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return file


def routing_segment(offset: int = 2112, file: str = FILE, **changes: Any) -> PayloadSegment:
    """Rows [0, 2) of the forgery's routing."""
    facts: dict[str, Any] = {
        "field": "routed_experts",
        "file": file,
        "offset": offset,
        "row": 0,
        "pos": 2,
        "rows": 2,
        "dtype": "uint16",
        "shape": (2, 2),
    }
    return PayloadSegment(**facts | changes)


def mask_segment(offset: int = 2176, file: str = FILE, **changes: Any) -> PayloadSegment:
    """All mask rows of the forgery."""
    facts: dict[str, Any] = {
        "field": "sampling_mask",
        "file": file,
        "offset": offset,
        "row": 0,
        "pos": 4,
        "rows": 3,
        "dtype": "int32",
        "shape": (1000,),
    }
    return PayloadSegment(**facts | changes)


def read_masks(reader: PayloadReader, segment: PayloadSegment) -> MaskRows:
    """The kept sets of the segment with the tokens that the forgery's writer sampled."""
    sampled = (SAMPLED + [0] * segment.rows)[segment.row : segment.row + segment.rows]
    return reader.read_masks(segment, np.array(sampled, np.int32))


def section(number: int, **facts: object) -> Change:
    return lambda header, index: header["sections"][number].update(facts)


def model(**facts: object) -> Change:
    return lambda header, index: header["model"].update(facts)


def top(**facts: object) -> Change:
    return lambda header, index: header.update(facts)


def dropped(number: int, key: str) -> Change:
    return lambda header, index: header["sections"][number].pop(key)


def entry(number: int, place: int, value: int) -> Change:
    def change(header: Header, index: Index) -> None:
        index[number][place] = value

    return change


def both(*changes: Change) -> Change:
    def change(header: Header, index: Index) -> None:
        for one in changes:
            one(header, index)

    return change


def refused(reader: PayloadReader, error: type[PayloadError], file: str = FILE) -> Any:
    """The error that opening the file ends in, which must be exactly that one."""
    with pytest.raises(PayloadError) as caught:
        reader.header(file)
    assert type(caught.value) is error, caught.value
    return caught.value
