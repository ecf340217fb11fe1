"""Cost must grow linearly: time over samples, tokens, ranks, and turns per rollout."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from bench.memory import in_child
from bench.ours import egress_bytes, orchestrator_side
from bench.registry import Row
from bench.results import Claim, Curve, RowResult, Series
from bench.rows.step_memory import measure_orchestrator
from bench.scale import Scale
from bench.timing import paired
from bench.workload import GLM_45_AIR, QWEN3_30B, SampleShape, handle_sample
from sideband.batch.packing import PackingPlan
from sideband.batch.rollouts import samples_of
from sideband.batch.types import Turn
from sideband.ids import RequestId, RolloutId

Points = list[tuple[float, float]]
EXPONENT_MAX: Final = 1.15  # time ∝ size ** exponent; 1 is linear, the rest is noise and caches


def growth(points: Sequence[tuple[float, float]]) -> float:
    """The exponent of a power law through the upper half of the points, where fixed costs fade."""
    upper = points[len(points) // 2 - 1 :] if len(points) > 2 else points
    (x0, y0), (x1, y1) = upper[0], upper[-1]
    return math.log(y1 / y0) / math.log(x1 / x0)


def measure_samples(scale: Scale) -> RowResult:
    """Pack and encode over the number of samples; and the orchestrator's memory over it."""
    counts = scale.pick(
        tiny=[4, 8], quick=[128, 512, 2048, 8192], full=[128, 512, 2048, 8192, 32_768, 100_000]
    )
    plan = PackingPlan(seq_len=8192, dp_size=8, cp_size=4)
    times: Points = []
    memory: Points = []
    for count in counts:
        samples = [handle_sample(i, SampleShape(tokens=500), GLM_45_AIR) for i in range(count)]
        timings = paired(
            {"pack and encode": partial(orchestrator_side, samples, plan, GLM_45_AIR)},
            rounds=min(scale.rounds, 5),
        )
        times.append((count, timings.median("pack and encode") * 1e3))
        found = in_child(measure_orchestrator, count=count, mean=500)
        memory.append((count, (found["held_bytes"] + found["peak_bytes"]) / 1e6))
    return _row(
        "curve_samples",
        "Growth with samples",
        f"{counts[0]} to {counts[-1]} samples of 500 tokens, 4 turns, DP 8, CP 4",
        [
            _curve("samples-time", "Pack and encode", "samples", "ms", times),
            _curve("samples-memory", "Orchestrator: held + peak", "samples", "MB", memory),
        ],
    )


def measure_tokens(scale: Scale) -> RowResult:
    """Pack and encode, and then cut for the ranks, over the tokens of a sample."""
    counts = scale.pick(
        tiny=[64, 128],
        quick=[1_000, 8_000, 32_000, 128_000],
        full=[1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000],
    )
    plan = PackingPlan(seq_len=max(counts), cp_size=8)
    packing: Points = []
    cutting: Points = []
    for tokens in counts:
        samples = [handle_sample(i, SampleShape(tokens=tokens), GLM_45_AIR) for i in range(16)]
        body = orchestrator_side(samples, plan, GLM_45_AIR)
        timings = paired(
            {
                "pack": partial(orchestrator_side, samples, plan, GLM_45_AIR),
                "cut": partial(egress_bytes, body),
            },
            rounds=scale.rounds,
        )
        packing.append((tokens, timings.median("pack") * 1e3))
        cutting.append((tokens, timings.median("cut") * 1e3))
    return _row(
        "curve_tokens",
        "Growth with tokens",
        f"16 samples of {counts[0]} to {counts[-1]} tokens, 4 turns, one data rank, CP 8",
        [
            _curve("tokens-pack", "Pack and encode", "tokens per sample", "ms", packing),
            _curve("tokens-cut", "Decode, cut and encode", "tokens per sample", "ms", cutting),
        ],
    )


def measure_ranks(scale: Scale) -> RowResult:
    """The feed's work over the context-parallel ranks: the same tokens, cut finer."""
    sizes = scale.pick(tiny=[1, 2], quick=[1, 4, 16, 64], full=[1, 2, 4, 8, 16, 32, 64, 128])
    tokens = scale.pick(tiny=256, quick=8192, full=8192)
    times: dict[str, Points] = {"contiguous": [], "zigzag": []}
    samples = [handle_sample(i, SampleShape(tokens=tokens), GLM_45_AIR) for i in range(16)]
    for cp_size in sizes:
        for layout, points in times.items():
            plan = PackingPlan(
                seq_len=tokens * 2,
                cp_size=cp_size,
                layout="zigzag" if layout == "zigzag" else "contiguous",
            )
            body = orchestrator_side(samples, plan, GLM_45_AIR)
            timings = paired({"feed": partial(egress_bytes, body)}, rounds=min(scale.rounds, 5))
            points.append((cp_size, timings.median("feed") * 1e3))
    curve = Curve(
        name="ranks-time",
        title="Decode, cut and encode one step",
        x_label="context-parallel ranks",
        y_label="ms",
        series=[Series(name=name, points=points) for name, points in times.items()],
    )
    return RowResult(
        name="curve_ranks",
        title="Growth with ranks",
        setting=f"16 samples of {tokens} tokens in rows of two, one data rank",
        claims=[
            Claim(
                what=f"exponent over the ranks, {name}",
                value=growth(points),
                unit="",
                target=EXPONENT_MAX,
                is_ceiling=True,
            )
            for name, points in times.items()
        ],
        curves=[curve],
    )


