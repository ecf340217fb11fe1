"""The two tables: what was compared, and what it cost inline and by handle."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from simulation.checker import PAIRINGS, Result
from simulation.comparison import Checks
from simulation.generation import Generated
from simulation.topology import Measured

MEASURED_AT: Final = "dp2-cp2-zigzag"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One quantity of one way of carrying rows against the other."""

    model: str
    what: str
    inline_bytes: int
    handle_bytes: int

    @property
    def ratio(self) -> str:
        """How many times less by handle."""
        if not self.handle_bytes:
            return "–"
        return f"{self.inline_bytes / self.handle_bytes:.1f} ×"


def costs(result: Result, models: Sequence[str]) -> list[Cost]:
    """Bytes and memory, summed over colocated and P/D runs of equal rollouts."""
    found: list[Cost] = []
    for model in models:
        inline, handle = (_of_form(result, model, form) for form in ("inline", "handle"))
        if not inline or not handle:
            continue
        rows = (
            ("HTTP answers to the environment", _sum(inline, "answer"), _sum(handle, "answer")),
            ("rollouts to the orchestrator", _sum(inline, "rollout"), _sum(handle, "rollout")),
            ("steps to the feed", _sum(inline, "step"), _sum(handle, "step")),
            ("feed to the ranks (ZMQ)", _sum(inline, "feed"), _sum(handle, "feed")),
            ("proxy memory above idle", _most(inline, "proxy"), _most(handle, "proxy")),
            ("orchestrator memory above idle", _most(inline, "orch"), _most(handle, "orch")),
            ("feed memory above idle", _most(inline, "fmem"), _most(handle, "fmem")),
            ("rank memory above idle", _most(inline, "rank"), _most(handle, "rank")),
        )
        found += [
            Cost(model=model, what=what, inline_bytes=a, handle_bytes=b) for what, a, b in rows
        ]
    return found


Pair = tuple[Generated, Measured]


def _of_form(result: Result, model: str, form: str) -> list[Pair]:
    """The runs of one form at the topology that is measured (any other if it was not run)."""
    pairs = []
    for pairing in PAIRINGS:
        slug = f"{pairing}-{form}"
        generated = result.generated.get((model, slug))
        runs = {
            name: run for (m, s, name), run in result.measured.items() if (m, s) == (model, slug)
        }
        if generated is not None and runs:
            pairs.append((generated, runs.get(MEASURED_AT, next(iter(runs.values())))))
    return pairs


def _values(pairs: list[Pair], what: str) -> Iterable[int]:
    for generated, measured in pairs:
        yield {
            "answer": generated.traffic.answer_bytes,
            "rollout": generated.traffic.rollout_bytes,
            "step": measured.step_bytes,
            "feed": measured.feed_bytes,
            "proxy": generated.proxy_grown_bytes,
            "orch": measured.orchestrator_grown_bytes,
            "fmem": measured.feed_grown_bytes,
            "rank": measured.rank_grown_bytes,
        }[what]


def _sum(pairs: list[Pair], what: str) -> int:
    return sum(_values(pairs, what))


def _most(pairs: list[Pair], what: str) -> int:
    return max(_values(pairs, what))


def size(size_bytes: int) -> str:
    """For people."""
    value = float(size_bytes)
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def print_checks(console: Console, checks: Checks) -> None:
    """The table of checks, and what the first differences were."""
    table = Table(title="Checks: bitwise, against each other and the seeded truth")
    table.add_column("check")
    table.add_column("compared", justify="right")
    table.add_column("different", justify="right")
    table.add_column("")
    for check in checks:
        verdict = "[green]equal[/]" if check.is_good else "[red]DIFFERENT[/]"
        if not check.compared:
            verdict = "[red]nothing compared[/]"
        table.add_row(check.name, str(check.compared), str(check.different), verdict)
    console.print(table)
    for check in checks:
        for finding in check.findings:
            console.print(f"{check.name}: {finding}", style="red", markup=False)


def print_costs(console: Console, found: Sequence[Cost]) -> None:
    """The table of bytes and memory."""
    table = Table(title="Bytes and memory: the same rollouts inline and by handle")
    table.add_column("model")
    table.add_column("what")
    for name in ("inline", "by handle", "less by"):
        table.add_column(name, justify="right")
    for cost in found:
        table.add_row(
            cost.model, cost.what, size(cost.inline_bytes), size(cost.handle_bytes), cost.ratio
        )
    console.print(table)


def print_engines(console: Console, result: Result) -> None:
    """What the engines did to make it hard."""
    for (model, _), generated in result.generated.items():
        counts = generated.counters
        console.print(
            f"{model}, {generated.way.name}: {generated.traffic.turns} turns, "
            f"{counts.get('preempted', 0)} preemptions, "
            f"{counts.get('garbage_rows', 0)} garbage rows below prompts",
            style="dim",
            highlight=False,
        )
