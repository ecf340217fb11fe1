"""Samples in parts: no row of the ledger is larger than one, whatever a rollout carries.

A driver handles a row in one call, which holds the event loop. The parts of a rollout, joined, are
what ``encode_samples`` gives; each row says how many there are. Rows of before are the only part of
their rollout, and of any size.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from services.orchestrator.storage.samples import (
    UnreadableSamples,
    decode_samples,
    encoded_pieces,
)
from sideband.batch.types import Sample
from sideband.ids import RolloutId

PART_BYTES: Final = 1 << 20  # some milliseconds of a driver

BodyRow = tuple[str, int, int, bytes]  # rollout, number of the part, how many there are, the part


def encoded_parts(samples: tuple[Sample, ...]) -> tuple[int, Iterator[bytes]]:
    """How many parts the samples of one rollout have, and the parts, each joined when it is asked
    for. Copies arrays: call it, and ask, in a thread.
    """
    pieces = list(encoded_pieces(samples))
    return -(-sum(map(len, pieces)) // PART_BYTES), _joined(pieces)


def _joined(pieces: list[bytes | memoryview]) -> Iterator[bytes]:
    part: list[memoryview] = []
    free_bytes = PART_BYTES
    for piece in pieces:
        view = memoryview(piece)
        while view:
            taken = view[:free_bytes]
            view = view[len(taken) :]
            part.append(taken)
            free_bytes -= len(taken)
            if not free_bytes:
                yield b"".join(part)
                part, free_bytes = [], PART_BYTES
    if part:
        yield b"".join(part)


class BodiesRead:
    """Samples of some rollouts, read from rows that come in the order of their parts."""

    def __init__(self) -> None:
        self._whole: dict[str, memoryview] = {}
        self._joined: dict[str, _Joined] = {}

    def take(self, rows: Iterable[BodyRow]) -> None:
        """Some rows, which are not needed any more. Copies them: call it in a thread.

        Raises UnreadableSamples.
        """
        for name, part, count, data in rows:
            if count == 1:
                self._whole[name] = memoryview(data)
            else:
                self._joined.setdefault(name, _Joined(name, count)).take(part, count, data)

    def samples(self) -> dict[RolloutId, tuple[Sample, ...]]:
        """All of them, as views of what was read. Raises UnreadableSamples."""
        bodies = {**self._whole, **{name: one.body() for name, one in self._joined.items()}}
        return {RolloutId(name): decode_samples(body) for name, body in bodies.items()}


class _Joined:
    """The parts of one rollout, each at its place."""

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count = name, count
        self._taken = self._stop = 0
        # Not zeroed first: that would touch all of it in one call.
        self._buffer: memoryview = np.empty(count * PART_BYTES, np.uint8).data

    def take(self, part: int, count: int, data: bytes) -> None:
        if part != self._taken or count != self._count or len(data) > PART_BYTES:
            raise UnreadableSamples(f"{self._name}: part {part} of {count} follows {self._taken}")
        self._buffer[self._stop : self._stop + len(data)] = data
        self._taken += 1
        self._stop += len(data)

    def body(self) -> memoryview:
        if self._taken != self._count:
            raise UnreadableSamples(f"{self._name}: {self._taken} of {self._count} parts")
        return self._buffer[: self._stop].toreadonly()
