"""All commands in one application. A named error is one line on stderr and exit status 2."""

import sys

import typer
from rich.console import Console

from sideband.cli.doctor import doctor
from sideband.cli.entry import EXIT_ERROR
from sideband.cli.inspect import inspect
from sideband.cli.keys import keys
from sideband.errors import SidebandError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Tools around a Sideband run: its payload root, its files, its keys.",
)
app.command()(doctor)
app.command()(inspect)
app.command()(keys)


def main() -> None:
    """Run the command of the command line."""
    try:
        app()
    except SidebandError as exc:
        Console(stderr=True).print(f"[red]error:[/red] {exc}", highlight=False, soft_wrap=True)
        sys.exit(EXIT_ERROR)
