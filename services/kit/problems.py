"""The one error form of every service: RFC 9457 ``application/problem+json``.

Services raise ``Problem`` (or a subclass from their own ``errors.py``); nothing else decides a
status. ``install`` renders every error of the framework in the same form.
"""

from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

MEDIA_TYPE: Final = "application/problem+json"
SHOWN_CHARACTERS_MAX: Final = 200  # a hostile value must not fill an answer or a log
FAULTS_SHOWN_MAX: Final = 20

log = structlog.get_logger(__name__)


class Problem(Exception):
    """An expected failure at the HTTP edge. ``code`` is stable, for machines; facts are members."""

    status: int = 500
    code: str = "internal_error"
    title: str = "Internal error"

    def __init__(
        self,
        detail: str,
        *,
        status: int | None = None,
        code: str | None = None,
        title: str | None = None,
        headers: Mapping[str, str] | None = None,
        **facts: object,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.status = status if status is not None else type(self).status
        self.code = code if code is not None else type(self).code
        self.title = title if title is not None else type(self).title
        self.headers = dict(headers or {})
        self.facts = facts


class Fault(BaseModel):
    """One broken rule of a request."""

    field: str = Field(description="Where in the request.", examples=["body.turns.0.logprobs"])
    rule: str = Field(description="What it must be.", examples=["must be a list"])
    value: str | None = Field(
        default=None, description="What was sent, shortened.", examples=["'abc'"]
    )


class ProblemBody(BaseModel):
    """An error answer (RFC 9457). Further members carry the facts of the error."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(
        description="Identifies the kind.", examples=["urn:sideband:problem:draining"]
    )
    title: str = Field(description="The kind in words.", examples=["Draining"])
    status: int = Field(description="The HTTP status.", examples=[503])
    detail: str = Field(
        description="This occurrence in words.", examples=["The service takes no new rollouts."]
    )
    code: str = Field(description="The kind for machines.", examples=["draining"])
    instance: str = Field(description="The path asked for.", examples=["/v1/rollouts"])
    faults: list[Fault] | None = Field(
        default=None, description="Each broken rule of the request.", examples=[[]]
    )


def responses(*kinds: type[Problem]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI ``responses`` for an endpoint that may raise these kinds, and the kit's own."""
    return described(*kinds, InvalidRequest, BodyTooLarge, BodyLate, *UNROUTED)


def described(*kinds: type[Problem]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI ``responses`` of just these kinds."""
    by_status: dict[int, list[type[Problem]]] = {}
    for kind in kinds:
        by_status.setdefault(kind.status, []).append(kind)
    return {
        status: {
            "model": ProblemBody,
            "description": "; ".join(dict.fromkeys(f"{kind.code}: {kind.title}" for kind in group)),
        }
        for status, group in sorted(by_status.items())
    }


class InvalidRequest(Problem):
    """A body, path or header that breaks a rule; the faults name each."""

    status, code, title = 422, "invalid_request", "Invalid request"


class BodyTooLarge(Problem):
    """A body over the service's limit; refused before it is read whole."""

    status, code, title = 413, "body_too_large", "Body too large"


class BodyLate(Problem):
    """A body that is not there in time; nothing was done."""

    status, code, title = 408, "body_late", "Body late"


class HeadTooLarge(Problem):
    """A request line and headers over what a server reads of them; the connection is closed."""

    status, code, title = 431, "head_too_large", "Head too large"


class MalformedRequest(Problem):
    """Bytes that are no HTTP request; the connection is closed."""

    status, code, title = 400, "malformed_request", "Malformed request"


UNROUTED: Final = (MalformedRequest, HeadTooLarge)  # said before anything knows the route


class Unauthorized(Problem):
    """No bearer token, or one that is not among the service's."""

    status, code, title = 401, "unauthorized", "Unauthorized"


class Forbidden(Problem):
    """A valid bearer token whose scope does not reach this route."""

    status, code, title = 403, "forbidden", "Forbidden"


def render(problem: Problem, path: str, faults: Sequence[Fault] = ()) -> JSONResponse:
    """The answer for one problem."""
    body: dict[str, Any] = {
        "type": f"urn:sideband:problem:{problem.code}",
        "title": problem.title,
        "status": problem.status,
        "detail": problem.detail,
        "code": problem.code,
        "instance": path,
        **problem.facts,
    }
    if faults:
        body["faults"] = [fault.model_dump() for fault in faults]
    return JSONResponse(
        body, status_code=problem.status, media_type=MEDIA_TYPE, headers=problem.headers
    )


def install(app: FastAPI) -> None:
    """Render every error of ``app`` as a problem. An unexpected one is logged and stays opaque."""

    @app.exception_handler(Problem)
    async def on_problem(request: Request, problem: Problem) -> JSONResponse:
        return refused(problem, request.scope["path"])

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        faults = faults_of(error.errors())
        first = faults[0] if faults else Fault(field="body", rule="is not valid")
        detail = f"{first.field}: {first.rule}"
        return render(InvalidRequest(detail), request.scope["path"], faults)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error.__cause__, Problem):  # raised while the framework read the body
            return refused(error.__cause__, request.scope["path"])
        if isinstance(error.__cause__, UnicodeDecodeError):  # the framework's 400 names nothing
            fault = Fault(field="body", rule="must be JSON in UTF-8")
            return render(
                InvalidRequest("body: must be JSON in UTF-8"), request.scope["path"], [fault]
            )
        phrase = HTTPStatus(error.status_code).phrase
        problem = Problem(
            str(error.detail),
            status=error.status_code,
            code=phrase.lower().replace(" ", "_").replace("-", "_"),
            title=phrase,
            headers=error.headers,
        )
        return render(problem, request.scope["path"])

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        return crashed(error, request.scope["path"])


def refused(problem: Problem, path: str) -> JSONResponse:
    """The answer for a problem, which the log has too."""
    emit = log.warning if problem.status < 500 else log.error
    emit("request_refused", status=problem.status, code=problem.code, detail=problem.detail)
    return render(problem, path)


def crashed(error: Exception, path: str) -> JSONResponse:
    """The answer for a bug: the trace goes to the log, never to the client."""
    log.error("request_crashed", path=path, error=type(error).__name__, exc_info=error)
    return render(Problem("An unexpected error; the log has it."), path)


def contained(app: ASGIApp) -> ASGIApp:
    """``app`` outside of a framework: what it raises becomes the answer that it is inside."""

    async def contain(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except Problem as problem:
            await refused(problem, scope["path"])(scope, receive, send)
        except Exception as error:  # the process edge
            await crashed(error, scope["path"])(scope, receive, send)
            raise

    return contain


def only_problems(document: dict[str, Any]) -> dict[str, Any]:
    """An OpenAPI document in which every error answer is a problem and nothing else."""
    reference = {"schema": {"$ref": "#/components/schemas/ProblemBody"}}
    for operations in document["paths"].values():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                if status >= "400":
                    answer["content"] = {MEDIA_TYPE: reference}
    for unused in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(unused, None)
    return document


def faults_of(errors: Iterable[Mapping[str, Any]]) -> list[Fault]:
    """pydantic's errors as faults, bounded in number and size."""
    faults = []
    for error in list(errors)[:FAULTS_SHOWN_MAX]:
        value = error.get("input")
        shown = None if isinstance(value, (dict, list)) else repr(value)[:SHOWN_CHARACTERS_MAX]
        field = ".".join(str(part) for part in error.get("loc", ())) or "body"
        rule = str(error.get("msg", "is not valid"))
        faults.append(Fault(field=field[:SHOWN_CHARACTERS_MAX], rule=rule, value=shown))
    return faults
