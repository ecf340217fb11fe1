"""Writes the OpenAPI document of every service: ``python -m services.kit.openapi FOLDER``.

The documents in docs/openapi are what clients are generated from; a test holds them to the code.
"""

import importlib
import sys
from pathlib import Path
from typing import Final

import orjson

SERVICES: Final = ("inference_proxy", "orchestrator", "trainer_feed")


def document(service: str) -> bytes:
    """The OpenAPI document of one service as stable, indented JSON."""
    app = importlib.import_module(f"services.{service}.app").describe()
    options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(app.openapi(), option=options)


def main(folder: Path) -> None:
    """Write one file per service."""
    folder.mkdir(parents=True, exist_ok=True)
    for service in SERVICES:
        (folder / f"{service}.json").write_bytes(document(service))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
