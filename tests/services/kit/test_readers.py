"""Reader processes: bounded, owned, replaced when they die, and never waited for without end."""

import asyncio
import errno
import os
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from services.kit.readers.framing import BEGIN, PREFIX
from services.kit.readers.held import SMALL_BYTES_MAX, held_body
from services.kit.readers.pool import ReaderJob, ReaderLimits, ReaderLost, ReaderPool, ReadersBusy
from services.kit.readers.process import PROGRAM

MODULE = "tests.services.kit.odd_reader"
LIMITS = ReaderLimits(bytes_max=4 * SMALL_BYTES_MAX, processes=1)


def pool_of(*, processes: int = 1, wait_s: float = 60.0) -> ReaderPool:
    return ReaderPool(MODULE, replace(LIMITS, processes=processes, wait_s=wait_s))


@pytest.fixture
async def pool() -> AsyncIterator[ReaderPool]:
    async with ReaderPool(MODULE, LIMITS) as pool:
        yield pool


async def asked(job: ReaderJob, head: bytes = b"", *body: bytes) -> tuple[int, int, bytes]:
    """How often this conversation was asked, the process that answered, and its body."""
    answer, data = await job.ask(head, deque(body))
    count, process = map(int, answer.split())
    return count, process, bytes(data)


def is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_conversation_has_a_memory_and_the_next_one_has_not(pool: ReaderPool) -> None:
    large = os.urandom(3 << 20)
    async with pool.job() as job:
        assert await asked(job, b"", b"ab", b"c") == (1, (await asked(job))[1], b"cba")
        assert (await asked(job, b"", large[:5], large[5:]))[::2] == (3, large[::-1])
    async with pool.job() as job:
        assert (await asked(job))[0] == 1


async def test_a_process_reads_elsewhere_and_is_used_again(pool: ReaderPool) -> None:
    found = set()
    for _ in range(3):
        async with pool.job() as job:
            found.add((await asked(job))[1])
    assert len(found) == 1
    assert found != {os.getpid()}


async def test_the_loop_goes_on_while_a_body_is_sent_and_read(pool: ReaderPool) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with pool.job() as job:
        await asked(job)  # the process runs
        counting = asyncio.create_task(count())
        parts = [bytes(64 << 10)] * 64
        before = turns
        assert len((await asked(job, b"", *parts))[2]) == 4 << 20
        counting.cancel()
    # Each part is a wait for the pipe to be empty, and so is each part of the answer.
    assert turns - before > len(parts)


@pytest.mark.parametrize("how", [b"die", b"raise"])
async def test_a_reader_that_dies_fails_its_own_request_only(pool: ReaderPool, how: bytes) -> None:
    async with pool.job() as job:
        first = (await asked(job))[1]
        with pytest.raises(ReaderLost) as lost:
            await asked(job, how)
        assert (lost.value.status, lost.value.headers) == (503, {"Retry-After": "1"})
    async with pool.job() as job:
        count, second, _ = await asked(job)
        assert count == 1
        assert second != first


async def test_a_system_without_room_for_a_process_fails_one_request(
    pool: ReaderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "too many processes")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", refused)
        async with pool.job() as job:
            with pytest.raises(ReaderLost):
                await asked(job)
    async with pool.job() as job:
        assert (await asked(job))[0] == 1


async def test_a_reader_that_does_not_answer_in_time_is_ended() -> None:
    async with pool_of() as pool:
        async with pool.job() as job:
            process = (await asked(job))[1]
        pool.limits = replace(pool.limits, answer_s=0.01)
        async with pool.job() as job:
            with pytest.raises(ReaderLost, match=r"longer than 0\.01 s"):
                await asked(job, b"hang")
    assert not is_there(process)


async def test_who_leaves_in_the_middle_of_an_answer_ends_the_reader(pool: ReaderPool) -> None:
    processes: list[int] = []

    async def leave() -> None:
        async with pool.job() as job:
            processes.append((await asked(job))[1])
            await asked(job, b"hang")

    leaving = asyncio.create_task(leave())
    while not processes:  # noqa: ASYNC110 - the pool has no event of this
        await asyncio.sleep(0.001)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    async with pool.job() as job:
        assert (await asked(job))[1] != processes[0]


async def test_without_a_free_reader_the_wait_has_an_end() -> None:
    async with pool_of(wait_s=0.01) as pool:
        async with pool.job():
            with pytest.raises(ReadersBusy, match="No reader came free") as busy:
                async with pool.job():
                    raise AssertionError("there is only one")
            assert (busy.value.status, busy.value.headers) == (503, {"Retry-After": "1"})
        async with pool.job() as job:
            assert (await asked(job))[0] == 1


async def test_a_reader_that_is_done_with_early_serves_others(pool: ReaderPool) -> None:
    async with pool.job() as first:
        process = (await asked(first))[1]
        first.done()
        async with pool.job() as second:
            assert (await asked(second))[:2] == (1, process)


async def test_large_bodies_are_counted_together_and_refused_beyond(pool: ReaderPool) -> None:
    with held_body(pool) as small, held_body(pool) as large:
        small.add(bytes(SMALL_BYTES_MAX))
        assert not small.is_large
        large.add(bytes(3 * SMALL_BYTES_MAX))
        large.add(bytes(SMALL_BYTES_MAX))
        with pytest.raises(ReadersBusy, match=f"{4 * SMALL_BYTES_MAX} bytes of large bodies"):
            small.add(b"1")
    with held_body(pool) as again:
        again.add(bytes(4 * SMALL_BYTES_MAX))
        assert again.is_large


async def test_nothing_is_left_when_the_pool_is_closed() -> None:
    async with pool_of(processes=2) as pool, pool.job() as one, pool.job() as other:
        processes = [(await asked(one))[1], (await asked(other))[1]]
        assert all(map(is_there, processes))
        assert len(set(processes)) == 2
        one.done()
    assert not any(map(is_there, processes))


@pytest.mark.parametrize(
    "torn", [b"", PREFIX.pack(BEGIN, 4, 0)[:5], PREFIX.pack(BEGIN, 2, 9) + b"he"]
)
def test_a_reader_ends_when_its_service_is_gone(torn: bytes) -> None:
    command = [sys.executable, "-c", PROGRAM, MODULE, *sys.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(PREFIX.size)  # it is ready
        answers, _ = process.communicate(torn, timeout=30)
    assert (process.returncode, answers) == (0, b"")
