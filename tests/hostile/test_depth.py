"""JSON that nests without end, at every route of every service that takes JSON: never a crash."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from services.kit.documents import SERVICES
from services.kit.problems import MEDIA_TYPE
from tests.fuzz.services import Urls, served_services
from tests.integration.test_real_answers import CONFIG

JSON = "application/json"
HEADERS = {"content-type": JSON}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Urls]:
    """One run for all routes of this module."""
    with served_services(tmp_path_factory.mktemp("depth") / "root", CONFIG) as found:
        yield found


def routes_with_json(document: dict[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    """Method, path and the body's named members."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {})
            if JSON in content:
                schema = content[JSON]["schema"]
                name = schema.get("$ref", "").rpartition("/")[2]
                found = document["components"]["schemas"].get(name, schema)
                yield method.upper(), path, list(found.get("properties", {}))


@pytest.mark.parametrize("levels", [300, 1000, 100_000])
@pytest.mark.parametrize("service", SERVICES)
def test_depth_is_refused_by_name_at_every_route(service: str, levels: int, urls: Urls) -> None:
    deep = b"[" * levels + b"]" * levels
    with httpx.Client(base_url=urls[service], timeout=20, trust_env=False) as http:
        routes = list(routes_with_json(http.get("/openapi.json").json()))
        assert routes or service == "trainer_feed", "the feed takes steps in their binary form"
        for method, path, members in routes:
            url = path.format(**dict.fromkeys(("name", "session_id", "lease_id", "engine"), "x"))
            for body in (deep, *(b'{"%s":%s}' % (name.encode(), deep) for name in members)):
                answer = http.request(method, url, content=body, headers=HEADERS)
                assert 400 <= answer.status_code < 500, (method, path, body[:40], answer.text)
                assert answer.headers["content-type"] == MEDIA_TYPE, (method, path)
                assert len(answer.content) < 10_000, (method, path)
        assert http.get("/healthz").status_code == 200
