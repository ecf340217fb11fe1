"""Checks what the ranks got: every sequence of every micro batch against the seeded truth."""

from collections.abc import Mapping
from pathlib import Path

from simulation.assembly import IncompleteRow, Place, by_place, load_dumps, sequences_of
from simulation.comparison import Checks, padding_differences, sample_differences
from simulation.expected import ExpectedSample

Digests = dict[Place, tuple[str, ...]]


def check_ranks(
    checks: Checks,
    out: Path,
    expected: Mapping[str, ExpectedSample],
    *,
    cp_size: int,
    label: str,
    weight_version_max: int = 0,
    misses_are_fine: bool = False,
) -> Digests:
    """Compare all dumps in ``out``; the digest of each rank's micro batches.

    Each expected sample must come exactly once over all steps.
    """
    seen: dict[str, int] = {}
    digests: Digests = {}
    for place, parts in by_place(load_dumps(out)).items():
        digests[place] = tuple(str(part.plain["digest"]) for part in parts)
        micro_batch = checks.of(f"micro batches = seeded truth, {label}")
        if len(parts) != cp_size:
            micro_batch.add(f"{place}: {len(parts)} of {cp_size} chunks")
            continue
        wrong: list[str] = []
        try:
            for sequence, padding in sequences_of(parts):
                wrong += padding_differences(padding)
                if sequence.sample_id is None:
                    if len(sequence.columns["input_ids"]):
                        wrong.append("tokens of no sample")
                    continue
                seen[sequence.sample_id] = seen.get(sequence.sample_id, 0) + 1
                truth = expected.get(sequence.sample_id)
                wrong += (
                    [f"{sequence.sample_id}: not a sample of the plan"]
                    if truth is None
                    else sample_differences(sequence, truth, weight_version_max=weight_version_max)
                )
        except IncompleteRow as exc:
            wrong.append(str(exc))
        micro_batch.add(*wrong)
    _check_once(checks, expected, seen, misses_are_fine=misses_are_fine)
    return digests


def _check_once(
    checks: Checks,
    expected: Mapping[str, ExpectedSample],
    seen: Mapping[str, int],
    *,
    misses_are_fine: bool,
) -> None:
    once = checks.of("each sample trained exactly once")
    for sample_id in expected:
        times = seen.get(sample_id, 0)
        is_fine = times == 1 or (times == 0 and misses_are_fine)
        once.add(*([] if is_fine else [f"{sample_id}: {times} times"]))
