"""Real processes: the five-way check finds nothing, and finds every deliberate damage."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simulation.cli import app

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def run(out: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, results and what was printed."""
    done = CliRunner().invoke(app, ["check", "--out", str(out), "--groups", "2", *options])
    results = out / "results.json"
    body: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    return done.exit_code, body, done.output


def differing(results: dict[str, Any]) -> set[str]:
    return {check["name"] for check in results["checks"] if check["different"]}


def test_five_ways_and_a_live_run_are_equal_and_leave_no_file(tmp_path: Path) -> None:
    options = ("--seed", "11", "--topologies", "4", "--live", "--model", "sim-uint16")
    code, results, output = run(tmp_path / "out", *options)
    assert differing(results) == set(), output
    assert code == 0, output
    names = {check["name"] for check in results["checks"]}
    assert {"micro batches equal in all five ways", "files left after a run: none"} <= names
    handle = [cost for cost in results["costs"] if "feed to the ranks" in cost["what"]]
    assert all(cost["inline_bytes"] > 10 * cost["handle_bytes"] for cost in handle)
    assert not list((tmp_path / "out").rglob("*.sbp"))


def test_five_ways_and_a_live_run_are_equal_through_two_workers(tmp_path: Path) -> None:
    options = ("--seed", "12", "--topologies", "1", "--live", "--workers", "2")
    code, results, output = run(tmp_path / "out", *options, "--model", "sim-uint16")
    assert differing(results) == set(), output
    assert code == 0, output
    names = {check["name"] for check in results["checks"]}
    assert {"micro batches equal in all five ways", "files left after a run: none"} <= names


@pytest.mark.parametrize(
    ("corruption", "seen_by"),
    [
        ("file", "runs end, every rank sees the end"),
        ("segment", "runs end, every rank sees the end"),  # refused: a file knows its positions
        ("row", "micro batches = seeded truth, CP 1 contiguous"),
        ("mask", "micro batches = seeded truth, CP 1 contiguous"),
        ("score", "micro batches = seeded truth, CP 1 contiguous"),
    ],
)
def test_damage_ends_with_one(corruption: str, seen_by: str, tmp_path: Path) -> None:
    options = ("--topologies", "1", "--model", "sim-uint8", "--corrupt", corruption)
    code, results, output = run(tmp_path / "out", *options)
    assert code == 1, output
    assert seen_by in differing(results)
    assert "micro batches equal in all five ways" in differing(results)


def test_a_folder_that_no_run_made_is_not_wiped(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    code, _, _ = run(tmp_path)
    assert code == 2
    assert (tmp_path / "precious").exists()
