"""What a large step holds in memory: 512 samples, 2.3 M tokens, DP 8, CP 4; then ten of it."""

from collections.abc import Mapping
from typing import Any, Final

from bench.baseline.packing import encode_inline, pack_inline
from bench.baseline.samples import inline_sample
from bench.memory import Held, in_child
from bench.ours import egress_bytes, feed_side, orchestrator_side
from bench.registry import Row
from bench.results import Claim, Measurement, RowResult
from bench.scale import Scale
from bench.timing import timed
from bench.workload import GLM_45_AIR, SampleShape, handle_sample, lengths, routing_rows
from sideband.batch.packing import PackingPlan
from sideband.batch.types import Sample

DP_SIZE: Final = 8
CP_SIZE: Final = 4
SEQ_LEN: Final = 32_768
MEAN_TOKENS: Final = 4_500
GB: Final = 1e9


def measure(scale: Scale) -> RowResult:
    """Held, peak and egress of both forms."""
    count = scale.pick(tiny=8, quick=512, full=512)
    mean = scale.pick(tiny=40, quick=MEAN_TOKENS, full=MEAN_TOKENS)
    ours = in_child(measure_orchestrator, count=count, mean=mean)
    feed = in_child(measure_feed, count=count, mean=mean)
    inline = in_child(measure_inline, count=count, mean=mean)
    return RowResult(
        name="step_memory",
        title="512 samples, 2.3 M tokens: memory and egress",
        setting=f"{count} samples, {count * mean} tokens, GLM-4.5-Air rows, DP {DP_SIZE}, CP "
        f"{CP_SIZE}, seq_len {SEQ_LEN}. Each side in a process of its own: held is what stays "
        "resident for the samples (for the feed: for the body), peak what the work adds. The "
        "feed's messages are dropped as they are sent.",
        measurements=[
            _measurement("Sideband, orchestrator: pack, encode", ours),
            _measurement("Sideband, feed: decode, cut, encode", feed),
            _measurement("inline: pack, encode", inline),
        ],
        claims=[
            _ceiling("orchestrator holds", ours["held_bytes"] / GB, 0.04),
            _ceiling("orchestrator peak adds", ours["peak_bytes"] / GB, 0.06),
            _ceiling("egress to the ranks", feed["size_bytes"] / GB, 0.023),
            Claim(
                what="inline holds more",
                value=inline["held_bytes"] / max(ours["held_bytes"], 1),
                unit="×",
            ),
            Claim(
                what="inline's peak is higher",
                value=inline["peak_bytes"] / max(ours["peak_bytes"], 1),
                unit="×",
            ),
            Claim(
                what="inline sends more",
                value=inline["size_bytes"] / feed["size_bytes"],
                unit="×",
            ),
        ],
    )


def measure_tenfold(scale: Scale) -> RowResult:
    """The orchestrator alone with a step of ten times the size: linear, and bounded."""
    count = scale.pick(tiny=8, quick=512, full=512)
    mean = scale.pick(tiny=40, quick=MEAN_TOKENS, full=MEAN_TOKENS)
    once = in_child(measure_orchestrator, count=count, mean=mean)
    ten = in_child(measure_orchestrator, count=10 * count, mean=mean)
    return RowResult(
        name="step_tenfold",
        title="The orchestrator with ten times that step",
        setting=f"{10 * count} samples, {10 * count * mean} tokens against {count}, same shape",
        measurements=[
            _measurement(f"{count} samples", once),
            _measurement(f"{10 * count} samples", ten),
        ],
        claims=[
            Claim(
                what="time for 10 × the step",
                value=ten["seconds"] / once["seconds"],
                unit="×",
                target=12,
                is_ceiling=True,
            ),
            _ceiling(
                "holds, and adds at its peak", (ten["held_bytes"] + ten["peak_bytes"]) / GB, 0.5
            ),
        ],
    )


def _ceiling(what: str, value: float, target: float) -> Claim:
    return Claim(what=what, value=value, unit="GB", target=target, is_ceiling=True)


def _measurement(side: str, found: Mapping[str, Any]) -> Measurement:
    return Measurement(
        side=side,
        seconds=found["seconds"],
        bytes=found["size_bytes"],
        held_bytes=found["held_bytes"],
        peak_bytes=found["peak_bytes"],
    )


def samples(count: int, mean: int) -> list[Sample]:
    """By handle, four turns each."""
    return [
        handle_sample(serial, SampleShape(tokens=tokens), GLM_45_AIR)
        for serial, tokens in enumerate(lengths(count, mean=mean, seed=7))
    ]


def plan() -> PackingPlan:
    """The step's plan."""
    return PackingPlan(seq_len=SEQ_LEN, dp_size=DP_SIZE, cp_size=CP_SIZE)


def measure_orchestrator(count: int, mean: int) -> dict[str, Any]:
    """Runs in a child."""
    orchestrator_side(samples(1, 50), plan(), GLM_45_AIR)  # what code and caches hold is no data
    held = Held.begin()
    collected = samples(count, mean)
    held.settle()
    seconds = timed(lambda: orchestrator_side(collected, plan(), GLM_45_AIR))
    peak_bytes = held.peak_bytes()
    body = orchestrator_side(collected, plan(), GLM_45_AIR)
    return _found(held, peak_bytes, seconds, len(body))


def measure_feed(count: int, mean: int) -> dict[str, Any]:
    """Runs in a child."""
    egress_bytes(orchestrator_side(samples(1, 50), plan(), GLM_45_AIR))
    packed = orchestrator_side(samples(count, mean), plan(), GLM_45_AIR)
    held = Held.begin()
    body = bytes(bytearray(packed))
    held.settle()
    seconds = timed(lambda: egress_bytes(body))
    peak_bytes = held.peak_bytes()
    return _found(held, peak_bytes, seconds, sum(map(len, feed_side(body))))


def measure_inline(count: int, mean: int) -> dict[str, Any]:
    """Runs in a child. The rows are drawn sample by sample, so that nothing else is resident."""
    held = Held.begin()
    collected = [
        inline_sample(sample, routing_rows(GLM_45_AIR, len(sample), seed=serial % 8))
        for serial, sample in enumerate(samples(count, mean))
    ]
    held.settle()

    def work() -> int:
        grid = pack_inline(
            collected, seq_len=SEQ_LEN, dp_size=DP_SIZE, row_multiple=plan().row_multiple
        )
        return CP_SIZE * sum(map(len, encode_inline(grid)))

    seconds = timed(work)
    peak_bytes = held.peak_bytes()
    return _found(held, peak_bytes, seconds, work())


def _found(held: Held, peak_bytes: int, seconds: float, size_bytes: int) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "size_bytes": size_bytes,
        "held_bytes": held.held_bytes,
        "peak_bytes": peak_bytes,
    }


ROWS: Final = [Row("step_memory", measure), Row("step_tenfold", measure_tenfold)]
