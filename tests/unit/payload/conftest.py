from collections.abc import Iterator
from pathlib import Path

import pytest

from sideband.payload import PayloadReader, PayloadRoot
from tests.unit.payload.support import make_root


@pytest.fixture
def root(tmp_path: Path) -> PayloadRoot:
    return make_root(tmp_path / "payloads")


@pytest.fixture
def reader(root: PayloadRoot) -> Iterator[PayloadReader]:
    with PayloadReader(root, model=None) as opened:
        yield opened
