"""One answer in both forms, compared bit by bit: what its file holds against what it carries."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray

from sideband.engines.inline import decode_npy_base64
from sideband.model import ModelShape
from sideband.payload.reader import PayloadReader
from sideband.payload.root import PayloadRoot
from sideband.routing.rows import scatter_layers
from sideband.segments import PayloadSegment
from tests.vllm.report import Row

GENERATE = "/inference/v1/generate"
SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "max_tokens": 8}
INLINE_BYTES_MAX = 1 << 26


def body_of(prompt: list[int], request_id: str, **params: Any) -> dict[str, Any]:
    """A request; ``extra_args`` and the rest go into the sampling parameters."""
    stream = params.pop("stream", False)
    sampling = {name: value for name, value in {**SAMPLING, **params}.items() if value is not None}
    body: dict[str, Any] = {"token_ids": prompt, "request_id": request_id}
    body["sampling_params"] = sampling
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


@dataclass(frozen=True)
class Choice:
    """One choice as read out of an answer: both forms of its rows, still apart."""

    token_ids: list[int]
    finish_reason: str | None
    routed_experts: str | None
    sampling_mask: list[list[int]] | None
    segments: list[PayloadSegment]


@dataclass
class Answer:
    """An answer with the request that it belongs to."""

    prompt: list[int]
    body: dict[str, Any]  # a stream's is its events' common end
    choices: dict[int, Choice] = field(default_factory=dict)


def read_whole(prompt: list[int], body: dict[str, Any]) -> Answer:
    """A JSON answer."""
    answer = Answer(prompt, body)
    named = body.get("payload_segments") or {}
    for choice in body["choices"]:
        answer.choices[choice["index"]] = Choice(
            token_ids=choice["token_ids"],
            finish_reason=choice["finish_reason"],
            routed_experts=choice["routed_experts"],
            sampling_mask=choice["sampling_mask"],
            segments=segments_of(named.get(str(choice["index"]), [])),
        )
    return answer


def read_stream(prompt: list[int], events: list[dict[str, Any]]) -> Answer:
    """A stream's events; segments must come once, in the last event that has choices."""
    with_choices = [event for event in events if event.get("choices")]
    told = [n for n, event in enumerate(with_choices) if "payload_segments" in event]
    assert told in ([], [len(with_choices) - 1]), "segments come once and last"
    whole: dict[int, dict[str, Any]] = {}
    for event in with_choices:
        for choice in event["choices"]:
            found = whole.setdefault(
                choice["index"],
                {"token_ids": [], "sampling_mask": None, "routed_experts": None, **choice}
                | {"token_ids": [], "sampling_mask": None},
            )
            found["token_ids"] += choice["token_ids"]
            if choice.get("sampling_mask") is not None:
                found["sampling_mask"] = (found["sampling_mask"] or []) + choice["sampling_mask"]
            for name in ("finish_reason", "routed_experts"):
                found[name] = choice.get(name) or found.get(name)
    last = with_choices[-1]
    return read_whole(prompt, {**last, "choices": list(whole.values())})


def segments_of(raw: list[Any]) -> list[PayloadSegment]:
    """Parsed and checked."""
    return [msgspec.convert(each, PayloadSegment).check() for each in raw]


@dataclass
class Comparer:
    """Reads files of one root for one model, and counts what was found equal."""

    root: Path
    model: ModelShape

    def check(self, answer: Answer, row: Row, *, start: int = 0, has_masks: bool = True) -> None:
        """Every choice's file rows equal its inline rows, which begin at ``start``.

        Raises AssertionError.
        """
        for choice in answer.choices.values():
            routing = self.routing(choice)
            inline = inline_rows(choice)
            stop = len(answer.prompt) + max(0, len(choice.token_ids) - 1)
            assert sorted(routing) == list(range(start, stop)), "every row of the request is there"
            assert len(inline) == stop - start
            for pos, found in routing.items():
                np.testing.assert_array_equal(found, inline[pos - start])
            if has_masks:
                assert self.masks(choice, answer.prompt) == choice.sampling_mask
            else:
                assert choice.sampling_mask is None
        row.add(rows=sum(len(inline_rows(c)) for c in answer.choices.values()), **weights(answer))

    def routing(self, choice: Choice) -> dict[int, NDArray[Any]]:
        """All layers' row of each position that the choice's segments cover."""
        rows: dict[int, NDArray[Any]] = {}
        for segment in choice.segments:
            if segment.field != "routed_experts":
                continue
            out = np.empty((segment.rows, *segment.shape), segment.dtype)
            with PayloadReader(PayloadRoot.open(self.root), model=self.model) as reader:
                reader.read_routing(segment, out)
            every = scatter_layers(out, self.model.layer_ids, self.model.num_layers)
            for offset, row in enumerate(every):
                assert segment.pos + offset not in rows, "no row comes twice"
                rows[segment.pos + offset] = row
        return rows

    def masks(self, choice: Choice, prompt: list[int]) -> list[list[int]]:
        """Kept sets of all completion tokens."""
        kept: dict[int, list[int]] = {}
        tokens = np.array(prompt + choice.token_ids, np.int32)
        for segment in choice.segments:
            if segment.field != "sampling_mask":
                continue
            sampled = tokens[segment.pos : segment.stop]
            with PayloadReader(PayloadRoot.open(self.root), model=self.model) as reader:
                masks = reader.read_masks(segment, sampled)
            for offset in range(segment.rows):
                kept[segment.pos + offset] = masks[offset].tolist()
        assert sorted(kept) == list(range(len(prompt), len(tokens)))
        return [kept[pos] for pos in sorted(kept)]

    def files(self) -> set[str]:
        """Everything below the root but its marker, staging leftovers too."""
        return {
            str(path.relative_to(self.root))
            for path in self.root.rglob("*")
            if path.is_file() and path.parent != self.root
        }


def inline_rows(choice: Choice) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """What the choice carries inline."""
    assert choice.routed_experts is not None
    return decode_npy_base64(choice.routed_experts, bytes_max=INLINE_BYTES_MAX)


def weights(answer: Answer) -> dict[str, int]:
    """Bytes of the answer in each form alone."""
    body = {k: v for k, v in answer.body.items() if not k.startswith("payload_")}
    bare = [{**c, "routed_experts": None, "sampling_mask": None} for c in body["choices"]]
    return {
        "inline_bytes": len(msgspec.json.encode(body)),
        "handle_bytes": len(msgspec.json.encode({**answer.body, "choices": bare})),
    }


async def ask(
    http: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str] | None = None
) -> Answer:
    """One request, whole or streamed. Raises AssertionError when it is refused."""
    if not body.get("stream"):
        reply = await http.post(GENERATE, json=body, headers=headers)
        assert reply.status_code == 200, reply.text[:2000]
        return read_whole(body["token_ids"], reply.json())
    async with http.stream("POST", GENERATE, json=body, headers=headers) as stream:
        assert stream.status_code == 200, await stream.aread()
        lines = [line async for line in stream.aiter_lines()]
    events = [msgspec.json.decode(line[6:]) for line in lines if line.startswith("data: {")]
    return read_stream(body["token_ids"], events)


async def ask_all(http: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> list[Answer]:
    """All at once."""
    return list(await asyncio.gather(*(ask(http, body) for body in bodies)))
