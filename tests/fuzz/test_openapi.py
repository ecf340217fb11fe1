"""Requests made from the OpenAPI documents, right and wrong ones: no answer is off the document.

``--fuzz-seconds N``: how long each service is asked (default: one seed). A seed has a run of its
own, in which one request meets what another changed: paused, drained, with sessions deleted.
"""

from pathlib import Path
from typing import Any, Final

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
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
from tests.fuzz.known import Known
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
LATE: Final = tuple(  # after these, less and less can be asked
    enumerate(("policy-version", "weights", "go-back", "lineage", "/v1/end", "drain"), start=1)
)
NAMING: Final = (  # what they name is there from the beginning
    "/v1/engines/{name}/eject",
    "/v1/engines/{name}/return",
    "/v1/sessions/{session_id}",
    "/v1/leases/{lease_id}",
)
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
    return sorted(found, key=turn_of)


def turn_of(operation: Any) -> tuple[int, bool, bool]:
    """What makes comes first, then what looks, then what takes away, and what ends the run last."""
    method, path = operation.method.upper(), operation.path
    late = 0 if method == "GET" else next((n for n, end in LATE if path.endswith(end)), 0)
    return late, method == "DELETE", method == "GET"


@pytest.mark.parametrize("service", SERVICES)
def test_no_answer_is_off_the_document(service: str, tmp_path: Path, budget: Budget) -> None:
    for seed in budget.seeds():
        with served_services(tmp_path / str(seed), CONFIG) as urls:
            known = Known()
            known.begin(urls)
            found = operations(service, urls[service])
            for operation in found:
                for mode in schemathesis.GenerationMode:
                    call_operation(operation, mode, seed, budget, known)
            naming = {operation.label for operation in found if operation.path in NAMING}
            assert naming <= known.answered, "they were only asked about what is not there"


def call_operation(
    operation: Any, mode: schemathesis.GenerationMode, seed: int, budget: Budget, known: Known
) -> None:
    """Right or wrong requests of one operation, each checked against the document."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=EXAMPLES_PER_OPERATION,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    def call(case: Any, data: st.DataObject) -> None:
        note_seed(seed)
        if mode is schemathesis.GenerationMode.POSITIVE:
            known.put_into(case, data)
        answer = case.call(timeout=REQUEST_TIMEOUT_S)
        assert answer.status_code != 500, (case.as_curl_command(), answer.text)
        case.validate_response(answer, checks=CHECKS)
        budget.count(is_refused=answer.status_code >= 400)
        if answer.status_code < 300:
            known.answered.add(operation.label)
            if answer.headers["content-type"] == ["application/json"]:
                known.note(answer.json())

    try:
        call()
    except hypothesis.errors.Unsatisfiable:  # nothing about it can be wrong
        assert mode is schemathesis.GenerationMode.NEGATIVE, operation.label
