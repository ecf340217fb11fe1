"""The entry point over a package shaped as vLLM's: what it waits for, and what it says."""

import importlib
import logging
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sideband.engines.vllm.hooks import router
from sideband.engines.vllm.plugin import register
from sideband.engines.vllm.versions import (
    OUTPUTS_MODULE,
    ROUTER_MODULE,
    SERVING_CLASS,
    SERVING_MODULE,
)
from sideband.errors import InvalidInput

SERVING = "from tests.unit.engines.vllm.fakes import FakeServingTokens as ServingTokens\n"
ROUTER = """
from types import SimpleNamespace
from .serving import ServingTokens
routes = []
router = SimpleNamespace(add_route=lambda path, show, **options: routes.append((path, show)))
def generate_tokens(request):
    return request.handler
def JSONResponse(body, status=200):
    return body, status
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package called vllm on the path; what is imported of it is forgotten afterwards."""
    folder = tmp_path / "vllm"
    inner = folder / "entrypoints" / "scale_out" / "token_in_token_out"
    inner.mkdir(parents=True)
    for package in (inner, inner.parent, inner.parent.parent):
        (package / "__init__.py").write_text("")
    (folder / "__init__.py").write_text('__version__ = "0.32.0"\n')
    (folder / "envs.py").write_text("VLLM_USE_RUST_FRONTEND = False\n")
    (inner / "serving.py").write_text(SERVING)
    (inner / "api_router.py").write_text(ROUTER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield folder
    for module in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        del sys.modules[module]


def test_the_distribution_names_the_entry_point() -> None:
    (found,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "sideband"]
    assert found.load() is register


def test_nothing_of_the_http_side_is_imported_for_the_plugins_sake(
    vllm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    register()
    assert SERVING_MODULE not in sys.modules
    assert caplog.records == []


def test_the_handlers_class_is_replaced_when_the_server_imports_it(vllm: Path) -> None:
    register()
    module = importlib.import_module(SERVING_MODULE)
    handler = getattr(module, SERVING_CLASS)
    assert handler.__name__ == "SidebandServingTokens"
    assert handler.mro()[2].__name__ == "FakeServingTokens"
    assert getattr(importlib.import_module(ROUTER_MODULE), SERVING_CLASS) is handler


@pytest.mark.parametrize(("version", "is_hooked"), [("0.30.0", True), ("0.32.0", False)])
def test_joined_parts_are_hooked_only_where_they_lose_rows(
    vllm: Path, version: str, is_hooked: bool
) -> None:
    (vllm / "__init__.py").write_text(f'__version__ = "{version}"\n')
    (vllm / "outputs.py").write_text("class RequestOutput:\n    def add(self, *a): ...\n")
    register()
    module: Any = importlib.import_module(OUTPUTS_MODULE)
    assert (module.RequestOutput.add.__name__ == "add_all") == is_hooked


async def test_the_router_gets_a_route_that_tells_what_the_handler_is(vllm: Path) -> None:
    register()
    module: Any = importlib.import_module(ROUTER_MODULE)
    ((path, show),) = module.routes
    assert path == router.PATH

    async def shown(*, weight_version: str | None) -> dict[str, str | None]:
        return {"weights": weight_version}

    async def named() -> str:
        return "4"

    for client, told in (
        (SimpleNamespace(get_weight_version=named), "4"),
        (SimpleNamespace(), None),  # a version that keeps no name
    ):
        handler = SimpleNamespace(sideband=SimpleNamespace(shown=shown), engine_client=client)
        assert await show(SimpleNamespace(handler=handler)) == ({"weights": told}, 200)
    assert (await show(SimpleNamespace(handler=None)))[1] == 404


def test_an_unknown_version_gets_a_handler_that_refuses(vllm: Path) -> None:
    (vllm / "__init__.py").write_text('__version__ = "0.77.0"\n')
    register()
    handler = getattr(importlib.import_module(SERVING_MODULE), SERVING_CLASS)
    assert handler.__name__ == "RefusingServingTokens"


def test_an_unknown_version_that_was_accepted_is_handled(
    vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (vllm / "__init__.py").write_text('__version__ = "0.77.0"\n')
    monkeypatch.setenv("SIDEBAND_VLLM_ACCEPT_VERSION", "0.77")
    register()
    handler = getattr(importlib.import_module(SERVING_MODULE), SERVING_CLASS)
    assert handler.__name__ == "SidebandServingTokens"


@pytest.mark.parametrize("depth", [1, 3])
def test_a_vllm_without_the_module_is_said(
    vllm: Path, caplog: pytest.LogCaptureFixture, depth: int
) -> None:
    inner = vllm / "entrypoints" / "scale_out" / "token_in_token_out"
    (inner / "serving.py" if depth == 1 else inner.parent / "__init__.py").unlink()
    if depth == 3:
        (vllm / "entrypoints").rename(vllm / "elsewhere")
    register()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "all answers are inline" in record.getMessage()


def test_a_front_end_that_loads_no_plugin_is_said(
    vllm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (vllm / "envs.py").write_text("VLLM_USE_RUST_FRONTEND = True\n")
    register()
    assert ["VLLM_USE_RUST_FRONTEND" in record.getMessage() for record in caplog.records] == [True]


def test_a_setting_that_cannot_be_stops_the_server(
    vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDEBAND_VLLM_PAYLOAD_ROT", "/mnt")
    with pytest.raises(InvalidInput, match="SIDEBAND_VLLM_PAYLOAD_ROT"):
        register()
