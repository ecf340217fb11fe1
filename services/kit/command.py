"""The command line of a service: its settings come from the environment, so it knows ``--help``."""

import argparse
import re
from collections.abc import Sequence
from typing import Final, TypeVar

from pydantic import ValidationError
from pydantic_settings import SettingsError

from services.kit.settings import ServiceSettings

S = TypeVar("S", bound=ServiceSettings)
_NAMED: Final = re.compile(r'field "(\w+)"')  # how the error of a value that is no JSON names it


def settings_of(kind: type[S], service: str, argv: Sequence[str] | None = None) -> S:
    """The settings of ``service``, which ``argv`` may only ask help for.

    Ends the process: after help with status 0, else with 2 and a line for each setting that is
    missing or out of range, by the name of its variable. Values are not shown: some are secrets.
    """
    prefix = str(kind.model_config.get("env_prefix"))
    parser = argparse.ArgumentParser(
        prog=f"python -m services.{service}",
        description="Serves until SIGTERM or SIGINT. Every setting is an environment variable:",
        epilog="docs/settings.md has their defaults. GET /v1/config shows what is in force.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    assert parser.description is not None
    width = max(map(len, kind.model_fields))
    for name, field in kind.model_fields.items():
        needed = " (required)" if field.is_required() else ""
        line = f"\n  {prefix}{name.upper():{width}}  {field.description}{needed}"
        parser.description += line.replace("%", "%%")  # argparse fills in what % names
    parser.parse_args(argv)
    try:
        return kind()
    except ValidationError as exc:
        faults = exc.errors(include_url=False, include_input=False)
        lines = [_line(prefix, fault["loc"], fault["msg"]) for fault in faults]
        parser.exit(2, "".join(f"{parser.prog}: {line}\n" for line in lines))
    except SettingsError as exc:  # a list or an object that is no JSON
        (name,) = _NAMED.findall(str(exc))
        line = _line(prefix, (name,), f"must be JSON: {exc.__cause__}")
        parser.exit(2, f"{parser.prog}: {line}\n")


def _line(prefix: str, place: Sequence[int | str], rule: str) -> str:
    """``SIDEBAND_PROXY_ENGINES[0].role: must ...``; a rule between settings names them itself."""
    rule = rule.removeprefix("Value error, ")
    if not place:
        return rule
    name, *parts = place
    inside = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return f"{prefix}{str(name).upper()}{inside}: {rule}"
