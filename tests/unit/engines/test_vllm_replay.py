"""Answers of a real vLLM (tests/data/vllm), replayed through the library in both forms."""

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sideband.engines.inline import choice_payload, encode_npy_base64, segments_of
from sideband.ids import RequestId, RunId
from sideband.masks.rows import MaskRows
from sideband.model import ModelShape
from sideband.payload.columns import ChoicePayload
from sideband.payload.reader import PayloadReader
from sideband.payload.root import PayloadRoot
from sideband.payload.writer import write_payload
from sideband.routing import model_shape
from sideband.segments import (
    AnySegment,
    InlineSegment,
    PayloadSegment,
    by_field,
    concatenate,
    coverage,
    cut,
    holes,
    merge_prefill_decode,
)

DATA = Path(__file__).parents[2] / "data" / "vllm"
MODEL = model_shape(json.loads((DATA / "tiny-moe.config.json").read_text()))
REFUSED_BY_VLLM = ("0.32-p64_m12_greedy", "0.32-p64_m6_nofilter")
PAIRS = (("n20", None), ("n32", 0), ("n200", 192), ("n200", 200), ("n600", 600))


def names() -> list[str]:
    found = {path.name.rsplit(".response.", 1)[0] for path in DATA.glob("*.response.json")}
    return sorted(found - set(REFUSED_BY_VLLM))


def load(name: str) -> Any:
    return json.loads((DATA / name).read_text())


@dataclass(kw_only=True)
class Answer:
    """One recorded choice and what was asked, independent of the library's own reading."""

    prompt_tokens: int
    prompt_start: int
    token_ids: list[int]
    routed_experts: str
    sampling_mask: list[list[int]] | None
    rows_all: NDArray[Any] = field(init=False)  # as numpy reads them: the truth

    def __post_init__(self) -> None:
        data = base64.b64decode(self.routed_experts)
        self.rows_all = np.load(io.BytesIO(data), allow_pickle=False)

    @property
    def payload(self) -> ChoicePayload:
        return choice_payload(
            self.routed_experts,
            self.sampling_mask,
            layer_ids=None,
            prompt_tokens=self.prompt_tokens,
            completion_token_ids=self.token_ids,
            prompt_start=self.prompt_start,
            model=MODEL,
        )


def answer(name: str) -> Answer:
    body = load(f"{name}.response.json")
    [choice] = body["choices"]
    request = DATA / f"{name}.request.json"
    asked = json.loads(request.read_text()) if request.exists() else {}
    start = asked.get("sampling_params", {}).get("routed_experts_prompt_start", 0)
    if name.endswith("_decode") and "none" not in name:
        start = int(name.split("_start")[1].removesuffix("_decode"))
    return Answer(
        prompt_tokens=body["usage"]["prompt_tokens"],
        prompt_start=start or asked.get("routed_experts_prompt_start", 0),
        token_ids=choice["token_ids"],
        routed_experts=choice["routed_experts"],
        sampling_mask=choice.get("sampling_mask"),
    )


def rows_and_masks(
    segments: Sequence[AnySegment],
    reader: PayloadReader | None = None,
    of: Answer | None = None,
) -> tuple[dict[int, bytes], dict[int, list[int]]]:
    """Every row by position, read from memory or from the file; ``of`` sampled the tokens."""
    rows: dict[int, bytes] = {}
    masks: dict[int, list[int]] = {}
    for segment in segments:
        data: object
        if isinstance(segment, InlineSegment):
            data = segment.data
        elif segment.field == "sampling_mask":
            assert reader is not None
            assert of is not None
            first, stop = segment.pos - of.prompt_tokens, segment.stop - of.prompt_tokens
            data = reader.read_masks(segment, np.array(of.token_ids[first:stop], np.int32))
        else:
            assert reader is not None
            out = np.zeros((segment.rows, *segment.shape), np.dtype(segment.dtype))
            reader.read_routing(segment, out)
            data = out
        for index in range(segment.rows):
            if isinstance(data, MaskRows):
                masks[segment.pos + index] = data[index].tolist()
            else:
                assert isinstance(data, np.ndarray)
                rows[segment.pos + index] = data[index].tobytes()
    return rows, masks


def expected(of: Answer) -> tuple[dict[int, bytes], dict[int, list[int]]]:
    """The same from the answer's own arrays: routed layers 1, 2 and 3 of 4."""
    first = of.prompt_tokens + len(of.token_ids) - 1 - len(of.rows_all)
    rows = {first + i: row[1:].tobytes() for i, row in enumerate(of.rows_all)}
    masks = {of.prompt_tokens + i: row for i, row in enumerate(of.sampling_mask or [])}
    return rows, masks


@pytest.fixture
def root(tmp_path: Path) -> PayloadRoot:
    return PayloadRoot.create(tmp_path / "payloads", RunId("replay"), fresh=True)


def written(root: PayloadRoot, name: str, of: Answer) -> tuple[PayloadSegment, ...]:
    report = write_payload(
        root, policy_version=0, request_id=RequestId(name), model=MODEL, choices=[of.payload]
    )
    assert report.rows_invalid == 0
    return report.segments[0]


def test_the_recorded_model_has_one_dense_layer() -> None:
    assert (
        ModelShape(num_layers=4, layer_ids=(1, 2, 3), top_k=4, id_space=16, vocab_size=1024)
        == MODEL
    )


@pytest.mark.parametrize("name", names())
def test_an_inline_answer_becomes_the_rows_that_the_engine_sent(name: str) -> None:
    of = answer(name)
    segments = segments_of(of.payload, MODEL)
    assert rows_and_masks(segments) == expected(of)
    tokens = of.prompt_tokens + len(of.token_ids)
    assert coverage(by_field(segments, "routed_experts")) == [
        (tokens - 1 - len(of.rows_all), tokens - 1)
    ]
    assert not of.rows_all[:, 0].any()  # the dense layer is left out, and was zero


