"""README, docs, OpenAPI and help say what the code does."""

import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from services.kit.documents import SERVICES, document, settings_page

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
OPEN_TO_ALL = {"/healthz", "/readyz", "/version", "/metrics"}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_names_only_targets_and_files_that_exist(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"`make ([a-z-]+)", text))
    assert named <= targets
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (page.parent / link).exists(), link


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
        errors = [code for code in operation["responses"] if code >= "400"]
        assert errors or path in OPEN_TO_ALL, (method, path)
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
