"""Real services, simulated environment, engines and ranks: what the ranks get is checked."""

import asyncio
import shutil
import time
from pathlib import Path
from typing import Annotated, cast, get_args

import orjson
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from sideband.errors import SidebandError
from simulation.checker import CheckPlan, Result, check_all
from simulation.checker import Progress as ProgressFunction
from simulation.corruption import Corruption
from simulation.crash_check import check_crashes
from simulation.live_check import check_live
from simulation.models import NAMES, load_shape
from simulation.plan import Scenario
from simulation.tables import costs, print_checks, print_costs, print_engines
from simulation.topology import TOPOLOGIES

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
LIVE_WORK = 60  # units of progress of the live run
MODEL = "sim-uint8, sim-uint16 or a config.json"

Out = Annotated[Path, typer.Option(help="Folder for logs, results and the plot; made anew.")]
Seed = Annotated[int, typer.Option(help="Decides every token, row and mask.")]
Groups = Annotated[int, typer.Option(min=1, help="Groups of four rollouts, per model.")]


@app.command()
def demo(out: Out = Path("demo-out"), seed: Seed = 0, groups: Groups = 12) -> None:
    """The whole path on this machine: five ways, two models, six topologies, one live run.

    Exit status 1 when anything differs from the seeded truth.
    """
    plan = CheckPlan(out=_made_anew(out), scenario=Scenario(seed=seed, groups=groups))
    result = _checked(plan, with_live=True)
    from simulation.plot import write_plot  # matplotlib: only here, and after the work

    console = Console()
    print_engines(console, result)
    found = costs(result, plan.models)
    print_checks(console, result.checks)
    print_costs(console, found)
    write_plot(found, plan.out / "bytes.svg")
    console.print(f"Plot: {plan.out / 'bytes.svg'}   Results: {plan.out / 'results.json'}")
    raise typer.Exit(0 if result.is_good else 1)


@app.command()
def check(
    out: Out = Path("demo-out"),
    seed: Seed = 0,
    groups: Groups = 3,
    model: Annotated[
        list[str] | None, typer.Option(help=f"{MODEL} (repeatable); both by default.")
    ] = None,
    topologies: Annotated[int, typer.Option(min=1, help="The first so many topologies.")] = 6,
    corrupt: Annotated[
        str, typer.Option(help="Damage a file, segment, row, mask or score: it must be found.")
    ] = ("none"),
    live: Annotated[bool, typer.Option(help="A live run as well.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes of each proxy.")] = 1,
) -> None:
    """Only the checks of the demo, smaller. Exit status 1 when anything differs."""
    if corrupt not in get_args(Corruption):
        raise typer.BadParameter(f"must be one of {', '.join(get_args(Corruption))}")
    plan = CheckPlan(
        out=_made_anew(out),
        models=_known(*(model or NAMES)),
        scenario=Scenario(seed=seed, groups=groups),
        topologies=TOPOLOGIES[:topologies],
        corruption=cast("Corruption", corrupt),
        proxy_workers=workers,
    )
    result = _checked(plan, with_live=live)
    print_checks(Console(), result.checks)
    raise typer.Exit(0 if result.is_good else 1)


@app.command()
def crash(
    out: Out = Path("crash-out"),
    seed: Seed = 0,
    groups: Groups = 24,
    model: Annotated[str, typer.Option(help=f"{MODEL}.")] = "sim-uint16",
) -> None:
    """A live run in which every process is killed at least once. Exit status 1 if it shows."""
    plan = CheckPlan(out=_made_anew(out), scenario=Scenario(seed=seed, groups=groups))
    result = Result()
    killer = asyncio.run(check_crashes(plan, result, model=_known(model)[0]))
    console = Console()
    print_checks(console, result.checks)
    killed = ", ".join(f"{name} {count}" for name, count in sorted(killer.killed.items()))
    console.print(f"killed: {killed}", highlight=False)
    raise typer.Exit(0 if result.is_good else 1)


def _checked(plan: CheckPlan, *, with_live: bool) -> Result:
    """Run the checks behind a progress bar; the results lie in ``results.json``."""
    started_s = time.monotonic()
    columns = (
        TextColumn("{task.description:28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as bar:
        total = plan.work + (LIVE_WORK if with_live else 0)
        task = bar.add_task("starting", total=total)

        def progress(description: str, units: int) -> None:
            bar.update(task, description=description, advance=units)

        result = asyncio.run(_run(plan, with_live=with_live, progress=progress))
        bar.update(task, description="done", completed=total)
    write_results(plan, result, elapsed_s=time.monotonic() - started_s)
    return result


async def _run(plan: CheckPlan, *, with_live: bool, progress: ProgressFunction) -> Result:
    result = await check_all(plan, progress)
    if with_live:
        progress("live run", 0)
        await check_live(plan, result, model=plan.models[-1])
        progress("live run", LIVE_WORK)
    return result


def write_results(plan: CheckPlan, result: Result, *, elapsed_s: float) -> None:
    """Everything that the tables show, for machines."""
    body = {
        "is_good": result.is_good,
        "elapsed_s": round(elapsed_s, 1),
        "checks": [
            {
                "name": check.name,
                "compared": check.compared,
                "different": check.different,
                "findings": check.findings,
            }
            for check in result.checks
        ],
        "costs": costs(result, plan.models),
    }
    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_DATACLASS
    (plan.out / "results.json").write_bytes(orjson.dumps(body, option=options))


MARKER = ".simulation-out"


def _known(*models: str) -> tuple[str, ...]:
    """The same; BadParameter where one is no model."""
    for model in models:
        try:
            load_shape(model)
        except SidebandError as exc:
            raise typer.BadParameter(str(exc), param_hint="--model") from exc
    return models


def _made_anew(out: Path) -> Path:
    """An empty folder. Only one that an earlier run made is wiped."""
    out = out.resolve()
    if out.exists() and any(out.iterdir()):
        if not (out / MARKER).exists():
            raise typer.BadParameter(f"{out} is not empty and no earlier run made it")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).touch()
    return out
