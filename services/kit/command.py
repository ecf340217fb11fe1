"""The command line of a service: its settings come from the environment, so it knows ``--help``."""

import argparse
from collections.abc import Sequence
from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import SettingsError

from services.kit.settings import ServiceSettings

S = TypeVar("S", bound=ServiceSettings)


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
        faults = [
            ": ".join(
                [*(f"{prefix}{str(part).upper()}" for part in fault["loc"][:1]), fault["msg"]]
            )
            for fault in exc.errors(include_url=False, include_input=False)
        ]
        parser.exit(2, "".join(f"{parser.prog}: {fault}\n" for fault in faults))
    except SettingsError as exc:  # a list or an object that is no JSON
        parser.exit(2, f"{parser.prog}: {exc}\n")
