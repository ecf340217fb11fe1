"""Pack and encode one step: 16 samples of 30 k tokens, 88 × top-22 uint16 rows, CP 8."""

from typing import Final

import numpy as np

from bench.baseline.packing import encode_inline, pack_inline
from bench.baseline.samples import InlineSample, inline_sample
from bench.ours import egress_bytes, orchestrator_side
from bench.registry import Row
from bench.results import Claim, RowResult
from bench.scale import Scale
from bench.timing import paired
from bench.workload import (
    NEMOTRON_SUPER,
    NEMOTRON_SUPER_ALL,
    SampleShape,
    handle_sample,
    routing_rows,
)
from sideband.batch.packing import PackingPlan
from sideband.batch.types import Sample
from sideband.model import ModelShape

CP_SIZE: Final = 8
TOKEN_COLUMN_BYTES: Final = 9  # int32 id, float32 logprob, bool mask: what packing must move


def measure(scale: Scale) -> RowResult:
    """Both forms of the same step, with the memcpy of the token columns as the limit."""
    count = scale.pick(tiny=2, quick=16, full=16)
    tokens = scale.pick(tiny=200, quick=30_000, full=30_000)
    plan = PackingPlan(seq_len=scale.pick(tiny=512, quick=32_768, full=32_768), cp_size=CP_SIZE)
    routed = by_handle(count, tokens, NEMOTRON_SUPER)
    all_layers = by_handle(count, tokens, NEMOTRON_SUPER_ALL)
    inline = inline_samples(all_layers, NEMOTRON_SUPER_ALL)
    columns = np.zeros(count * tokens * TOKEN_COLUMN_BYTES, np.uint8)

    def ours(samples: list[Sample], model: ModelShape) -> int:
        return egress_bytes(orchestrator_side(samples, plan, model))

    sides = {
        "Sideband, 40 routed layers": lambda: ours(routed, NEMOTRON_SUPER),
        "Sideband, all 88 layers": lambda: ours(all_layers, NEMOTRON_SUPER_ALL),
        "inline, 88 layers": lambda: inline_messages(inline, plan),
        "limit: memcpy of the token columns": columns.copy,
    }
    timings = paired(sides, rounds=scale.pick(tiny=1, quick=3, full=5))
    first, second, third, limit = sides
    body_bytes = len(orchestrator_side(routed, plan, NEMOTRON_SUPER))
    ours_bytes = ours(routed, NEMOTRON_SUPER)
    inline_bytes = CP_SIZE * sum(inline_messages(inline, plan))
    return RowResult(
        name="pack_encode",
        title="Pack and encode a step; bytes to the ranks",
        setting=f"{count} samples × {tokens} tokens, 4 turns each, 88 × top-22 uint16 rows, CP "
        f"{CP_SIZE}. Ours: pack, encode for the feed, decode there, cut and encode every rank's "
        "chunk. Inline: pack, encode once, the same message to every CP rank.",
        measurements=[
            timings.measurement(first, size_bytes=ours_bytes),
            timings.measurement(second, size_bytes=ours(all_layers, NEMOTRON_SUPER_ALL)),
            timings.measurement(third, size_bytes=inline_bytes),
            timings.measurement(limit, size_bytes=columns.nbytes),
        ],
        claims=[
            Claim(
                what="faster than inline (40 layers)",
                value=timings.ratio(third, first),
                unit="×",
                target=100,
            ),
            Claim(
                what="faster than inline (all 88)",
                value=timings.ratio(third, second),
                unit="×",
                target=100,
            ),
            Claim(
                what="bytes to the ranks per token",
                value=ours_bytes / (count * tokens),
                unit="B",
                target=10,
                is_ceiling=True,
            ),
            Claim(what="fewer bytes than inline", value=inline_bytes / ours_bytes, unit="×"),
            Claim(
                what="bytes from orchestrator to feed per token",
                value=body_bytes / (count * tokens),
                unit="B",
            ),
        ],
    )


def by_handle(count: int, tokens: int, model: ModelShape) -> list[Sample]:
    """Equal samples of four turns."""
    shape = SampleShape(tokens=tokens)
    return [handle_sample(serial, shape, model) for serial in range(count)]


def inline_samples(samples: list[Sample], model: ModelShape) -> list[InlineSample]:
    """The same samples with their rows inside."""
    return [
        inline_sample(sample, routing_rows(model, len(sample), seed=serial))
        for serial, sample in enumerate(samples)
    ]


def inline_messages(samples: list[InlineSample], plan: PackingPlan) -> list[int]:
    """Sizes of the messages of one step, one per data rank; each goes to every CP rank."""
    grid = pack_inline(
        samples, seq_len=plan.seq_len, dp_size=plan.dp_size, row_multiple=plan.row_multiple
    )
    return [len(message) for message in encode_inline(grid)]


ROWS: Final = [Row("pack_encode", measure)]
