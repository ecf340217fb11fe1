"""What the example shows: whether both trainings agree, and what the engine's rows are good for."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from examples.train_tiny_moe.learner import Use
from examples.train_tiny_moe.loss import Mismatch
from examples.train_tiny_moe.run import RTOL, RunResult, StepResult


def print_comparison(console: Console, results: Sequence[RunResult]) -> None:
    """One line per layout, step and precision."""
    table = Table(title="ranks fed by handle against one process fed inline")
    for name in ("layout", "step", "tokens", "micro batches", "precision", "loss"):
        table.add_column(name, justify="left" if name in {"layout", "precision"} else "right")
    for name in ("Δ loss", "Δ gradients", "elements off", "equal"):
        table.add_column(name, justify="right")
    for result in results:
        for step in result.steps:
            for row in _comparison_rows(step):
                table.add_row(*row)
        table.add_section()
    console.print(table)
    parameters = results[0].steps[0].differences["float64"].parameters
    console.print(
        f"Δ is relative, of the worst of {parameters} parameters; equal is within {RTOL:g}: of each"
        " element in float64, of each parameter's norm in float32."
    )
    left = sum(result.files_left for result in results)
    console.print(f"Payload files left after the last policy was applied: {left}")


def _comparison_rows(step: StepResult) -> list[tuple[str, ...]]:
    report = step.report
    rows: list[tuple[str, ...]] = []
    for precision, found in step.differences.items():
        dummies = f" ({report.dummies} empty)" if report.dummies else ""
        rows.append(
            (
                step.layout,
                str(report.step),
                str(report.learners[precision].tokens),
                f"{report.micro_batches} a rank{dummies}",
                precision,
                f"{report.learners[precision].loss:+.6f}",
                f"{found.loss:.1e}",
                f"{found.gradients:.1e}",
                f"{found.outside} of {found.elements}" if precision == "float64" else "",
                "yes" if step.is_equal else "NO",
            )
        )
    return rows


def print_mismatch(console: Console, found: Mapping[Use, Mismatch], *, title: str) -> None:
    """One line per use of the engine's rows."""
    table = Table(title=title)
    table.add_column("experts")
    table.add_column("normalised over")
    for name in ("tokens", "mean |Δ|", "k3", "KL over kept ids"):
        table.add_column(name, justify="right")
    for use, mismatch in found.items():
        table.add_row(
            "replayed" if use.routing else "trainer's own",
            "kept ids" if use.masks else "the vocabulary",
            str(mismatch.tokens),
            f"{mismatch.mean_distance:.5f}",
            f"{mismatch.mean_k3:.6f}",
            "" if mismatch.mean_divergence is None else f"{mismatch.mean_divergence:.6f}",
        )
    console.print(table)
