"""Large JSON read only where somebody looks: the rest goes on as the bytes that came. Pure.

A prompt of 30 k tokens is cut out as it stands, and an answer's log probabilities are never made
into objects. Whatever is not plainly right is left to the whole parsers, which say what is wrong.
"""

import re
import secrets
from typing import Any, Final

import msgspec
import orjson

from services.inference_proxy.nesting import NESTING_MAX, brackets_of, is_too_deep
from services.inference_proxy.prompts import Prompt, count_of
from services.inference_proxy.slices import SLICE_BYTES, is_list_of_lists, parsed_list
from services.inference_proxy.upstream import parsed

RAW_BYTES_MIN: Final = 8 << 10  # below it the whole parser is as fast
_HEAVY: Final = frozenset({"logprobs", "prompt_logprobs"})  # passed on, never looked at
_ROWS: Final = frozenset({"sampling_mask", "sampling_mask_logprobs"})  # who looks opens them
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CHOICES: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_PROMPT: Final = re.compile(rb'"token_ids"[ \t\r\n]*:[ \t\r\n]*(?=\[)')
_QUOTE: Final = ord('"')
_LIST: Final = ord("[")
REST_BYTES_MAX: Final = 1 << 20  # beside a prompt; more is read in a thread, the documented way
# Stands for a prompt that was cut out; no client can know it, so it is never there by itself.
_MARK: Final = secrets.token_hex(16)


def split_prompt(content: bytes) -> tuple[dict[str, Any], Prompt] | None:
    """A request's members with ``token_ids`` raw, and the prompt; None unless plainly right.

    The first list under that name is cut out and the rest is parsed with a mark in its place. If
    it was not the request's own (but in a string, in an inner object, or overruled by a later
    member of the same name), the request's own is not the mark.
    """
    name = _PROMPT.search(content)
    stop = content.find(b"]", name.end()) + 1 if name else 0
    if name is None or not stop:
        return None
    if len(content) - (stop - name.end()) > REST_BYTES_MAX:
        return None
    text = content[name.end() : stop]
    count = count_of(text)
    if count is None:
        return None
    rest = b'%b"%b"%b' % (content[: name.end()], _MARK.encode(), content[stop:])
    try:
        body = orjson.loads(rest)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(body, dict) or body.get("token_ids") != _MARK or is_too_deep(rest, body):
        return None
    body["token_ids"] = msgspec.Raw(text)
    return body, Prompt(text, count)


def parsed_answer(content: bytes) -> object:
    """An answer as JSON, log probabilities raw when it is large; None when it is no JSON."""
    if len(content) < RAW_BYTES_MIN:
        return parsed(content)
    try:
        if not content.isascii():
            content.decode()  # raw parts are not looked at again, so look now
        members = _MEMBERS.decode(content)
        choices = _CHOICES.decode(members.pop("choices"))
        body, brackets = _opened(members)
        body["choices"] = []
        for choice in choices:
            opened, more = _opened(choice)
            body["choices"].append(opened)
            brackets += more
    except (msgspec.MsgspecError, ValueError, KeyError, RecursionError):
        return parsed(content)
    # A value cannot nest deeper than the brackets of the parts that were opened.
    return None if brackets > NESTING_MAX and is_too_deep(content, body) else body


def _opened(members: dict[str, msgspec.Raw]) -> tuple[dict[str, Any], int]:
    """All members but the heavy ones parsed, and the brackets that open around and in them."""
    opened: dict[str, Any] = {}
    brackets = 2  # the object, and the list that it may stand in
    for name, raw in members.items():
        view = memoryview(raw)
        if name in _HEAVY and bytes(view[:5]) != b"null":
            opened[name] = raw
            continue
        if name in _ROWS and len(view) > SLICE_BYTES and is_list_of_lists(view):
            opened[name] = raw
            continue
        text = bytes(view) if view[0] == _LIST else b""
        opened[name] = parsed_list(text) if text else orjson.loads(view)
        if view[0] != _QUOTE:  # a string, of rows it may be, holds none
            brackets += brackets_of(text or bytes(view))
    return opened, brackets
