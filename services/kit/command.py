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
        lines = [_line(kind, fault["loc"], fault["msg"]) for fault in faults]
        parser.exit(2, "".join(f"{parser.prog}: {line}\n" for line in lines))
    except SettingsError as exc:  # a list or an object that is no JSON
        (name,) = _NAMED.findall(str(exc))
        line = _line(kind, (name,), f"must be JSON: {exc.__cause__}")
        parser.exit(2, f"{parser.prog}: {line}\n")


def _line(kind: type[ServiceSettings], place: Sequence[int | str], rule: str) -> str:
    """``SIDEBAND_PROXY_ENGINES[0].role: must ...``; a rule between settings names them itself."""
    rule = rule.removeprefix("Value error, ")
    if not place:
        return by_variables(kind, rule)
    name, *parts = place
    inside = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return f"{_variable(kind, str(name))}{inside}: {rule}"


def by_variables(kind: type[ServiceSettings], rule: str) -> str:
    """A rule between settings, which it names by their variables.

    A name of several words is one wherever it stands; one of a single word, such as ``start``, at
    the rule's beginning or before a ``=`` only: elsewhere it is a word like any other.
    """
    names = sorted(kind.model_fields, key=len, reverse=True)
    of_words = "|".join(name for name in names if "_" in name)
    single = "|".join(name for name in names if "_" not in name)
    found = rf"\b(?:{of_words})\b|^(?:{single})(?=:| is | must )|\b(?:{single})(?==)"
    return re.sub(found, lambda match: _variable(kind, match[0]), rule)


def _variable(kind: type[ServiceSettings], name: str) -> str:
    return f"{kind.model_config.get('env_prefix')}{name.upper()}"
