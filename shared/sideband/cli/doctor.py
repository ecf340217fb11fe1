"""``sideband doctor``: is this filesystem fit to be a payload root?"""

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from sideband.doctor.findings import Finding, Level, findings_of, worst
from sideband.doctor.visit import visit, visit_alone

STYLE: Final = {Level.GOOD: "green", Level.REMARK: "yellow", Level.UNFIT: "red"}
VERDICT: Final = {
    Level.GOOD: "fit to be a payload root",
    Level.REMARK: "fit to be a payload root, with the remarks above",
    Level.UNFIT: "NOT fit to be a payload root: see above",
}


def doctor(
    root: Annotated[
        Path, typer.Argument(help="A folder on the filesystem that all nodes mount.", exists=True)
    ],
    meet: Annotated[
        str,
        typer.Option(help="Any name. Run the same command on two hosts: both sides are measured."),
    ] = "",
    wait_s: Annotated[
        float, typer.Option(min=1, help="How long to wait for the other host.")
    ] = 120.0,
) -> None:
    """Measure what ranks on another host will see, and say whether that is good enough.

    Alone it knows one host; with --meet NAME on two hosts it knows both. Exit status 1: not fit.
    """
    console = Console()
    with console.status("starting") as status:

        def say(what: str) -> None:
            status.update(what)

        if meet:
            report = visit(root, meet, meet_timeout_s=wait_s, say=say)
        else:
            report = visit_alone(root, say=say)
    if report is None:
        console.print("This side answered; the other host prints the findings.")
        return
    findings = findings_of(report)
    console.print(_table(findings))
    level = worst(findings)
    console.print(f"[{STYLE[level]}]{root} is {VERDICT[level]}[/]", soft_wrap=True)
    raise typer.Exit(1 if level is Level.UNFIT else 0)


def _table(findings: list[Finding]) -> Table:
    table = Table(title="What ranks will see")
    for heading in ("what", "figure", "", "what it means"):
        table.add_column(heading)
    for finding in findings:
        mark = f"[{STYLE[finding.level]}]{finding.level}[/]"
        table.add_row(finding.what, finding.figure, mark, finding.words)
    return table
