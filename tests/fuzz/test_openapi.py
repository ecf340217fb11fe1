"""Requests made from the OpenAPI documents, right and wrong ones: no answer is off the document.

``--fuzz-examples N``: requests per operation (default 15). The services are those of one run, so
what one request changes, the next one meets: paused, drained, with sessions deleted.
"""

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from services.kit.documents import SERVICES
from services.orchestrator.wire import ROLLOUT_CONTENT_TYPE
from sideband.feed.codec import STEP_CONTENT_TYPE
from tests.fuzz.services import Urls, served_services
from tests.integration.test_real_answers import CONFIG

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
BINARY_FORMS = (ROLLOUT_CONTENT_TYPE, STEP_CONTENT_TYPE)
REQUEST_TIMEOUT_S = 20.0


@schemathesis.serializer(*BINARY_FORMS)
def as_bytes(_context: Any, value: Any) -> bytes:
    """Bodies of the binary forms are any bytes."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Urls]:
    """One run for all operations of this module."""
    with served_services(tmp_path_factory.mktemp("fuzz") / "root", CONFIG) as found:
        yield found


def operations(service: str, base_url: str) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"{base_url}/openapi.json")
    results = list(schema.get_all_operations())
    found = [result.ok() for result in results if isinstance(result, Ok)]
    assert len(found) == len(results), "the document has an operation that cannot be read"
    # What ends the run comes last, so that the other operations meet a run that lives.
    return sorted(found, key=lambda operation: "/drain" in operation.path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("service", SERVICES)
def test_no_answer_is_off_the_document(
    service: str, urls: Urls, request: pytest.FixtureRequest
) -> None:
    examples = request.config.getoption("--fuzz-examples")
    tried = 0
    for operation in operations(service, urls[service]):
        for mode in schemathesis.GenerationMode:

            @hypothesis.settings(
                max_examples=examples,
                phases=[hypothesis.Phase.generate],
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def call(case: Any) -> None:
                nonlocal tried
                tried += 1
                answer = case.call(timeout=REQUEST_TIMEOUT_S)
                assert answer.status_code != 500, (case.as_curl_command(), answer.text)
                case.validate_response(answer, checks=CHECKS)

            try:
                call()
            except hypothesis.errors.Unsatisfiable:  # nothing about it can be wrong
                assert mode is schemathesis.GenerationMode.NEGATIVE, operation.label
    assert tried > 5 * examples
    request.node.user_properties.append(("requests", tried))
