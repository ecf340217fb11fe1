"""Requests made from the OpenAPI documents, right and wrong ones: no answer is off the document.

``--fuzz-seconds N``: how long each service is asked (default: one seed). A seed has a run of its
own, in which one request meets what another changed: paused, drained, with sessions deleted.
"""

from pathlib import Path
from typing import Any, Final

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
from tests.fuzz.budget import Budget, note_seed
from tests.fuzz.services import served_services
from tests.integration.test_real_answers import CONFIG

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
BINARY_FORMS = (ROLLOUT_CONTENT_TYPE, STEP_CONTENT_TYPE)
REQUEST_TIMEOUT_S: Final = 20.0
EXAMPLES_PER_OPERATION: Final = 15  # right ones, and as many wrong ones


@schemathesis.serializer(*BINARY_FORMS)
def as_bytes(_context: Any, value: Any) -> bytes:
    """Bodies of the binary forms are any bytes."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


def operations(service: str, base_url: str) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"{base_url}/openapi.json")
    results = list(schema.get_all_operations())
    found = [result.ok() for result in results if isinstance(result, Ok)]
    assert len(found) == len(results), "the document has an operation that cannot be read"
    # What ends the run comes last, so that the other operations meet a run that lives.
    return sorted(found, key=lambda operation: "/drain" in operation.path)


@pytest.mark.parametrize("service", SERVICES)
def test_no_answer_is_off_the_document(service: str, tmp_path: Path, budget: Budget) -> None:
    for seed in budget.seeds():
        with served_services(tmp_path / str(seed), CONFIG) as urls:
            for operation in operations(service, urls[service]):
                for mode in schemathesis.GenerationMode:
                    call_operation(operation, mode, seed, budget)


def call_operation(
    operation: Any, mode: schemathesis.GenerationMode, seed: int, budget: Budget
) -> None:
    """Right or wrong requests of one operation, each checked against the document."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=EXAMPLES_PER_OPERATION,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def call(case: Any) -> None:
        note_seed(seed)
        answer = case.call(timeout=REQUEST_TIMEOUT_S)
        assert answer.status_code != 500, (case.as_curl_command(), answer.text)
        case.validate_response(answer, checks=CHECKS)
        budget.count(is_refused=answer.status_code >= 400)

    try:
        call()
    except hypothesis.errors.Unsatisfiable:  # nothing about it can be wrong
        assert mode is schemathesis.GenerationMode.NEGATIVE, operation.label
