"""The ways to run a loop: by numpy alone, compiled, and its own Python, which coverage can see."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest

from sideband.compiled import Loop, compile_loops

ARRAYS, COMPILED, PLAIN = "arrays", "compiled", "plain"
WAYS = [
    ARRAYS,
    pytest.param(
        COMPILED, marks=pytest.mark.skipif(not find_spec("numba"), reason="needs sideband[fast]")
    ),
    PLAIN,
]


def names() -> list[str]:
    """Those that can run here."""
    return [way if isinstance(way, str) else COMPILED for way in WAYS if _can_run(way)]


def _can_run(way: object) -> bool:
    return not any(mark.args[0] for mark in getattr(way, "marks", ()))


@contextmanager
def taking(way: str) -> Iterator[None]:
    """All loops are run in this way."""
    if way == COMPILED:
        compile_loops()
        yield
        return
    with patch.object(Loop, "for_items", lambda loop, count: WAY_OF[way](loop)):
        yield


WAY_OF: dict[str, Callable[[Loop[Any]], Any]] = {
    ARRAYS: lambda loop: None,
    PLAIN: lambda loop: loop.function,
}
