"""Payload files for the rows that touch a disk, and the plain system calls beside them."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.workload import kept_sets, routing_rows, sampled_tokens
from sideband.ids import RequestId, RunId
from sideband.model import ModelShape
from sideband.payload.columns import ChoicePayload, MaskColumn, RoutingRows
from sideband.payload.encodings import DEFAULT_ENCODINGS, Encodings
from sideband.payload.root import PayloadRoot
from sideband.payload.writer import WriteReport, write_payload

PLAIN_WRITE_BYTES: Final = 1 << 20


@contextmanager
def payload_root() -> Iterator[PayloadRoot]:
    """A fresh root on the default temporary folder's file system (``TMPDIR`` moves it)."""
    with tempfile.TemporaryDirectory(prefix="sideband-bench-") as folder:
        yield PayloadRoot.create(Path(folder) / "payloads", RunId("bench"), fresh=True)


def request_of(
    model: ModelShape, *, prompt_tokens: int, completion_tokens: int, with_masks: bool, seed: int
) -> ChoicePayload:
    """What an engine has in memory when a request ends."""
    tokens = prompt_tokens + completion_tokens
    routing = RoutingRows(pos=0, rows_NLK=routing_rows(model, tokens - 1, seed=seed))
    masks = None
    if with_masks:
        kept = kept_sets(completion_tokens, vocab_size=model.vocab_size, seed=seed)
        sampled = sampled_tokens(kept, seed=seed)
        masks = MaskColumn(pos=prompt_tokens, masks=kept, sampled_token_ids_N=sampled)
    return ChoicePayload(choice=0, routing=routing, masks=masks)


def publish(
    root: PayloadRoot,
    model: ModelShape,
    choice: ChoicePayload,
    name: str,
    *,
    encodings: Encodings = DEFAULT_ENCODINGS,
) -> WriteReport:
    """Write one request's file as an engine does."""
    return write_payload(
        root,
        policy_version=0,
        request_id=RequestId(name),
        model=model,
        choices=[choice],
        encodings=encodings,
    )


def write_plainly(folder: Path, name: str, data: bytes) -> None:
    """The limit of a durable write: write, fsync, rename, fsync of the folder.

    By the megabyte, as ``dd bs=1M`` does it: one call for all took 6 or 30 ms where this takes 6.
    """
    staging, target = folder / f".{name}.staging", folder / name
    fd = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view[:PLAIN_WRITE_BYTES]) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    staging.rename(target)
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def pread_into(fd: int, ranges: Sequence[tuple[int, int]], buffer: memoryview) -> None:
    """The limit of a read: each (offset, bytes) by plain ``preadv`` into warm memory."""
    reached = 0
    for offset, size in ranges:
        done = 0
        while done < size:
            done += os.preadv(fd, [buffer[reached + done : reached + size]], offset + done)
        reached += size


def warm_buffer(size_bytes: int) -> NDArray[np.uint8]:
    """Memory whose pages are there already."""
    buffer = np.empty(size_bytes, np.uint8)
    buffer.fill(1)
    return buffer
