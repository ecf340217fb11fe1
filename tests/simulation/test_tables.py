"""What a person sees at the end: verdicts, first differences, costs and the plot."""

import io
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from simulation.checker import Result
from simulation.comparison import Checks
from simulation.environment import Traffic
from simulation.generation import WAYS, Generated
from simulation.plot import write_plot
from simulation.tables import MEASURED_AT, Cost, costs, print_checks, print_costs, size
from simulation.topology import TOPOLOGIES, Measured


def printed_checks(checks: Checks) -> str:
    console = Console(file=io.StringIO(), width=120)
    print_checks(console, checks)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_check_has_a_line_and_every_difference_a_name() -> None:
    checks = Checks()
    checks.of("right").add(compared=12)
    checks.of("wrong").add("sample [g0.r1]: routed_experts")
    checks.of("idle")
    shown = printed_checks(checks)
    assert "12" in shown
    assert "DIFFERENT" in shown
    assert "nothing compared" in shown
    assert "wrong: sample [g0.r1]: routed_experts" in shown  # brackets are no markup


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (12_300_000, "12.3 MB"), (7 * 10**9, "7.0 GB")],
)
def test_sizes_for_people(size_bytes: int, shown: str) -> None:
    assert size(size_bytes) == shown


def result_of_all_ways(topology: str) -> Result:
    result = Result()
    for way in WAYS:
        factor = 10 if way.form == "inline" else 1
        result.generated["model", way.slug] = Generated(
            way=way,
            bodies={},
            traffic=Traffic(turns=1, answer_bytes=100 * factor, rollout_bytes=50 * factor),
            root=None,
            counters={},
            proxy_grown_bytes=3 * factor,
        )
        result.measured["model", way.slug, topology] = Measured(
            step_bytes=20 * factor, feed_bytes=30 * factor
        )
    return result


@pytest.mark.parametrize("topology", [MEASURED_AT, TOPOLOGIES[0].name])
def test_bytes_are_summed_and_memory_is_the_most_over_both_pairings(topology: str) -> None:
    found = {cost.what: cost for cost in costs(result_of_all_ways(topology), ["model"])}
    answers = found["HTTP answers to the environment"]
    assert (answers.inline_bytes, answers.handle_bytes, answers.ratio) == (2000, 200, "10.0 ×")
    assert found["feed to the ranks (ZMQ)"].inline_bytes == 600
    assert found["proxy memory above idle"].inline_bytes == 30


def test_a_model_that_did_not_run_has_no_costs_and_nothing_divides_by_zero() -> None:
    assert costs(Result(), ["model"]) == []
    nothing = Cost(model="model", what="bytes", inline_bytes=5, handle_bytes=0)
    console = Console(file=io.StringIO(), width=120)
    print_costs(console, [nothing])
    assert isinstance(console.file, io.StringIO)
    assert "–" in console.file.getvalue()


def test_the_measured_topology_is_one_that_runs() -> None:
    assert MEASURED_AT in {topology.name for topology in TOPOLOGIES}


def test_the_plot_is_an_svg_that_depends_on_its_numbers_alone(tmp_path: Path) -> None:
    found = costs(result_of_all_ways(MEASURED_AT), ["model"])
    first, again = tmp_path / "first.svg", tmp_path / "again.svg"
    write_plot(found, first)
    write_plot(found, again)
    assert first.read_bytes() == again.read_bytes()
    assert ET.parse(first).getroot().tag.endswith("svg")
    assert "by handle" in first.read_text()
