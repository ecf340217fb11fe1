"""Puts the chunks of context-parallel ranks together again, and cuts sequences out of them. Pure
but for reading what ranks wrote.

Legend: L tokens of a packed row, N rows of one chunk, T tokens of a sequence, M kept ids.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from sideband.masks.rows import MaskRows, RaggedRows, ScoreRows
from sideband.routing.rows import RowArray
from simulation.rank import DUMP_SUFFIX, StoredBatch

Place = tuple[int, int, int]  # step, micro batch, data rank
PER_TOKEN: Final = (
    "input_ids",
    "labels",
    "loss_mask",
    "advantages",
    "logprobs",
    "temperatures",
    "position_ids",
    "routing_valid",
)


class IncompleteRow(Exception):
    """Chunks that do not tile their packed row, or disagree about it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankDump:
    """One micro batch as one rank got it."""

    plain: dict[str, Any]
    arrays: dict[str, NDArray[Any]]

    @property
    def place(self) -> Place:
        """Which micro batch it is a part of."""
        return (self.plain["step"], self.plain["index"], self.plain["dp_rank"])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequence:
    """One sequence as the ranks of a data rank got it together; labels' alignment ("next")."""

    sample_id: str | None
    env_name: str
    policy_version: int  # at dispatch
    columns: dict[str, NDArray[Any]]  # [T] each, PER_TOKEN
    routing: RowArray | None  # [T, layers, top-k]
    masks: MaskRows  # T rows
    weight_versions_T: NDArray[np.int32] | None
    scores: ScoreRows | None = None  # of the kept ids


def load_dumps(folder: Path) -> list[RankDump]:
    """Everything that ranks wrote into a folder, by place and context-parallel rank."""
    dumps = []
    for path in sorted(folder.glob(f"*{DUMP_SUFFIX}")):
        stored = msgspec.msgpack.decode(path.read_bytes(), type=StoredBatch)
        arrays = {name: array.array() for name, array in stored.arrays.items()}
        dumps.append(RankDump(plain=stored.plain, arrays=arrays))
    return dumps


def by_place(dumps: list[RankDump]) -> dict[Place, list[RankDump]]:
    """The chunks of each packed row, by context-parallel rank."""
    rows: dict[Place, list[RankDump]] = defaultdict(list)
    for dump in dumps:
        rows[dump.place].append(dump)
    return {
        place: sorted(parts, key=lambda part: int(part.plain["cp_rank"]))
        for place, parts in sorted(rows.items())
    }


def sequences_of(parts: list[RankDump]) -> Iterator[tuple[Sequence, Sequence]]:
    """Each sequence of one packed row, and the padding behind it. Raises IncompleteRow."""
    row = _whole_row(parts)
    boundaries = row.arrays["cu_seqlens"].tolist()
    lengths = row.arrays["sequence_lengths"].tolist()
    for index, length in enumerate(lengths):
        start, stop = boundaries[index], boundaries[index + 1]
        yield _cut(row, index, start, start + length), _cut(row, index, start + length, stop)


def _whole_row(parts: list[RankDump]) -> RankDump:
    """One dump with all rows of all chunks, in packed order."""
    first = parts[0]
    for part in parts[1:]:
        for name in ("cu_seqlens", "sequence_lengths"):
            if not np.array_equal(part.arrays[name], first.arrays[name]):
                raise IncompleteRow(f"{first.place}: {name} differs between context ranks")
        if part.plain["sample_ids"] != first.plain["sample_ids"]:
            raise IncompleteRow(f"{first.place}: sample ids differ between context ranks")
    positions = np.concatenate([part.arrays["packed_positions"] for part in parts])
    row_tokens = int(first.arrays["cu_seqlens"][-1])
    order = np.argsort(positions, kind="stable")
    if not np.array_equal(positions[order], np.arange(row_tokens)):
        raise IncompleteRow(f"{first.place}: chunks do not tile {row_tokens} tokens")
    arrays = {name: first.arrays[name] for name in ("cu_seqlens", "sequence_lengths")}
    for name in PER_TOKEN:
        arrays[name] = np.concatenate([part.arrays[name][0] for part in parts])[order]
    for name in ("routed_experts", "weight_versions"):
        if name in first.arrays:
            rows = np.concatenate([part.arrays[name][0] for part in parts])
            arrays[name] = rows[order]
    for name in ("mask_ids", "mask_logprobs"):
        if name in first.arrays:
            own: list[RaggedRows[Any]] = [
                RaggedRows(part.arrays["mask_starts"], part.arrays[name]) for part in parts
            ]
            arrays["mask_starts"], arrays[name] = _reordered(RaggedRows.concatenate(own), order)
    return RankDump(plain=first.plain, arrays=arrays)


def _reordered(
    rows: RaggedRows[Any], order: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    counts = np.diff(rows.starts_N)[order]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    first_M = np.repeat(rows.starts_N[:-1][order], counts)
    within_M = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    return starts, rows.values_M[first_M + within_M]


def _cut(row: RankDump, index: int, start: int, stop: int) -> Sequence:
    routing, versions = (row.arrays.get(name) for name in ("routed_experts", "weight_versions"))
    masks = MaskRows(row.arrays["mask_starts"], row.arrays["mask_ids"])
    scores = row.arrays.get("mask_logprobs")
    score_rows = None if scores is None else ScoreRows(row.arrays["mask_starts"], scores)
    return Sequence(
        sample_id=row.plain["sample_ids"][index],
        env_name=row.plain["env_names"][index],
        policy_version=row.plain["policy_versions"][index],
        columns={name: row.arrays[name][start:stop] for name in PER_TOKEN},
        routing=None if routing is None else routing[start:stop],
        masks=masks.slice(start, stop),
        scores=None if score_rows is None else score_rows.slice(start, stop),
        weight_versions_T=None if versions is None else versions[start:stop],
    )
