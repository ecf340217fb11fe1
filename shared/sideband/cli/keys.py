"""``sideband keys``: the key files of a feed and its ranks."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sideband.feed.curve import check_curve
from sideband.feed.keys import (
    FEED_NAME,
    PUBLIC_SUFFIX,
    RANK_NAME,
    RANKS_DIR,
    SECRET_SUFFIX,
    make_keys,
)


def keys(
    folder: Annotated[
        Path, typer.Argument(help="Where the key files go; made if it is not there.")
    ],
    rank: Annotated[
        list[str] | None,
        typer.Option(help="A pair of its own for this rank (repeatable); one for all without it."),
    ] = None,
) -> None:
    """Make the keys of the feed's connections: what is missing, never over what is there.

    Only holders of a key whose public half lies in ranks/ can connect to the feed.
    """
    check_curve()
    names = rank or [RANK_NAME]
    made = set(make_keys(folder, names))
    table = Table(title=f"Keys in {folder}")
    for heading in ("file", "", "goes to"):
        table.add_column(heading)
    for path, goes_to in _places(folder, names):
        table.add_row(str(path), "new" if path in made else "was there", goes_to)
    Console().print(table)


def _places(folder: Path, names: list[str]) -> list[tuple[Path, str]]:
    feed, ranks = folder / f"{FEED_NAME}{SECRET_SUFFIX}", folder / RANKS_DIR
    return [
        (feed, "the feed, as SIDEBAND_FEED_CURVE_KEY_FILE; secret"),
        (folder / f"{FEED_NAME}{PUBLIC_SUFFIX}", "every rank, as RankKeys.feed_key"),
        *((folder / f"{name}{SECRET_SUFFIX}", f"{name}, as RankKeys.rank_key; secret")
          for name in names),
        *((ranks / f"{name}{PUBLIC_SUFFIX}", "the feed, whose SIDEBAND_FEED_CURVE_RANKS_DIR is "
           f"{ranks}") for name in names),
    ]  # fmt: skip
