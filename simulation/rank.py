"""One trainer rank: takes its micro batches, keeps what it got for the checker, commits."""

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from threading import Event
from typing import Any, Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from sideband import ModelShape, RankFeed, RankKeys, RankMicroBatch, ResumePoint
from simulation.memory import peak_bytes, resident_bytes

DUMP_SUFFIX: Final = ".dump"
DONE_SUFFIX: Final = ".done.json"  # written last: the rank saw the end of the feed


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """Which rank, of which feed, and where it puts what it got."""

    endpoint: str
    dp_rank: int
    cp_rank: int
    global_rank: int
    payload_root: Path | None
    run_id: str
    model: ModelShape
    out: Path
    step_timeout_s: float = 120.0
    keys: RankKeys | None = None
    keeps_state: bool = False  # a rank that may be killed goes on where its checkpoint says
    compute_s: float = 0.0  # of a step, beside what it reads


def run_rank(settings: RankSettings) -> None:
    """Until the feed ends. Raises what RankFeed raises: a rank that fails exits non-zero."""
    settings.out.mkdir(parents=True, exist_ok=True)
    if not settings.keeps_state:
        _forget_earlier(settings)
    idle_bytes = resident_bytes(os.getpid())
    with RankFeed(
        settings.endpoint,
        dp_rank=settings.dp_rank,
        cp_rank=settings.cp_rank,
        global_rank=settings.global_rank,
        payload_root=settings.payload_root,
        run_id=settings.run_id,
        model=settings.model,
        committed_step=checkpoint(settings) if settings.keeps_state else None,
        resume=_kept(settings) if settings.keeps_state else None,
        step_timeout_s=settings.step_timeout_s,
        keys=settings.keys,
    ) as feed:
        for step in feed:
            for batch in step:
                dump(batch, settings)
            Event().wait(settings.compute_s)
            if settings.keeps_state:
                _save_checkpoint(settings, step.resume_point)
            step.commit()
    grown_bytes = max(0, peak_bytes(os.getpid()) - idle_bytes)
    _done_path(settings).write_text(json.dumps({"grown_bytes": grown_bytes}))


def _done_path(settings: RankSettings) -> Path:
    return settings.out / f"rank{settings.global_rank}{DONE_SUFFIX}"


def _checkpoint_path(settings: RankSettings, step: int | None = None) -> Path:
    """Of ``step``, as its trainer keeps it; without, of the one that the rank restarts from."""
    name = f"rank{settings.global_rank}" + ("" if step is None else f"-s{step:05d}")
    return settings.out / f"{name}.checkpoint"


def _kept(settings: RankSettings) -> dict[str, Any] | None:
    try:
        kept: dict[str, Any] = json.loads(_checkpoint_path(settings).read_text())
    except FileNotFoundError:
        return None
    return kept


def checkpoint(settings: RankSettings) -> int:
    """The step whose optimizer step this rank holds."""
    kept = _kept(settings)
    return 0 if kept is None else int(kept["step"])


def go_back(settings: RankSettings, step: int, aside: Path) -> None:
    """The rank, which has ended, is to restart from ``step``: what it trained since lies ``aside``.

    What it had not committed is not kept: it may be there in part.
    """
    committed = checkpoint(settings)
    assert committed >= step, "every rank had committed what it goes back to"
    for path in settings.out.glob(f"*-d{settings.dp_rank}-c{settings.cp_rank}{DUMP_SUFFIX}"):
        its_step = int(path.name[1:6])
        if step < its_step <= committed:
            path.replace(aside / path.name)
        elif its_step > committed:
            path.unlink()
    if step == 0:
        _checkpoint_path(settings).unlink(missing_ok=True)
    else:
        _replace(_checkpoint_path(settings), _checkpoint_path(settings, step).read_text())


def has_dumps(settings: RankSettings, after: int) -> bool:
    """Whether the rank took anything of a step after ``after``."""
    names = settings.out.glob(f"*-d{settings.dp_rank}-c{settings.cp_rank}{DUMP_SUFFIX}")
    return any(int(path.name[1:6]) > after for path in names)


def _save_checkpoint(settings: RankSettings, point: ResumePoint) -> None:
    """As a trainer does after its optimizer step and before it commits; each one is kept."""
    for step in (point["step"], None):
        _replace(_checkpoint_path(settings, step), json.dumps(point))


def _replace(path: Path, text: str) -> None:
    """Whole or not at all."""
    aside = path.with_suffix(".aside")
    aside.write_text(text)
    aside.replace(path)


def _forget_earlier(settings: RankSettings) -> None:
    """What this rank left in an earlier run must not be taken for this one's."""
    _done_path(settings).unlink(missing_ok=True)
    for path in settings.out.glob(f"*-d{settings.dp_rank}-c{settings.cp_rank}{DUMP_SUFFIX}"):
        path.unlink()


class StoredArray(msgspec.Struct, frozen=True, array_like=True):
    """One array: numpy's dtype string, shape, and the values in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: NDArray[Any]) -> Self:
        """Copies the values."""
        return cls(array.dtype.str, array.shape, array.tobytes())

    def array(self) -> NDArray[Any]:
        """Read-only; shares memory."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class StoredBatch(msgspec.Struct, frozen=True):
    """One micro batch as one rank got it: every field of ``RankMicroBatch``, and its digest."""

    plain: dict[str, Any]
    arrays: dict[str, StoredArray]


def dump(batch: RankMicroBatch, settings: RankSettings) -> None:
    """Write every array of a micro batch, and its digest, to one file."""
    arrays: dict[str, StoredArray] = {}
    plain: dict[str, Any] = {
        "dp_rank": settings.dp_rank,
        "cp_rank": settings.cp_rank,
        "digest": batch.digest(),
    }
    for item in fields(batch):
        value = getattr(batch, item.name)
        if isinstance(value, np.ndarray):
            arrays[item.name] = StoredArray.of(value)
        else:
            plain[item.name] = value
    name = f"s{batch.step:05d}-m{batch.index:05d}-d{settings.dp_rank}-c{settings.cp_rank}"
    content = msgspec.msgpack.encode(StoredBatch(plain=plain, arrays=arrays))
    (settings.out / f"{name}{DUMP_SUFFIX}").write_bytes(content)
