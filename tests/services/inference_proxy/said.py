"""What engines may say of a request, in the spellings of JSON that servers use, and bounds so low
that all of it is large.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import strategies as st

from services.inference_proxy import events, long_json, raw, slices, turn_parts
from services.inference_proxy.long_json import Parts
from sideband.engines import base64_text
from sideband.engines.npy import encode_npy_base64


@contextmanager
def bounds(size: int) -> Iterator[None]:
    """Whatever has more than a few bytes is large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_json, "CUT_BYTES_MIN", size)
        patch.setattr(events, "JOINED_BYTES_MAX", size)
        patch.setattr(raw, "RAW_BYTES_MIN", size)
        patch.setattr(slices, "SLICE_BYTES", size)
        patch.setattr(turn_parts, "VALUES_TOGETHER", size)
        patch.setattr(base64_text, "SLICE_CHARACTERS", 184)
        patch.setattr(base64_text, "SLICE_BYTES", 138)  # the head of rows has 128
        yield


def texts() -> st.SearchStrategy[str]:
    run = st.integers(0, 60).map(lambda size: "QUJD" * (size // 4))
    return st.lists(run | st.sampled_from(['"', "\n", "é", "/", " ", "\\"]), max_size=4).map(
        "".join
    )


@dataclass(frozen=True)
class Said:
    """What an engine says about one choice, and the bytes of it."""

    prompt: list[int]
    choices: list[dict[str, Any]]
    beside: dict[str, Any]

    @property
    def body(self) -> dict[str, Any]:
        return {"id": "x", "choices": self.choices, **self.beside}


def rows_of(count: int, seed: int, *, as_object: bool) -> Any:
    rows = np.random.default_rng(seed).integers(0, 60, (count, 3, 4)).astype(np.uint8)
    text = encode_npy_base64(rows)
    if not as_object:
        return text
    data = encode_base64(rows)
    return {"data": data, "shape": list(rows.shape), "dtype": "uint8"}


def encode_base64(rows: Any) -> str:
    return b"".join(base64_text.encode_base64(b"", memoryview(rows.tobytes())).parts).decode()


@st.composite
def said(draw: st.DrawFn, *, choices_max: int = 3, rows_from: int | None = 0) -> Said:
    prompt = draw(st.lists(st.integers(0, 99), min_size=1, max_size=12))
    choices = []
    for index in range(draw(st.integers(1, choices_max))):
        tokens = draw(st.lists(st.integers(0, 99), min_size=1, max_size=8))
        stop = len(prompt) + len(tokens) - 1
        start = len(prompt) if rows_from is None else rows_from
        entries = [{"token_id": token, "logprob": -0.5 - token, "rank": 1} for token in tokens]
        choice: dict[str, Any] = {
            "index": index,
            "token_ids": tokens,
            "finish_reason": "stop",
            "text": draw(texts()),
            "logprobs": draw(st.sampled_from([{"content": entries}, None])),
        }
        if draw(st.booleans()):
            kind, seed = draw(st.booleans()), draw(st.integers(0, 9))
            choice["routed_experts"] = rows_of(stop - start, seed, as_object=kind)
        if draw(st.booleans()):
            choice["sampling_mask"] = [sorted({token, 5, 70}) for token in tokens]
            choice["sampling_mask_logprobs"] = [[-0.5] * 3 for _ in tokens]
        choices.append(choice)
    beside = draw(st.dictionaries(st.sampled_from(["usage", "note", "é"]), texts(), max_size=3))
    return Said(prompt, choices, beside)


def written(body: Any, draw: Callable[[Any], Any]) -> bytes:
    """Its JSON in one of the ways in which servers write it."""
    way = draw(st.sampled_from(["orjson", "msgspec", "ascii", "indented", "escaped"]))
    if way == "orjson":
        return orjson.dumps(body)
    if way == "indented":
        return json.dumps(body, indent=1).replace("\n", "\r\n").encode()
    if way == "ascii":
        return json.dumps(body).encode()
    content = msgspec.json.encode(body)
    if way == "escaped":
        content = content.replace(b"/", b"\\/").replace(b"=", b"\\u003d")
    return content


def cut(content: bytes, draw: Callable[[Any], Any]) -> Parts:
    edges = draw(st.lists(st.integers(0, len(content)), max_size=9))
    size = draw(st.integers(1, 400))
    even = range(size, len(content), size)
    at = [0, *sorted(draw(st.sampled_from([edges, list(even)]))), len(content)]
    return tuple(content[a:b] for a, b in pairwise(at) if a < b)
