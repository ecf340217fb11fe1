"""A small mixture-of-experts model, trained on what ``RankFeed`` gives; see docs/trainer.md."""

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console

from examples.train_tiny_moe.mismatch import measure
from examples.train_tiny_moe.run import Plan, run
from examples.train_tiny_moe.tables import print_comparison, print_mismatch
from sideband.batch.types import Layout

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
THREADS = 1  # matrices this small gain nothing from more, and the ranks need the cores
DEFAULT_CONFIG = Path(__file__).parent / "tiny-moe.config.json"

Out = Annotated[Path, typer.Option(help="Folder for weights, payloads, gradients and logs.")]


@app.command()
def train(
    out: Out = Path("example-out"),
    layout: Annotated[
        Literal["both", "contiguous", "zigzag"], typer.Option(help="How CP cuts a packed row.")
    ] = "both",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each layout.")] = 2,
    seed: Annotated[int, typer.Option(help="Decides weights, prompts and sampling.")] = 0,
    noise: Annotated[float, typer.Option(min=0, help="Noise on the engine's router.")] = 0.1,
    workers: Annotated[int, typer.Option(min=0, max=1, help="Data workers of a rank.")] = 1,
    config: Annotated[
        Path, typer.Option(help="The model's config.json.", exists=True)
    ] = DEFAULT_CONFIG,
) -> None:
    """Train with DP 2 × CP 2 ranks under torchrun, and in one process beside them.

    Exit status 1 when loss or gradients differ.
    """
    torch.set_num_threads(THREADS)
    layouts: tuple[Layout, ...] = ("contiguous", "zigzag") if layout == "both" else (layout,)
    plan = Plan(
        out=out.resolve(),
        config_path=config,
        layouts=layouts,
        steps=steps,
        seed=seed,
        noise_std=noise,
        data_workers=workers,
    )
    results = asyncio.run(run(plan))
    console = Console()
    print_comparison(console, results)
    report = results[0].steps[0].report
    title = "float32 trainer against the bfloat16 engine, first step"
    print_mismatch(console, report.mismatch(), title=title)
    raise typer.Exit(0 if all(result.is_good for result in results) else 1)


@app.command()
def mismatch(
    model: Annotated[Path, typer.Option(help="The engine's model folder.", exists=True)],
    answers: Annotated[Path, typer.Option(help="Its recorded answers, JSON lines.", exists=True)],
    out: Out = Path("example-out"),
    payload_root: Annotated[
        Path | None, typer.Option(help="Where the rows of answers by handle lie.", exists=True)
    ] = None,
) -> None:
    """Measure how far a float32 trainer is from a real engine, with and without its rows."""
    torch.set_num_threads(THREADS)
    measuring = measure(model.resolve(), answers, out.resolve(), answers_root=payload_root)
    found = asyncio.run(measuring)
    print_mismatch(Console(), found, title=f"float32 trainer against {answers.name}")
