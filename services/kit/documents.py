"""Writes what people read about the services out of the code that decides it.

``python -m services.kit.documents docs`` writes ``docs/openapi/<service>.json``, which clients are
generated from, and ``docs/settings.md``. A test holds both to the code.
"""

import argparse
import importlib
import inspect
from pathlib import Path
from typing import Final

import orjson
from fastapi import FastAPI
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from services.kit.settings import ServiceSettings

SERVICES: Final = ("inference_proxy", "orchestrator", "trainer_feed")


def document(service: str) -> bytes:
    """The OpenAPI document of one service as stable, indented JSON."""
    app: FastAPI = importlib.import_module(f"services.{service}.app").describe()
    options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(app.openapi(), option=options)


def settings_class(service: str) -> type[ServiceSettings]:
    """The one settings class of a service's ``config.py``."""
    module = importlib.import_module(f"services.{service}.config")
    found = [
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, ServiceSettings) and kind is not ServiceSettings
    ]
    assert len(found) == 1, f"{service} must have exactly one settings class"
    return found[0]


def settings_page() -> str:
    """docs/settings.md: each variable, its default and what it does."""
    lines = [
        "# Settings",
        "",
        "Read from environment variables at start; lists and tuples as JSON. An unknown",
        "variable under a service's prefix fails at start, and so does a value out of range.",
        "`/v1/config` shows what is in force, secrets hidden. `make openapi` writes this page.",
    ]
    for service in SERVICES:
        kind = settings_class(service)
        prefix = str(kind.model_config.get("env_prefix"))
        lines += [
            "",
            f"## {service}",
            "",
            "| variable | default | meaning |",
            "| --- | --- | --- |",
        ]
        for name, field in kind.model_fields.items():
            meaning = " ".join((field.description or "").split()).replace("|", "\\|")
            lines.append(f"| `{prefix}{name.upper()}` | {_default(field)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "empty"
    if field.default is PydanticUndefined:
        return "**required**"
    return f"`{field.default}`" if field.default not in (None, (), "") else "none"


def main(folder: Path) -> None:
    """Write every document."""
    (folder / "openapi").mkdir(parents=True, exist_ok=True)
    for service in SERVICES:
        (folder / "openapi" / f"{service}.json").write_bytes(document(service))
    (folder / "settings.md").write_text(settings_page())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m services.kit.documents",
        description="Write the OpenAPI documents and the page of settings out of the code.",
    )
    parser.add_argument("folder", type=Path, help="where settings.md and openapi/ go: docs")
    main(parser.parse_args().folder)