@pytest.mark.parametrize("name", names())
def test_a_file_written_from_an_answer_reads_back_bitwise_equal(
    name: str, root: PayloadRoot
) -> None:
    of = answer(name)
    handles = written(root, name, of)
    inline = segments_of(of.payload, MODEL)
    assert coverage(handles) == coverage(inline)
    with PayloadReader(root, model=MODEL) as reader:
        assert rows_and_masks(handles, reader, of) == rows_and_masks(inline) == expected(of)


@pytest.mark.parametrize("name", names())
def test_rows_encode_to_the_very_text_of_the_engine(name: str) -> None:
    of = answer(name)
    assert encode_npy_base64(of.rows_all) == of.routed_experts


@pytest.mark.parametrize(("size", "start"), PAIRS)
def test_a_pair_merges_alike_in_both_forms(size: str, start: int | None, root: PayloadRoot) -> None:
    name = f"0.32-pd_{size}_start{'none' if start is None else start}"
    prefill, decode = answer(f"{name}_prefill"), answer(f"{name}_decode")
    prompt_tokens = decode.prompt_tokens
    inline = merge_prefill_decode(
        segments_of(prefill.payload, MODEL),
        segments_of(decode.payload, MODEL),
        prompt_tokens=prompt_tokens,
    )
    handles = merge_prefill_decode(
        written(root, f"{name}_prefill", prefill),
        written(root, f"{name}_decode", decode),
        prompt_tokens=prompt_tokens,
    )
    (prefill_rows, _), (decode_rows, decode_masks) = expected(prefill), expected(decode)
    wanted = {p: row for p, row in prefill_rows.items() if p < prompt_tokens}
    wanted |= {p: row for p, row in decode_rows.items() if p >= prompt_tokens}
    tokens = prompt_tokens + len(decode.token_ids)
    assert sorted(wanted) == list(range(tokens - 1))
    with PayloadReader(root, model=MODEL) as reader:
        assert rows_and_masks(handles, reader, decode) == (wanted, decode_masks)
    assert rows_and_masks(inline) == (wanted, decode_masks)


def test_garbage_from_decode_below_the_prompt_is_not_merged(root: PayloadRoot) -> None:
    """The recorded overlap happens to equal prefill's: make it garbage, the merge is the same."""
    name = "0.32-pd_n32_start0"
    prefill, decode = answer(f"{name}_prefill"), answer(f"{name}_decode")
    clean = merge_prefill_decode(
        segments_of(prefill.payload, MODEL), segments_of(decode.payload, MODEL), prompt_tokens=32
    )
    garbage = decode.rows_all.copy()
    garbage[:32] = np.random.default_rng(1).permuted(garbage[:32] ^ 5, axis=0)
    decode.routed_experts = encode_npy_base64(garbage)
    dirty = merge_prefill_decode(
        segments_of(prefill.payload, MODEL), segments_of(decode.payload, MODEL), prompt_tokens=32
    )
    assert rows_and_masks(dirty) == rows_and_masks(clean)
    alone = merge_prefill_decode((), segments_of(decode.payload, MODEL), prompt_tokens=32)
    assert holes(by_field(alone, "routed_experts"), start=0, stop=43) == [(0, 32)]


def test_a_prefix_cache_hit_returns_the_rows_of_the_cold_run() -> None:
    cold, hit = answer("0.32-p300_m32_cold"), answer("0.32-p300_m32_prefixhit")
    cold_rows, hit_rows = expected(cold)[0], expected(hit)[0]
    assert all(hit_rows[p] == cold_rows[p] for p in range(300))


def test_a_delta_answer_completes_the_rows_of_an_earlier_turn() -> None:
    """Asked from 260 on: those rows, and the earlier turn's below them, are the cold run's."""
    cold, delta = answer("0.32-p300_m32_cold"), answer("0.32-p300_m8_promptstart260")
    earlier = cut(segments_of(cold.payload, MODEL), start=0, stop=260)
    later = segments_of(delta.payload, MODEL)
    turn = concatenate([by_field(earlier, "routed_experts"), by_field(later, "routed_experts")])
    assert coverage(turn) == [(0, 307)]
    rows, _ = rows_and_masks(turn)
    assert all(rows[p] == expected(cold)[0][p] for p in range(300))


@pytest.mark.parametrize("version", ["0.30", "0.32"])
def test_a_stream_carries_the_answer_in_parts(version: str) -> None:
    """Routing whole in the last chunk only; masks in every chunk (0.32) or in none (0.30)."""
    lines = (DATA / f"{version}-stream.response.sse").read_text().split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line.strip()]
    assert events[-1] == "[DONE]"
    chunks = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    *early, last = chunks
    assert all(chunk["routed_experts"] is None for chunk in early)
    masks = [chunk["sampling_mask"] for chunk in chunks]
    whole = None if None in masks else [row for mask in masks for row in mask]
    assert (whole is None) == (version == "0.30")
    streamed = Answer(
        prompt_tokens=len(load(f"{version}-stream.request.json")["token_ids"]),
        prompt_start=0,
        token_ids=[token for chunk in chunks for token in chunk["token_ids"]],
        routed_experts=last["routed_experts"],
        sampling_mask=whole,
    )
    assert rows_and_masks(segments_of(streamed.payload, MODEL)) == expected(streamed)
    assert len(streamed.rows_all) == 40 + 5 - 1


@pytest.mark.parametrize("name", REFUSED_BY_VLLM)
def test_vllm_answers_unmasked_requests_with_an_empty_error(name: str) -> None:
    assert load(f"{name}.response.json")["status"] == 500
