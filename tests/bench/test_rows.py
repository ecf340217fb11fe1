"""Every row of the bench runs, at a size that only shows that it does. No time is asserted."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from _pytest.mark import ParameterSet

from bench import page, plots
from bench.__main__ import FINDINGS_MARK, merged, write
from bench.registry import Row, rows
from bench.results import Claim, Curve, Machine, Report, RowResult, Series
from bench.scale import TINY
from scripts.vllm_env import servers

MACHINE = Machine(
    processor="one", cores=2, memory_bytes=1, filesystem="x", kernel="k", python="p", load_before=0
)


def report_of(*found: RowResult) -> Report:
    return Report(scale="tiny", machine=MACHINE, versions={"numpy": "2"}, rows=list(found))


def cases() -> Iterator[ParameterSet]:
    """Rows that start servers belong to the tier of real processes, a real vLLM's to its own."""
    for row in rows():
        if row.name.startswith("plugin"):
            yield pytest.param(row, id=row.name, marks=[pytest.mark.vllm])
            continue
        is_real = row.name.startswith(("proxy", "orchestrator", "feed"))
        yield pytest.param(row, id=row.name, marks=[pytest.mark.e2e] if is_real else [])


@pytest.mark.parametrize("row", list(cases()))
def test_a_row_runs_and_its_result_survives_json_and_the_page(row: Row) -> None:
    if row.name.startswith("proxy"):
        pytest.importorskip("aiohttp")  # one of the forwarders that the proxy is compared with
    result = row.run(TINY)
    assert result.name == row.name
    assert result.claims
    report = report_of(result)
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
    assert result.title in page.render(report, plots="performance")


def test_where_no_real_vllm_was_built_its_row_says_so_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(servers, "BASE", tmp_path)
    (row,) = [row for row in rows() if row.name == "plugin_overhead"]
    result = row.run(TINY)
    assert (result.measurements, result.claims) == ([], [])
    assert result.notes == ["Left out: vLLM 0.32 was not built: make test-vllm does it"]
    assert result.notes[0] in page.render(report_of(result), plots="performance")


def test_row_names_are_unique() -> None:
    names = [row.name for row in rows()]
    assert len(names) == len(set(names))


def test_a_target_is_a_floor_or_a_ceiling() -> None:
    floor = Claim(what="speed", value=80.0, unit="%", target=80.0)
    ceiling = Claim(what="size", value=81.0, unit="%", target=80.0, is_ceiling=True)
    assert (floor.verdict, ceiling.verdict) == ("met", "missed")
    assert Claim(what="cost", value=1.0, unit="s").verdict == "open"


def test_writing_again_keeps_the_findings_below_the_mark(tmp_path: Path) -> None:
    curve = Curve(
        name="c", title="t", x_label="x", y_label="y", series=[Series(name="s", points=[(1, 2)])]
    )
    first = RowResult(name="a", title="First", setting="s", curves=[curve])
    write(report_of(first), tmp_path)
    target = tmp_path / "performance.md"
    assert (tmp_path / "performance" / "c.svg").exists()
    target.write_text(target.read_text() + "what a person found\n")
    second = RowResult(name="b", title="Second", setting="s")
    write(merged(report_of(second), tmp_path / "performance" / "report.json"), tmp_path)
    text = target.read_text()
    assert text.count(FINDINGS_MARK) == 1
    assert text.endswith("what a person found\n")
    assert "## First" in text
    assert "## Second" in text


def test_a_setting_ends_with_one_full_stop() -> None:
    for setting in ("Two sides", "Two sides."):
        row = RowResult(name="a", title="First", setting=setting)
        assert "`a`: Two sides.\n" in page.render(report_of(row), plots="performance")


def test_equal_numbers_draw_equal_files(tmp_path: Path) -> None:
    curve = Curve(
        name="c", title="t", x_label="x", y_label="y", series=[Series(name="s", points=[(1, 2)])]
    )
    first = plots.draw(curve, tmp_path).read_bytes()
    assert plots.draw(curve, tmp_path).read_bytes() == first


@pytest.mark.parametrize(("heights", "is_log"), [((9.1, 10.5), False), ((9.3, 82.0), True)])
def test_a_level_line_is_not_drawn_as_a_steep_one(
    heights: tuple[float, float], is_log: bool
) -> None:
    series = [Series(name="s", points=list(zip((1, 100), heights, strict=True)))]
    curve = Curve(name="c", title="t", x_label="x", y_label="y", series=series)
    assert plots.has_log_heights(curve) is is_log
