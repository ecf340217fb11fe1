"""Reads what engines send with their dialect: whole answers, and the events of streams."""

from services.inference_proxy.answers import Answer, Expected, MalformedAnswer, read_answer
from services.inference_proxy.dialects.base import Body, Dialect, EventReader, UnreadableAnswer
from services.inference_proxy.raw import parsed_answer
from sideband.errors import InvalidInput


def read_whole(dialect: Dialect, content: bytes, expected: Expected) -> Answer:
    """The answer in ``content``, checked. Raises MalformedAnswer."""
    try:
        body = dialect.read(parsed_answer(content))
    except UnreadableAnswer as exc:
        raise MalformedAnswer(exc.part, exc.rule) from exc
    except InvalidInput as exc:
        raise MalformedAnswer(exc.field, str(exc)) from exc
    return read_answer(body, expected)


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
