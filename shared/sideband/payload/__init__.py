"""Payload files: one per request, written once, read by rows."""

from sideband.payload.columns import ChoicePayload, MaskColumn, RoutingRows
from sideband.payload.errors import PayloadError
from sideband.payload.reader import PayloadReader
from sideband.payload.root import PayloadRoot, StoredFile
from sideband.payload.writer import WriteReport, write_payload

__all__ = [
    "ChoicePayload",
    "MaskColumn",
    "PayloadError",
    "PayloadReader",
    "PayloadRoot",
    "RoutingRows",
    "StoredFile",
    "WriteReport",
    "write_payload",
]
