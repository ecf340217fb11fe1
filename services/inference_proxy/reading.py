"""Reads what engines send with their dialect: whole answers, and the events of streams."""

from collections.abc import Callable
from typing import Any

from services.inference_proxy.answers import Answer, Expected, MalformedAnswer, read_answer
from services.inference_proxy.dialects.base import Body, Dialect, EventReader, UnreadableAnswer
from services.inference_proxy.long_json import Parts, TooMuchBeside, read_long
from services.inference_proxy.raw import parsed_answer
from sideband.errors import InvalidInput


def read_whole(dialect: Dialect, content: Parts, expected: Expected) -> Answer:
    """The answer in ``content``, checked. Raises MalformedAnswer."""
    try:
        body = dialect.read(read_parts(content, parsed_answer))
    except UnreadableAnswer as exc:
        raise MalformedAnswer(exc.part, exc.rule) from exc
    except InvalidInput as exc:
        raise MalformedAnswer(exc.field, str(exc)) from exc
    return read_answer(body, expected)


def read_parts(content: Parts, parse: Callable[[bytes], Any]) -> Any:
    """What ``parse`` gives for ``content``, long strings in parts. Raises MalformedAnswer."""
    try:
        return read_long(content, parse)
    except TooMuchBeside as exc:
        raise MalformedAnswer("answer", str(exc)) from exc


def read_part(reader: EventReader, body: Body) -> Body:
    """One event as vLLM sends it. Raises MalformedAnswer."""
    try:
        return reader.read(body)
    except UnreadableAnswer as exc:
        raise MalformedAnswer(exc.part, exc.rule) from exc
    except InvalidInput as exc:
        raise MalformedAnswer(exc.field, str(exc)) from exc


def read_openai(dialect: Dialect, answer: object, path: str) -> tuple[Body, Body]:
    """An OpenAI answer as it is, and in the form of the generate route. Raises MalformedAnswer."""
    if not isinstance(answer, dict):
        raise MalformedAnswer("answer", "must be a JSON object")
    try:
        read = dialect.read_openai(answer, path)
    except UnreadableAnswer as exc:
        raise MalformedAnswer(exc.part, exc.rule) from exc
    except InvalidInput as exc:
        raise MalformedAnswer(exc.field, str(exc)) from exc
    assert isinstance(read, dict), "a dialect reads an answer into an object"
    return answer, read
