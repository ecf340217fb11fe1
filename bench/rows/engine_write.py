"""The engine's side: one request of 30 k tokens becomes durable; inline it becomes a JSON body."""

import asyncio
import time
from collections.abc import Callable
from itertools import count, pairwise
from typing import Any, Final

import msgspec
import orjson

from bench.files import payload_root, publish, request_of, write_plainly
from bench.memory import Held, in_child
from bench.registry import Row
from bench.results import Claim, Measurement, RowResult
from bench.rows.masks import without_loops
from bench.scale import Scale
from bench.timing import paired
from bench.workload import QWEN3_30B
from sideband.compiled import compile_loops
from sideband.engines.npy import encode_npy_base64
from sideband.payload.columns import ChoicePayload
from sideband.payload.root import PayloadRoot

OURS: Final = "Sideband: check, encode, checksum, write, sync"
NUMPY_ONLY: Final = "Sideband without compiled loops"
PLAIN: Final = "limit: write + fsync + rename + fsync of the folder"
INLINE: Final = "inline: base64 and JSON of the same rows"
HEARTBEAT_S: Final = 0.0005
BLOCKED_MAX_S: Final = 0.005


def measure(scale: Scale) -> RowResult:
    """Time against the plain durable write, and how long an event loop beside it stands still."""
    prompt, completion = scale.pick(tiny=(60, 40), quick=(20_000, 10_000), full=(20_000, 10_000))
    choice = request_of(
        QWEN3_30B, prompt_tokens=prompt, completion_tokens=completion, with_masks=True, seed=1
    )
    number = count()
    compile_loops()
    with payload_root() as root:
        size_bytes = publish(root, QWEN3_30B, choice, "first").size_bytes
        folder = root.path / "plain"
        folder.mkdir()
        data = bytes(size_bytes)

        def write() -> object:
            return publish(root, QWEN3_30B, choice, f"request-{next(number)}")

        sides: dict[str, Callable[[], object]] = {
            OURS: write,
            NUMPY_ONLY: lambda: without_loops(write),
            PLAIN: lambda: write_plainly(folder, f"plain-{next(number)}", data),
            INLINE: lambda: inline_body(choice),
        }
        timings = paired(sides, rounds=scale.pick(tiny=1, quick=15, full=31))
        blocked_s, alone_s = asyncio.run(
            longest_stalls(root, choice, writes=scale.pick(tiny=1, quick=10, full=30))
        )
    inline_bytes = len(inline_body(choice))
    peak = in_child(measure_peak, prompt=prompt, completion=completion)
    return RowResult(
        name="engine_write",
        title="The engine writes one request",
        setting=f"{prompt} prompt and {completion} completion tokens, 384 B rows (Qwen3-30B-A3B) "
        f"and masks, {size_bytes} bytes, file system as in the head",
        measurements=[
            _with_peak(timings.measurement(OURS, size_bytes=size_bytes), peak["ours"]),
            timings.measurement(NUMPY_ONLY, size_bytes=size_bytes),
            timings.measurement(PLAIN, size_bytes=size_bytes),
            _with_peak(timings.measurement(INLINE, size_bytes=inline_bytes), peak["inline"]),
        ],
        claims=[
            Claim(
                what="speed of the plain durable write",
                value=100 * timings.ratio(PLAIN, OURS),
                unit="%",
                target=80,
            ),
            Claim(
                what="speed of the plain durable write, without compiled loops",
                value=100 * timings.ratio(PLAIN, NUMPY_ONLY),
                unit="%",
            ),
            Claim(
                what="longest time that the event loop stood still",
                value=blocked_s * 1e3,
                unit="ms",
                target=BLOCKED_MAX_S * 1e3,
                is_ceiling=True,
            ),
            Claim(what="the same loop with nothing beside it", value=alone_s * 1e3, unit="ms"),
            Claim(what="bytes through the API, inline", value=inline_bytes / 1e6, unit="MB"),
        ],
    )


def inline_body(choice: ChoicePayload) -> bytes:
    """The part of an answer that carries the rows inline: base64 of a npy array, lists of ids."""
    assert choice.routing is not None
    body: dict[str, Any] = {"routed_experts": encode_npy_base64(choice.routing.rows_NLK)}
    if choice.masks is not None:
        masks = choice.masks.masks
        bounds, ids = masks.starts_N.tolist(), masks.ids_M.tolist()
        body["sampling_mask"] = [ids[a:b] for a, b in pairwise(bounds)]
    return orjson.dumps(body)


async def longest_stalls(
    root: PayloadRoot, choice: ChoicePayload, *, writes: int
) -> tuple[float, float]:
    """Seconds that a heartbeat on the loop came late, at worst: beside writes, and alone."""

    async def write_all() -> None:
        for index in range(writes):
            await asyncio.to_thread(publish, root, QWEN3_30B, choice, f"stall-{index}")

    begin = time.perf_counter()
    blocked_s = await _longest_gap(asyncio.create_task(write_all()))
    spent_s = time.perf_counter() - begin
    return blocked_s, await _longest_gap(asyncio.create_task(asyncio.sleep(spent_s)))


async def _longest_gap(work: "asyncio.Task[None]") -> float:
    longest_s = 0.0
    last = time.perf_counter()
    while not work.done():
        await asyncio.sleep(HEARTBEAT_S)
        now = time.perf_counter()
        longest_s = max(longest_s, now - last - HEARTBEAT_S)
        last = now
    await work
    return longest_s


def measure_peak(prompt: int, completion: int) -> dict[str, int]:
    """Runs in a child: what each form needs on top of the arrays."""
    choice = request_of(
        QWEN3_30B, prompt_tokens=prompt, completion_tokens=completion, with_masks=True, seed=1
    )
    found: dict[str, int] = {}
    with payload_root() as root:
        for name, work in (
            ("ours", lambda: publish(root, QWEN3_30B, choice, "peak")),
            ("inline", lambda: inline_body(choice)),
        ):
            held = Held.begin()
            held.settle()
            work()
            found[name] = held.peak_bytes()
    return found


def _with_peak(measurement: Measurement, peak_bytes: int) -> Measurement:
    return msgspec.structs.replace(measurement, peak_bytes=peak_bytes)


ROWS: Final = [Row("engine_write", measure)]
