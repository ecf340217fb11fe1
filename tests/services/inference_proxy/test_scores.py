"""Logprobs of kept ids through the proxy: passed on inline, named by handle, or spilled."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sideband.masks.rows import ScoreRows
from sideband.payload.reader import PayloadReader
from sideband.payload.root import PayloadRoot
from tests.services.inference_proxy.harness import pair, request_body, running
from tests.services.inference_proxy.reading import segments_of
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.stub_model import MODEL, kept_ids, sampled, scores_of
from tests.services.inference_proxy.test_streams import events_of, last_of, streamed
from tests.services.inference_proxy.test_turns_kept import TalkingEngine, fetched

PROMPT = [5, 17, 3, 42, 8, 1]
SAMPLED = sampled(PROMPT, 4)
EXPECTED = [scores_of(kept_ids(token)) for token in SAMPLED]


def scores_in(answer: dict[str, Any], root: Path | None) -> list[list[float]]:
    """Of each sampled token, out of the answer or out of the file that it names."""
    if root is None:
        found: list[list[float]] = answer["choices"][0]["sampling_mask_logprobs"]
        return found
    assert answer["choices"][0].get("sampling_mask_logprobs") is None
    (segment,) = segments_of(answer, "sampling_mask_logprobs")
    (masks,) = segments_of(answer, "sampling_mask")
    assert (segment.pos, segment.rows) == (masks.pos, masks.rows) == (len(PROMPT), len(SAMPLED))
    with PayloadReader(PayloadRoot.open(root), model=MODEL) as reader:
        rows = reader.read_ragged(segment, np.array(SAMPLED, np.int32))
    assert isinstance(rows, ScoreRows)
    return [rows[i].tolist() for i in range(len(rows))]


def engines_of(form: str, *, is_pair: bool) -> dict[str, StubEngine]:
    spills = form == "spill"
    engines = pair(spills=spills) if is_pair else {"e0": StubEngine(spills=spills)}
    for engine in engines.values():
        engine.scores = True
    return engines


@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("form", ["inline", "handle", "spill"])
async def test_logprobs_of_kept_ids_come_with_them(
    tmp_path: Path, form: str, is_pair: bool
) -> None:
    root = None if form == "inline" else tmp_path / "root"
    async with running(engines_of(form, is_pair=is_pair), root=root) as proxy:
        answer = (await proxy.generate(request_body(PROMPT))).json()
        assert scores_in(answer, root) == EXPECTED
        events = events_of((await proxy.generate(streamed())).text)
    if form != "inline":
        assert scores_in(last_of(events), root) == EXPECTED
        return
    parts = [choice for event in events[:-1] for choice in event["choices"]]
    assert [row for part in parts for row in part["sampling_mask_logprobs"]] == EXPECTED


BROKEN: list[tuple[list[list[float]], str]] = [
    (EXPECTED[:-1], "must be one per kept set, 4"),
    ([EXPECTED[0][:-1], *EXPECTED[1:]], "must be one per kept id, 2"),
]


@pytest.mark.parametrize(("scores", "said"), BROKEN, ids=[said for _, said in BROKEN])
async def test_logprobs_of_other_kept_sets_are_a_broken_answer(
    tmp_path: Path, scores: list[list[float]], said: str
) -> None:
    choice = {
        "index": 0,
        "token_ids": SAMPLED,
        "sampling_mask": [kept_ids(token) for token in SAMPLED],
        "sampling_mask_logprobs": scores,
    }
    engine = StubEngine(spills=True)
    engine.script.extend([lambda _: StubEngine.json({"choices": [choice]})] * 3)
    async with running({"e0": engine}, root=tmp_path / "root") as proxy:
        answer = await proxy.generate(request_body(PROMPT))
        assert answer.status_code == 502
        assert said in answer.text
        assert proxy.files() == []


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("form", ["inline", "handle"])
async def test_a_kept_turn_has_the_logprobs_that_its_client_may_drop(
    tmp_path: Path, form: str, is_streamed: bool
) -> None:
    engine = TalkingEngine(scores=True)
    root = None if form == "inline" else tmp_path / "root"
    async with running({"e0": engine}, root=root) as proxy:
        body = streamed(logprobs=0) if is_streamed else request_body(PROMPT, logprobs=0)
        assert (await proxy.generate(body)).status_code == 200
        (turn,) = await fetched(proxy, "r1")
    assert turn.sampling_mask_logprobs == (EXPECTED if form == "inline" else None)
    if form == "handle":
        named = {segment.field for segment in turn.payload_segments or ()}
        assert "sampling_mask_logprobs" in named
