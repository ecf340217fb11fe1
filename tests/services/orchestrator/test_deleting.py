"""The executor of deletions: at a bounded rate, and until it has worked."""

import asyncio
import errno
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from services.orchestrator import deleting
from services.orchestrator.deleting import Deleter, Outcome
from sideband.ids import RunId
from sideband.payload.errors import WriteFailed
from sideband.payload.root import PayloadRoot


class Disk:
    """Answers as told, and counts."""

    def __init__(self, fail: Callable[[str, int], Exception | None]) -> None:
        self.fail, self.attempts, self.sizes = fail, Counter[str](), list[int]()
        self.deleted: list[str] = []
        self.failures = 0

    def act(self, files: list[str]) -> "asyncio.Future[list[Outcome]]":
        future: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()
        self.sizes.append(len(files))
        outcomes: list[Outcome] = []
        for file in files:
            self.attempts[file] += 1
            outcomes.append((file, self.fail(file, self.attempts[file]) or 10))  # type: ignore[arg-type]
        future.set_result(outcomes)
        return future

    def deleter(
        self, files_per_s: float = 1e6, *, clock_s: Callable[[], float] = time.monotonic
    ) -> Deleter:
        def failed(count: int) -> None:
            self.failures += count

        return Deleter(
            self.act,
            files_per_s=files_per_s,
            on_deleted=lambda files, _freed: self.deleted.extend(files),
            on_failure=failed,
            clock_s=clock_s,
        )


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EBUSY, errno.EIO, errno.ESTALE])
async def test_an_error_is_tried_again_and_holds_nothing_else_up(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deleting, "RETRY_WAIT_S_MIN", 0.001)

    def fail(file: str, attempt: int) -> Exception | None:
        if file == "bad" and attempt < 5:
            return WriteFailed(file, OSError(code, "as told"))
        return None

    disk = Disk(fail)
    deleter = disk.deleter()
    task = asyncio.create_task(deleter.run())
    deleter.add(["bad", *(f"good-{n}" for n in range(300))])
    assert await deleter.settled(timeout_s=20), "each was tried once"
    assert len(disk.deleted) >= 300
    await until(lambda: deleter.pending == 0)
    assert disk.attempts["bad"] == 5
    assert disk.failures == 4
    assert sorted(disk.deleted) == sorted(["bad", *(f"good-{n}" for n in range(300))])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_rate_bounds_what_is_asked_of_the_filesystem_at_a_time() -> None:
    disk = Disk(lambda _file, _attempt: None)
    deleter = disk.deleter(files_per_s=200.0)
    task = asyncio.create_task(deleter.run())
    deleter.add(f"f-{n}" for n in range(60))
    await until(lambda: deleter.pending == 0)
    assert max(disk.sizes) <= 20, "a tenth of a second's worth"
    assert len(disk.deleted) == 60
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_rate_bounds_the_files_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem that takes no time at all: the pauses are all that slows the work down."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def paused(pause_s: float) -> None:
        pauses.append(pause_s)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", paused)
    disk = Disk(lambda _file, _attempt: None)
    deleter = disk.deleter(files_per_s=200.0, clock_s=lambda: 0.0)
    task = asyncio.create_task(deleter.run())
    deleter.add(f"f-{n}" for n in range(70))
    assert await deleter.settled(timeout_s=20)
    assert pauses == pytest.approx([0.1, 0.1, 0.1, 0.05]), "20 files in a tenth of a second"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("is_gone_between", [False, True])
def test_a_file_that_is_gone_already_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gone_between: bool
) -> None:
    """By an earlier process, or by the sweep while this one looks."""
    root = PayloadRoot.create(tmp_path / "root", RunId("run"), fresh=True)
    file = "v0/run/00/r-0123456789abcdef.sbp"
    assert root.delete(file) == 0, "not even its folder is there"
    (root.path / file).parent.mkdir(parents=True)
    (root.path / file).write_bytes(b"12345")
    if is_gone_between:
        (root.path / file).unlink()
        seen = os.stat(tmp_path)
        monkeypatch.setattr(os, "stat", lambda *_, **__: seen)
    else:
        assert root.delete(file) == 5
    assert root.delete(file) == 0
