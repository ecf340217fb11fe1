"""PostgreSQL for tests: a private server, or the test is skipped by name."""

import contextlib
from collections.abc import Iterator

import pytest

from bench import postgres


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The URL of an empty server."""
    folder = postgres.binaries()
    if folder is None:
        pytest.skip("needs PostgreSQL: initdb is not installed")
    with postgres.server(folder) as url:
        yield url