def measure_turns(scale: Scale) -> RowResult:
    """One rollout into samples over its turns, and a step of such samples."""
    counts = scale.pick(tiny=[1, 4], quick=[1, 8, 64, 500], full=[1, 4, 16, 64, 128, 256, 500])
    building: Points = []
    packing: Points = []
    plan = PackingPlan(seq_len=65_536, dp_size=2, cp_size=4)
    for count in counts:
        turns = rollout(count, tokens_per_turn=64)
        build = partial(
            samples_of,
            RolloutId("rollout"),
            turns,
            env_name="code",
            policy_version=0,
            advantage=1.0,
            model=QWEN3_30B,
        )
        shape = SampleShape(tokens=32_000 if scale.name != "tiny" else 64, turns=count)
        samples = [
            handle_sample(i, shape, QWEN3_30B) for i in range(scale.pick(tiny=2, quick=16, full=32))
        ]
        timings = paired(
            {
                "build": build,
                "pack": partial(_pack_and_cut, samples, plan),
            },
            rounds=min(scale.rounds, 5),
        )
        building.append((count, timings.median("build") * 1e3))
        packing.append((count, timings.median("pack") * 1e3))
    return _row(
        "curve_turns",
        "Growth with turns per rollout",
        "rollouts of 1 to 500 turns (64 new tokens each, prompts repeat all before), and steps of "
        "samples of equal length whose rows lie in 1 to 500 files",
        [
            _curve("turns-build", "One rollout into samples", "turns", "ms", building),
            _curve("turns-pack", "A step, by segments per sample", "segments", "ms", packing),
        ],
        note="A rollout's prompts add up to turns × context, so linear in its input is quadratic "
        "in its turns: the first exponent's target is 2.",
        targets=(2.1, EXPONENT_MAX),
    )


def _pack_and_cut(samples: Any, plan: PackingPlan) -> int:
    return egress_bytes(orchestrator_side(samples, plan, QWEN3_30B))


def rollout(turns: int, *, tokens_per_turn: int) -> list[Turn]:
    """A conversation: each prompt is everything before plus some new tokens."""
    shape = SampleShape(tokens=turns * tokens_per_turn, turns=turns)
    sample = handle_sample(0, shape, QWEN3_30B)
    found: list[Turn] = []
    for number in range(turns):
        middle = number * tokens_per_turn + tokens_per_turn // 2
        stop = (number + 1) * tokens_per_turn
        start = max(number * tokens_per_turn - 1, 0)  # the last turn's last row comes with this one
        routing = sample.segments[0].narrowed(0, 1)
        found.append(
            Turn(
                request_id=RequestId(f"request-{number}"),
                prompt_token_ids_P=sample.token_ids_T[:middle],
                completion_token_ids_C=sample.token_ids_T[middle:stop],
                logprobs_C=sample.logprobs_T[middle:stop],
                sampled_C=np.ones(stop - middle, np.bool_),
                temperature=0.7,
                is_truncating=False,
                segments=(_renamed(routing, number, start, stop - 1),),
            )
        )
    return found


def _renamed(segment: Any, number: int, start: int, stop: int) -> Any:
    file = f"v0/bench/{number % 256:02x}/request-{number}-0123456789abcdef.sbp"
    return msgspec.structs.replace(segment, file=file, pos=start, rows=stop - start)


def _curve(name: str, title: str, x_label: str, y_label: str, points: Points) -> Curve:
    return Curve(
        name=name,
        title=title,
        x_label=x_label,
        y_label=y_label,
        series=[Series(name=title, points=points)],
    )


def _row(
    name: str,
    title: str,
    setting: str,
    curves: list[Curve],
    *,
    note: str = "",
    targets: Sequence[float] = (EXPONENT_MAX, EXPONENT_MAX),
) -> RowResult:
    return RowResult(
        name=name,
        title=title,
        setting=setting,
        claims=[
            Claim(
                what=f"exponent of {curve.y_label} over {curve.x_label}: {curve.title.lower()}",
                value=growth(curve.series[0].points),
                unit="",
                target=target,
                is_ceiling=True,
            )
            for curve, target in zip(curves, targets, strict=True)
        ],
        curves=curves,
        notes=[note] if note else [],
    )


ROWS: Final = [
    Row("curve_samples", measure_samples),
    Row("curve_tokens", measure_tokens),
    Row("curve_ranks", measure_ranks),
    Row("curve_turns", measure_turns),
]
