"""Large JSON read only where somebody looks: the rest goes on as the bytes that came. Pure.

A prompt of 30 k tokens becomes an array straight from its text, and an answer's log probabilities
are never made into objects. Whatever is not plainly right is left to the whole parsers, which
say what is wrong.
"""

from typing import Any, Final

import msgspec
import numpy as np
import orjson

from services.inference_proxy.limits import TOKEN_ID_MAX
from services.inference_proxy.nesting import is_too_deep
from services.inference_proxy.sessions import Tokens
from services.inference_proxy.upstream import parsed

RAW_BYTES_MIN: Final = 8 << 10  # below it the whole parser is as fast
_HEAVY: Final = frozenset({"logprobs", "prompt_logprobs"})  # passed on, never looked at
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CHOICES: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
# Of legal JSON that is nothing but these and one pair of brackets, each value is a natural number.
_LIST_OF_NUMBERS: Final = b"0123456789, "


def split_prompt(content: bytes) -> tuple[dict[str, Any], Tokens] | None:
    """A request's members with ``token_ids`` raw, and the tokens; None unless plainly right."""
    try:
        members = _MEMBERS.decode(content)
        raw = members.pop("token_ids")
        body: dict[str, Any] = {
            name: orjson.loads(memoryview(value)) for name, value in members.items()
        }
    except (msgspec.MsgspecError, ValueError, KeyError, RecursionError):
        return None
    text = bytes(raw)
    if text.translate(None, _LIST_OF_NUMBERS) != b"[]" or not text[1:-1].strip():
        return None
    tokens = np.fromstring(text[1:-1], np.int64, sep=",")
    # A number that does not fit into 64 bits has become the greatest that does.
    if tokens.size != text.count(b",") + 1 or tokens.min() < 0 or tokens.max() > TOKEN_ID_MAX:
        return None
    return {**body, "token_ids": raw}, tokens.astype(np.int32)


def parsed_answer(content: bytes) -> object:
    """An answer as JSON, log probabilities raw when it is large; None when it is no JSON."""
    if len(content) < RAW_BYTES_MIN:
        return parsed(content)
    try:
        content.decode()  # raw parts are not looked at again, so look now
        members = _MEMBERS.decode(content)
        choices = _CHOICES.decode(members.pop("choices"))
        body = _opened(members)
        body["choices"] = [_opened(choice) for choice in choices]
    except (msgspec.MsgspecError, ValueError, KeyError, RecursionError):
        return parsed(content)
    return None if is_too_deep(content, body) else body


def _opened(members: dict[str, msgspec.Raw]) -> dict[str, Any]:
    return {
        name: raw if name in _HEAVY and bytes(raw) != b"null" else orjson.loads(memoryview(raw))
        for name, raw in members.items()
    }
