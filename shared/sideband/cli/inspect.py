"""``sideband inspect``: what a payload file holds, and whether every byte of it is right."""

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from sideband.errors import InvalidInput
from sideband.payload.header import PayloadHeader
from sideband.payload.marker import MARKER_NAME
from sideband.payload.reader import PayloadReader
from sideband.payload.root import PayloadRoot

FOLDERS: Final = 3  # v<k>, run id and fan-out lie between a file and its root


def inspect(
    file: Annotated[Path, typer.Argument(help="A .sbp file below a payload root.", exists=True)],
) -> None:
    """Print the header of a payload file and verify the checksum of every block.

    Exit status 2 and the error's name when the file is not what it must be.
    """
    path = _root_of(file.absolute())
    name = file.absolute().relative_to(path).as_posix()
    console = Console()
    root = PayloadRoot.open(path)
    with PayloadReader(root, model=None) as reader:
        header = reader.header(name)
        console.print(_facts(name, header))
        console.print(_sections(header))
        blocks = reader.verify(name)
    console.print(f"[green]{blocks} blocks, every checksum right[/]")


def _root_of(file: Path) -> Path:
    root = file.parents[FOLDERS] if len(file.parents) > FOLDERS else None
    if root is None or not (root / MARKER_NAME).exists():
        rule = (
            "must lie where it was written, at <root>/v<k>/<run id>/<hh>/<name>.sbp: its path says "
            f"whose it is; a copy needs these folders and the root's {MARKER_NAME} too"
        )
        raise InvalidInput("file", str(file), rule)
    return root


def _facts(name: str, header: PayloadHeader) -> Table:
    table = Table(title=name, show_header=False)
    model = header.model
    table.add_row("run", header.run_id)
    table.add_row("request", header.request_id)
    table.add_row("policy version", str(header.policy_version))
    table.add_row("model", f"{len(model.layer_ids)} routed of {model.num_layers} layers")
    table.add_row("layers", _ranges(model.layer_ids))
    table.add_row("ids", f"top-{model.top_k} of {model.id_space}; vocabulary {model.vocab_size}")
    return table


def _sections(header: PayloadHeader) -> Table:
    table = Table(title="Sections")
    for heading in ("choice", "field", "encoding", "dtype", "shape", "rows", "positions", "bytes"):
        table.add_column(heading)
    for section in header.sections:
        positions = ", ".join(f"[{pos}, {pos + rows})" for pos, _, rows in section.runs)
        table.add_row(
            str(section.choice),
            section.field,
            section.encoding,
            section.dtype,
            "×".join(map(str, section.shape)),
            str(section.rows),
            positions.replace("[", "\\["),
            str(section.size_bytes),
        )
    return table


def _ranges(layer_ids: tuple[int, ...]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    found: list[list[int]] = []
    for layer in layer_ids:
        if found and found[-1][1] + 1 == layer:
            found[-1][1] = layer
        else:
            found.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
