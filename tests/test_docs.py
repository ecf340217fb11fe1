"""README, docs, OpenAPI and help say what the code does."""

import ast
import dataclasses
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import orjson
import pytest

import sideband
from services.kit.documents import SERVICES, document, settings_page
from services.kit.problems import UNROUTED
from sideband.engines.vllm.settings import NAMES, PREFIX

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PRESENT = [page for page in PAGES if page.name != "CHANGELOG.md"]  # it tells of the past too
OPEN_TO_ALL = {"/healthz", "/readyz", "/version", "/metrics"}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_names_only_targets_and_places_that_exist(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"`make ([a-z-]+)", text))
    assert named <= targets
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        place = page.parent / link if link else page
        assert place.exists(), link
        assert not anchor or anchor in anchors(place), f"{link}#{anchor}"


@pytest.mark.parametrize("page", PRESENT, ids=name)
def test_a_page_names_only_settings_that_exist(page: Path) -> None:
    word = r"SIDEBAND_[A-Z][A-Z_]*[A-Z]"
    known = set(re.findall(word, settings_page())) | {PREFIX + own for own in NAMES}
    for file in ("Makefile", "docker-compose.yml"):
        known |= set(re.findall(word, (ROOT / file).read_text()))
    assert set(re.findall(word, page.read_text())) <= known


@cache
def routes() -> set[tuple[str, str]]:
    """Of the services, and the plugin's own."""
    found = {("GET", "/inference/v1/sideband")}
    for service in SERVICES:
        found |= {(method.upper(), path) for path, method, _ in operations(service)}
    return found


@pytest.mark.parametrize("page", PRESENT, ids=name)
def test_a_page_names_only_routes_that_exist(page: Path) -> None:
    named = re.findall(r"`(GET|POST|PUT|DELETE) (/[^`?]*)", page.read_text())
    assert set(named) <= routes()


@pytest.mark.parametrize("page", PRESENT, ids=name)
def test_a_page_names_only_metrics_that_exist(page: Path) -> None:
    known = "".join((ROOT / "services" / s / "metrics.py").read_text() for s in SERVICES)
    word = r"`((?:proxy|orchestrator|feed)_\w+_(?:total|seconds|bytes|fraction))\b"
    gone = {found for found in re.findall(word, page.read_text()) if found not in known}
    assert not gone


def test_the_readme_example_uses_the_library_as_it_is() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    fields = {field.name for field in dataclasses.fields(sideband.RankMicroBatch)}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            assert node.module == "sideband"
            assert {alias.name for alias in node.names} <= set(sideband.__all__)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "RankFeed":
            known = inspect.signature(sideband.RankFeed).parameters
            assert {keyword.arg for keyword in node.keywords} <= set(known)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "batch":
            assert node.attr in fields


@pytest.mark.parametrize("service", SERVICES)
def test_the_openapi_document_is_that_of_the_code(service: str) -> None:
    written = (ROOT / "docs" / "openapi" / f"{service}.json").read_bytes()
    assert written == document(service), "run make openapi"


def test_the_settings_page_is_that_of_the_code() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page(), "run make openapi"


def operations(service: str) -> list[tuple[str, str, dict[str, Any]]]:
    api = orjson.loads(document(service))
    return [
        (path, method, operation)
        for path, methods in api["paths"].items()
        for method, operation in methods.items()
    ]


@pytest.mark.parametrize("service", SERVICES)
def test_every_operation_says_what_it_does_and_lists_its_errors(service: str) -> None:
    for path, method, operation in operations(service):
        assert operation.get("summary"), (method, path)
        errors = {code for code in operation["responses"] if code >= "400"}
        unrouted = {str(kind.status) for kind in UNROUTED}
        assert errors >= unrouted, (method, path)
        assert errors > unrouted or path in OPEN_TO_ALL, (method, path)
        for code in errors:
            content = operation["responses"][code]["content"]
            assert "application/problem+json" in content, (method, path, code)


@pytest.mark.parametrize("service", SERVICES)
def test_every_field_is_described_with_an_example(service: str) -> None:
    schemas = orjson.loads(document(service))["components"]["schemas"]
    bare = [
        f"{schema}.{field}"
        for schema, body in schemas.items()
        if schema not in {"HTTPValidationError", "ValidationError"}
        for field, facts in body.get("properties", {}).items()
        # A nested object shows its example field by field.
        if "description" not in facts or not ({"examples", "example", "$ref"} & set(facts))
    ]
    assert not bare


@pytest.mark.parametrize("service", SERVICES)
def test_every_parameter_is_described(service: str) -> None:
    bare = [
        (path, method, parameter["name"])
        for path, method, operation in operations(service)
        for parameter in operation.get("parameters", [])
        if "description" not in parameter
    ]
    assert not bare


def test_each_guarantee_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text()
    rows = re.findall(r"^\|.*\| (.*test_.*) \|$", page, re.M)
    assert len(rows) > 10
    for row in rows:
        pieces = re.findall(r"((?:`\w+`[^\[`]*)+)\[\w+\]\(\.\./([^)]+)\)", row)
        assert pieces, row
        for names, path in pieces:
            text = (ROOT / path).read_text()
            for test in re.findall(r"`(\w+)`", names):
                assert re.search(rf"\b{test}\b", text), (test, path)
