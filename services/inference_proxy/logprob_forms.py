"""Log probabilities of sampled tokens in the form that a client reads, whatever the engine's. Pure.

vLLM 0.32 gives ``{token_id, logprob, rank}``, 0.30 gave ``{token: "token_id:N", logprob, bytes}``;
clients written for one refuse the other. What the engine's form does not hold is null: a rank where
it sends none, bytes always.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from services.inference_proxy.answers import MalformedAnswer

LogprobForm = Literal["engine", "token_ids", "token_strings"]
PREFIX: Final = "token_id:"
DIGITS_MAX: Final = 10  # of a token's id


class _Entry(msgspec.Struct):
    """Either form of one token."""

    logprob: float | None = None
    token_id: int | None = None
    token: str | None = None
    rank: int | None = None
    top_logprobs: list["_Entry"] | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Entry] | None = None


_DECODER: Final = msgspec.json.Decoder(_Logprobs)


def in_form(choices: Sequence[Mapping[str, Any]], form: LogprobForm) -> list[dict[str, Any]]:
    """The choices with their ``logprobs`` in ``form``; those without stay as they are.

    ``logprobs`` may be raw JSON. Raises MalformedAnswer for what is neither form.
    """
    assert form != "engine", "nothing is to be done then"
    changed = []
    for choice in choices:
        logprobs = choice.get("logprobs")
        if logprobs is None or (isinstance(logprobs, msgspec.Raw) and bytes(logprobs) == b"null"):
            changed.append({**choice, "logprobs": None})
            continue
        write = _as_ids if form == "token_ids" else _as_strings
        content = [
            {**write(entry), "top_logprobs": [write(top) for top in entry.top_logprobs or ()]}
            for entry in read_entries(logprobs)
        ]
        changed.append({**choice, "logprobs": {"content": content}})
    return changed


def read_entries(logprobs: object) -> list[_Entry]:
    """The sampled tokens' entries of one choice, in either form. Raises MalformedAnswer."""
    try:
        if isinstance(logprobs, msgspec.Raw):
            found = _DECODER.decode(logprobs)
        else:
            found = msgspec.convert(logprobs, _Logprobs)
    except msgspec.MsgspecError as exc:
        raise MalformedAnswer("logprobs", str(exc)) from exc
    return found.content or []


def token_of(entry: _Entry) -> int:
    """The token that an entry is about. Raises MalformedAnswer."""
    if entry.token_id is not None:
        return entry.token_id
    digits = (entry.token or "").removeprefix(PREFIX)
    is_number = digits.isdecimal() and len(digits) <= DIGITS_MAX
    if entry.token is None or digits == entry.token or not is_number:
        raise MalformedAnswer("logprobs", 'must name tokens by "token_id"')
    return int(digits)


def _as_ids(entry: _Entry) -> dict[str, Any]:
    return {"token_id": token_of(entry), "logprob": entry.logprob, "rank": entry.rank}


def _as_strings(entry: _Entry) -> dict[str, Any]:
    return {"token": f"{PREFIX}{token_of(entry)}", "logprob": entry.logprob, "bytes": None}
