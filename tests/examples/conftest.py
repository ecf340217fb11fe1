"""One play of the stand-in engine for all tests that need rollouts."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Rollouts of every scene; skipped by name where torch is not installed."""
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    from tests.examples.support import play_all

    return play_all(tmp_path_factory.mktemp("model"))


@pytest.fixture
def without_gradients() -> Iterator[None]:
    """Nothing in the test is differentiated."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with torch.no_grad():
        yield
