"""Acting on a module right after its import: once, in order, and on no other."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sideband.engines.vllm.hooks.imports import AfterImport


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with the modules ``early``, ``late`` and ``broken``; the finders are put back."""
    name = "a_package_for_hooks"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "early.py").write_text("value = 'early'\n")
    (folder / "late.py").write_text("value = 'late'\n")
    (folder / "broken.py").write_text("raise ValueError('broken')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield name
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


def test_the_action_sees_a_module_that_has_run_and_once(package: str) -> None:
    seen: list[str] = []

    def act(module: Any) -> None:
        seen.append(module.value)
        module.value = "changed"

    AfterImport({f"{package}.late": act}).install()
    importlib.import_module(f"{package}.early")
    assert seen == []
    late = importlib.import_module(f"{package}.late")
    assert (seen, late.value) == (["late"], "changed")
    assert importlib.import_module(f"{package}.late") is late
    importlib.reload(late)
    assert (seen, late.value) == (["late"], "late")


def test_a_module_that_is_there_already_is_acted_on_at_once(package: str) -> None:
    early = importlib.import_module(f"{package}.early")
    seen: list[ModuleType] = []
    AfterImport({f"{package}.early": seen.append}).install()
    assert seen == [early]


def test_a_module_that_fails_is_not_acted_on(package: str) -> None:
    seen: list[ModuleType] = []
    AfterImport({f"{package}.broken": seen.append, f"{package}.none": seen.append}).install()
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module(f"{package}.broken")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{package}.none")
    assert seen == []
