"""Finds a dialect by the name that the settings give it."""

import importlib
from typing import Final

from services.inference_proxy.dialects.base import Dialect
from sideband.model import ModelShape

PACKAGE: Final = "services.inference_proxy.dialects"
NAME_PATTERN: Final = r"^[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)*$"


class UnknownDialect(Exception):
    """No module of that name makes a dialect."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"no dialect is called {name!r}: give vllm, sglang or a module's full name"
        )


class ModelNeeded(Exception):
    """A dialect, or the proxy's own writing, needs to know the model's layers and experts."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} needs model_config_path")


class CannotPair(Exception):
    """No merge is written for an engine whose decode goes on from prefill's token."""

    def __init__(self, engine: str, dialect: str) -> None:
        self.engine, self.dialect = engine, dialect
        super().__init__(f"engine {engine}: {dialect} engines do not go into a pair")


def load_dialect(name: str, model: ModelShape | None) -> Dialect:
    """What ``make(model)`` of the module gives: one of this package, or the module ``a.b.c``.

    Raises UnknownDialect, ModelNeeded.
    """
    full_name = name if "." in name else f"{PACKAGE}.{name}"
    try:
        make = importlib.import_module(full_name).make
    except (ModuleNotFoundError, AttributeError) as exc:
        raise UnknownDialect(name) from exc
    dialect: Dialect = make(model)
    return dialect
