"""``python -m bench``: run the rows, show the table, and write the page when asked to."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from bench import machine, page, plots
from bench.registry import rows
from bench.results import Report, RowResult
from bench.scale import SCALES

FINDINGS_MARK = "<!-- findings -->"
console = Console()


def main(
    full: Annotated[bool, typer.Option("--full", help="The big rows, more rounds.")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="Only to see that every row runs.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Run this row (repeatable).")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder that gets performance.md and performance/.")
    ] = None,
    list_rows: Annotated[bool, typer.Option("--list", help="Name the rows and stop.")] = False,
) -> None:
    """Measure Sideband beside the inline path and the machine's limits."""
    chosen = [row for row in rows() if not only or row.name in only]
    if list_rows:
        console.print("\n".join(row.name for row in rows()))
        return
    unknown = set(only or ()) - {row.name for row in rows()}
    if unknown:
        raise typer.BadParameter(f"no such row: {', '.join(sorted(unknown))}", param_hint="--only")
    scale = SCALES["full" if full else "tiny" if tiny else "quick"]
    place = machine.describe()
    found: list[RowResult] = []
    for row in chosen:
        with console.status(f"{row.name} ({len(found) + 1}/{len(chosen)})"):
            found.append(row.run(scale))
        show(found[-1])
    report = Report(scale=scale.name, machine=place, versions=machine.versions(), rows=found)
    if out is not None:
        if only:
            report = merged(report, out / "performance" / "report.json")
        write(report, out)
        console.print(f"wrote {out / 'performance.md'}")


def show(result: RowResult) -> None:
    """The row's claims on the terminal."""
    table = Table(title=f"{result.title} ({result.seconds_spent:.0f} s)", title_justify="left")
    for column in ("what", "value", "target", "reached"):
        table.add_column(column)
    for claim in result.claims:
        sign = "≤" if claim.is_ceiling else "≥"
        target = "" if claim.target is None else f"{sign} {page.number(claim.target)}"
        table.add_row(claim.what, f"{page.number(claim.value)} {claim.unit}", target, claim.verdict)
    console.print(table)


def merged(report: Report, path: Path) -> Report:
    """The rows just measured in place of the earlier ones; the rest of an earlier report stays."""
    if not path.exists():
        return report
    earlier = msgspec.json.decode(path.read_bytes(), type=Report)
    new = {row.name: row for row in report.rows}
    kept = [new.pop(row.name, row) for row in earlier.rows]
    return msgspec.structs.replace(report, rows=[*kept, *new.values()])


def write(report: Report, out: Path) -> None:
    """The page, the numbers and the plots. What stands below the findings' mark is kept."""
    folder = out / "performance"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
    )
    for row in report.rows:
        for curve in row.curves:
            plots.draw(curve, folder)
    target = out / "performance.md"
    _, _, findings = (target.read_text() if target.exists() else "").partition(FINDINGS_MARK)
    text = page.render(report, plots="performance")
    target.write_text(f"{text}\n{FINDINGS_MARK}{findings or chr(10)}")


if __name__ == "__main__":
    typer.run(main)
