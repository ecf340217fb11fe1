"""A whole OpenAI answer as the events of a stream: pure.

Engines send routing rows with whole answers only, so a train request is asked whole and a client
that wants events gets them at the end: each choice in one event, then why it ended.
"""

from typing import Any

from services.inference_proxy.dialects.openai_forms import is_chat, without
from services.inference_proxy.events import DONE, joined_if_small, write_event
from services.inference_proxy.long_json import Parts, dump_long

Json = dict[str, Any]


def as_events(answer: Json, path: str, *, with_usage: bool) -> Parts:
    """Events as OpenAI sends them. ``with_usage``: ``stream_options.include_usage`` was set."""
    kind = "chat.completion.chunk" if is_chat(path) else "text_completion"
    top = {**without(answer, "choices", "usage"), "object": kind}
    parts = []
    for choice in answer["choices"]:
        first, last = _chat_parts(choice) if is_chat(path) else _text_parts(choice)
        parts += [{**top, "choices": [first]}, {**top, "choices": [last]}]
    if with_usage:
        parts.append({**top, "choices": [], "usage": answer.get("usage")})
    events = [piece for part in parts for piece in write_event(part)]
    return (*joined_if_small(events), DONE + b"\n\n")


def usage_wanted(asked: Json) -> bool:
    """Whether the client wants a last event with the counts."""
    options = asked.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _chat_parts(choice: Json) -> tuple[Json, Json]:
    message = choice.get("message")
    delta: Json = dict(message) if isinstance(message, dict) else {}
    calls = delta.get("tool_calls")
    if isinstance(calls, list):  # in a stream each says which one it continues
        delta["tool_calls"] = [
            {"index": index, **call} if isinstance(call, dict) else call
            for index, call in enumerate(calls)
        ]
    first = {**without(choice, "message"), "delta": delta, "finish_reason": None}
    last = {"index": choice["index"], "delta": {}, "finish_reason": choice.get("finish_reason")}
    return first, last


def _text_parts(choice: Json) -> tuple[Json, Json]:
    first = {**choice, "finish_reason": None}
    last = {"index": choice["index"], "text": "", "finish_reason": choice.get("finish_reason")}
    return first, last


def encoded(answer: Json) -> Parts:
    """The whole answer."""
    return dump_long(answer)
