"""The OpenAPI document is complete: clients are generated from it."""

from collections.abc import Iterator
from typing import Any

from services.inference_proxy.app import describe

DOCUMENT: dict[str, Any] = describe().openapi()


def operations() -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def test_every_field_has_a_description_and_an_example() -> None:
    for name, schema in DOCUMENT["components"]["schemas"].items():
        for field, rules in schema.get("properties", {}).items():
            assert rules.get("description"), f"{name}.{field}"
            assert "examples" in rules or "example" in rules, f"{name}.{field}"


def test_every_parameter_has_a_description_and_an_example() -> None:
    for name, operation in operations():
        for parameter in operation.get("parameters", []):
            assert parameter.get("description"), (name, parameter["name"])
            rules = parameter["schema"]
            assert "examples" in rules or "example" in parameter or "examples" in parameter, name


def test_every_operation_has_a_summary_and_lists_its_errors() -> None:
    for name, operation in operations():
        assert operation.get("summary"), name
        assert operation.get("description") or "/healthz" in name or operation["summary"], name
        if "/v1/" in name:
            assert "401" in operation["responses"], name


def test_what_only_several_workers_say_is_listed_too() -> None:
    asks_others = {
        "GET /v1/engines",
        "GET /v1/sessions",
        "POST /v1/admin/drain",
        "POST /v1/admin/pause",
        "POST /v1/admin/resume",
        "POST /v1/admin/weights",
        "POST /v1/engines/{name}/eject",
        "POST /v1/engines/{name}/return",
        "POST /v1/policy-version",
        "POST /v1/turns/fetch",
        "POST /v1/turns/release",
    }
    silent = set()
    for name, operation in operations():
        assert "misdirected" in operation["responses"]["421"]["description"], name
        if "worker_silent" in operation["responses"].get("503", {}).get("description", ""):
            silent.add(name)
    assert silent == asks_others


def test_generate_lists_each_of_its_errors() -> None:
    listed = DOCUMENT["paths"]["/inference/v1/generate"]["post"]["responses"]
    statuses = {"200", "400", "401", "409", "413", "422", "499", "502", "503", "504"}
    assert statuses <= set(listed)
    for status in statuses - {"200"}:
        assert "application/problem+json" in listed[status]["content"], status
    body = DOCUMENT["paths"]["/inference/v1/generate"]["post"]["requestBody"]
    schema = body["content"]["application/json"]["schema"]["$ref"]
    assert schema.endswith("/GenerateRequest")
