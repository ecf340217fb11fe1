"""The run as a Markdown page: what was asked, what came out, and whether the target holds."""

from collections.abc import Iterator

from bench.results import Claim, Measurement, Report, RowResult

WORDS = {"met": "yes", "missed": "**no**", "open": "–"}


def render(report: Report, *, plots: str) -> str:
    """The page. ``plots`` is the folder of the plots as seen from it."""
    return "\n".join([*_head(report), *_summary(report), *_details(report, plots)]) + "\n"


def _head(report: Report) -> Iterator[str]:
    machine = report.machine
    yield "<!-- Written by python -m bench; the findings below the mark are kept. -->"
    yield "# Performance"
    yield ""
    yield (
        "Every row measures all its sides in one run: in turn, round by round. It states the "
        "median round; a ratio is the median of the paired rounds. Memory is the kernel's account "
        "of a process that does nothing else. A limit is the cheapest thing that the machine can "
        "do with the same bytes. Numbers of two machines do not compare; ratios do, roughly."
    )
    yield ""
    yield (
        f"Run: `{report.scale}`, on {machine.processor}, {machine.cores} cores, "
        f"{machine.memory_bytes / 1e9:.0f} GB, {machine.filesystem}, Linux {machine.kernel}, "
        f"Python {machine.python}; load before {machine.load_before}. "
        + ", ".join(f"{name} {version}" for name, version in report.versions.items())
        + "."
    )
    yield ""


def _summary(report: Report) -> Iterator[str]:
    yield "| what | value | target | reached |"
    yield "| --- | --- | --- | --- |"
    for row in report.rows:
        for claim in row.claims:
            yield f"| {row.title}: {claim.what} | {_claim(claim)} |"
    yield ""


def _claim(claim: Claim) -> str:
    value = f"{number(claim.value)} {claim.unit}".strip()
    sign = "≤" if claim.is_ceiling else "≥"
    target = "–" if claim.target is None else f"{sign} {number(claim.target)} {claim.unit}".strip()
    return f"{value} | {target} | {WORDS[claim.verdict]}"


def _details(report: Report, plots: str) -> Iterator[str]:
    for row in report.rows:
        yield f"## {row.title}"
        yield ""
        yield f"`{row.name}`: {row.setting.removesuffix('.')}."
        yield ""
        yield from _table(row)
        yield from (f"- {note}" for note in row.notes)
        if row.notes:
            yield ""
        for curve in row.curves:
            yield f"![{curve.title}]({plots}/{curve.name}.svg)"
            yield ""


def _table(row: RowResult) -> Iterator[str]:
    if not row.measurements:
        return
    yield "| side | seconds | spread | bytes | held | peak adds | rate |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    yield from (f"| {_cells(measurement)} |" for measurement in row.measurements)
    yield ""


def _cells(one: Measurement) -> str:
    return " | ".join(
        [
            one.side,
            "" if one.seconds is None else duration(one.seconds),
            "" if one.spread is None else f"{one.spread:.0%}",
            "" if one.bytes is None else size(one.bytes),
            "" if one.held_bytes is None else size(one.held_bytes),
            "" if one.peak_bytes is None else size(one.peak_bytes),
            "" if one.rate is None else f"{number(one.rate)} {one.rate_unit}",
        ]
    )


def number(value: float) -> str:
    """Three significant digits, thousands grouped."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{float(f'{value:.3g}'):g}"


def duration(seconds: float) -> str:
    """Seconds in the unit that reads best."""
    if seconds >= 1:
        return f"{number(seconds)} s"
    if seconds >= 1e-3:
        return f"{number(seconds * 1e3)} ms"
    return f"{number(seconds * 1e6)} µs"


def size(size_bytes: float) -> str:
    """Bytes in the decimal unit that reads best, as the source's table does."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size_bytes) >= scale:
            return f"{number(size_bytes / scale)} {unit}"
    return f"{size_bytes:.0f} B"
