"""SGLang servers behind the proxy: clients and trainers see what they see of a vLLM."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.inference_proxy.app import create_app
from services.inference_proxy.config import EngineSettings, ProxySettings
from services.inference_proxy.dialects.base import Ask, UnreadableAnswer, UntranslatableParameter
from services.inference_proxy.dialects.load import CannotPair, ModelNeeded
from services.inference_proxy.dialects.sglang import SglangDialect, sampling_params
from sideband.errors import InvalidInput
from tests.services.inference_proxy.harness import GENERATE, request_body, running, until
from tests.services.inference_proxy.reading import assert_rows, routing_of, segments_of
from tests.services.inference_proxy.sglang_engine import (
    SglangEngine,
    kept_logprob,
    logprob,
    rows_text,
)
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.stub_model import (
    HF_CONFIG,
    MODEL,
    all_layers,
    kept_ids,
    sampled,
    true_rows,
)
from tests.services.inference_proxy.test_streams import events_of, last_of

PROMPT = [5, 17, 3, 42, 8, 1]
TOKENS = PROMPT + sampled(PROMPT, 5)
DIALECT = SglangDialect(MODEL)
ASK = Ask(request_id="r1.a1", injection=None, prompt_start=4)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(HF_CONFIG))
    return path


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_incremental", [False, True])
@pytest.mark.parametrize("spills", [False, True])
async def test_its_answers_become_vllms(
    tmp_path: Path, config: Path, spills: bool, is_incremental: bool, is_stream: bool
) -> None:
    root = tmp_path / "root" if spills else None
    engine = SglangEngine(spills=spills, is_incremental=is_incremental)
    async with running({"e0": engine}, root=root, model_config_path=config) as proxy:
        body = {**request_body(PROMPT, 5, logprobs=1), "stream": is_stream}
        reply = await proxy.generate(body, session="s1")
        assert reply.status_code == 200, reply.text
        events = events_of(reply.text)[:-1] if is_stream else [reply.json()]
        choices = [choice for event in events for choice in event["choices"]]
        last = last_of(events) if is_stream else reply.json()
        assert last["request_id"] == "r1"
        assert [t for c in choices for t in c["token_ids"]] == TOKENS[6:]
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
        assert_rows(routing_of(last, root), true_rows(TOKENS[:-1]))
        masks = [row for c in choices for row in c["sampling_mask"] or ()]
        if spills:
            assert masks == []
            (segment,) = segments_of(last, "sampling_mask")
            assert (segment.pos, segment.stop) == (6, 11)
        else:
            assert masks == [kept_ids(token) for token in TOKENS[6:]]
        content = [entry for c in choices for entry in c["logprobs"]["content"]]
        assert [entry["token_id"] for entry in content] == TOKENS[6:]
        # Of sampling from the kept set, which is what a trainer renormalises to.
        assert [entry["logprob"] for entry in content] == [kept_logprob(t) for t in TOKENS[6:]]
        assert content[0]["top_logprobs"][0]["token_id"] == TOKENS[6]
        # The next turn asks only for what is new.
        await proxy.generate(request_body([*TOKENS, 1], 2), session="s1")
        assert [r["routed_experts_start_len"] for r in engine.requests] == [0, 10]


async def test_choices_come_in_a_list_and_lie_in_one_file(tmp_path: Path, config: Path) -> None:
    root = tmp_path / "root"
    async with running({"e0": SglangEngine(spills=True)}, root=root) as proxy:
        whole = (await proxy.generate(request_body(PROMPT, n=2))).json()
        events = events_of(
            (await proxy.generate({**request_body(PROMPT, n=2), "stream": True})).text
        )
        (named,) = [e for e in events[:-1] if e.get("payload_segments")]
        for body in (whole, named):
            assert set(body["payload_segments"]) == {"0", "1"}
        assert len(proxy.files()) == 2
        assert whole["usage"] == {
            "prompt_tokens": 6,
            "completion_tokens": 8,
            "total_tokens": 14,
        }


@pytest.mark.parametrize(("kind", "asks"), [("train", True), ("frozen", True), ("eval", False)])
async def test_rows_are_asked_for_request_by_request(config: Path, kind: str, asks: bool) -> None:
    engine = SglangEngine()
    async with running({"e0": engine}, model_config_path=config) as proxy:
        headers = {"X-Sideband-Kind": kind}
        answer = await proxy.http.post(GENERATE, json=request_body(PROMPT), headers=headers)
        choice = answer.json()["choices"][0]
        (request,) = engine.requests
        assert ("return_routed_experts" in request) == asks
        assert (choice["routed_experts"] is not None) == asks
        assert (choice["sampling_mask"] is not None) == asks


@pytest.mark.parametrize(
    ("params", "asked"),
    [
        ({"top_k": 20, "top_p": 1.0}, True),
        ({"top_k": 0, "top_p": 0.9}, True),
        ({"top_k": -1, "top_p": 1.0}, False),
        ({"min_p": 0.1}, True),
        ({"temperature": 0.0}, True),  # greedy keeps one id
        ({}, False),  # the whole vocabulary would end the request there
    ],
)
def test_masks_are_asked_for_when_sampling_cuts(params: dict[str, Any], asked: bool) -> None:
    body = {"token_ids": PROMPT, "sampling_params": params}
    assert DIALECT.whole(body, ASK)["return_sampling_mask"] is asked


def test_a_request_goes_by_its_names() -> None:
    body: dict[str, Any] = {
        "request_id": "mine",
        "model": "policy",
        "token_ids": PROMPT,
        "sampling_params": {
            "max_tokens": 9,
            "min_tokens": 1,
            "seed": 7,
            "n": None,
            "top_k": 0,
            "top_p": 0.9,
            "temperature": 0.7,
            "stop_token_ids": [3],
            "logprobs": 2,
            "detokenize": False,
            "extra_args": {},
            "routed_experts_prompt_start": 2,
        },
        "stream": None,
        "priority": 3,
        "cache_salt": None,
    }
    assert DIALECT.whole(body, ASK) == {
        "rid": "r1.a1",
        "input_ids": PROMPT,
        "sampling_params": {
            "max_new_tokens": 9,
            "min_new_tokens": 1,
            "sampling_seed": 7,
            "top_k": -1,
            "top_p": 0.9,
            "temperature": 0.7,
            "stop_token_ids": [3],
        },
        "stream": False,
        "priority": 3,
        "return_logprob": True,
        "top_logprobs_num": 2,
        "return_routed_experts": True,
        "routed_experts_start_len": 4,
        "return_sampling_mask": True,
    }


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sampling_params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs"),
        ({"sampling_params": {"bad_words": ["x"]}}, "sampling_params.bad_words"),
        ({"sampling_params": {"extra_args": {"a": 1}}}, "sampling_params.extra_args"),
        ({"features": {}}, "features"),
    ],
)
async def test_what_it_does_not_have_is_a_clear_400(
    config: Path, change: dict[str, Any], field: str
) -> None:
    engine = SglangEngine()
    async with running({"e0": engine}, model_config_path=config) as proxy:
        answer = await proxy.generate({**request_body(PROMPT), **change})
        found = answer.json()
        assert (answer.status_code, found["code"], found["field"]) == (
            400,
            "parameter_refused",
            field,
        )
        assert engine.requests == []


async def test_its_own_refusal_is_passed_on(config: Path) -> None:
    """A kept set that outgrows the server's limit ends a request with a 400."""
    engine = SglangEngine()
    said = "Sampling support exceeds --sampling-mask-max-tokens=4096"
    engine.script.append(lambda _: StubEngine.json({"error": {"message": said}}, 400))
    async with running({"e0": engine}, model_config_path=config) as proxy:
        answer = await proxy.generate(request_body(PROMPT))
        assert (answer.status_code, answer.json()["code"]) == (400, "engine_refused")
        assert said in answer.json()["detail"]
        assert len(engine.requests) == 1


async def test_a_losing_attempt_leaves_no_file(tmp_path: Path) -> None:
    engines: dict[str, StubEngine] = {
        "a": SglangEngine(spills=True),
        "b": SglangEngine(spills=True),
    }
    for engine in engines.values():
        engine.script.append(lambda _: StubEngine.json({}, 503))
    async with running(engines, root=tmp_path / "root", ejection_failures=9) as proxy:
        answer = (await proxy.generate(request_body(PROMPT))).json()
        named = {s["file"] for s in answer["payload_segments"]["0"]}
        assert sum(len(engine.requests) for engine in engines.values()) == 3
        await until(lambda: set(proxy.files()) == named)


def answer_with(**meta: Any) -> dict[str, Any]:
    whole = SglangEngine().item(
        DIALECT.whole({"token_ids": PROMPT, "sampling_params": {"max_tokens": 5}}, ASK), 0
    )
    return {**whole, "meta_info": {**whole["meta_info"], **meta}}


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        "text",
        [answer_with(), None],
        {"output_ids": [1]},
        {"meta_info": {}},
        answer_with(finish_reason="stop"),
        answer_with(routed_experts=[1]),
        answer_with(routed_experts="AAA"),
        answer_with(routed_experts="AAAA"),
        answer_with(routed_experts=rows_text(np.zeros(7))),
        answer_with(routed_experts=rows_text(np.full(6, 8))),
        answer_with(routed_experts=rows_text(np.full(6, -1))),
        answer_with(output_token_sampling_mask=[1]),
        answer_with(output_token_sampling_mask=[["1"]]),
        answer_with(output_token_sampling_mask={}),
        answer_with(output_token_logprobs=3),
        answer_with(output_token_logprobs=[[0.1]]),
        answer_with(output_token_logprobs=[[0.1, 2, None]], output_top_logprobs=[None, None]),
    ],
    ids=lambda answer: str(answer)[-60:],
)
def test_what_it_would_never_send_is_refused(answer: Any) -> None:
    with pytest.raises((UnreadableAnswer, InvalidInput)):
        DIALECT.read(answer)


def test_a_stream_that_goes_back_is_refused() -> None:
    reader = DIALECT.events()
    event = answer_with()
    reader.read(event)
    with pytest.raises(UnreadableAnswer, match="go on"):
        reader.read({**event, "meta_info": {**event["meta_info"], "completion_tokens": 2}})
    with pytest.raises(UnreadableAnswer, match="number"):
        DIALECT.events().read({**event, "meta_info": {}})


def test_without_kept_sets_the_plain_logprobs_stand() -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3, "logprobs": 0}}
    answer = SglangEngine().item(DIALECT.whole(body, ASK), 0)
    read: Any = DIALECT.read(answer)
    content = read["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [logprob(t) for t in TOKENS[6:9]]
    assert content[0]["top_logprobs"] == [
        {"token_id": TOKENS[6], "logprob": logprob(TOKENS[6]), "rank": None}
    ]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([{"version": "3", "start": 0, "end": 5}], True),
        ([{"version": "default", "start": 0, "end": 5}], True),
        (None, False),
        ("3", False),
    ],
)
def test_the_names_of_weights_are_passed_on(spans: Any, expected: bool) -> None:
    read: Any = DIALECT.read(answer_with(weight_versions=spans))
    assert read["choices"][0]["weight_versions"] == (spans if expected else None)


def test_rows_are_narrowed_to_the_models_own_dtype() -> None:
    rows = all_layers(true_rows(TOKENS[:-1]))
    read: Any = DIALECT.read(answer_with(routed_experts=rows_text(rows)))
    found = read["choices"][0]["routed_experts"]
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, rows)


def test_no_limit_is_minus_one() -> None:
    assert sampling_params({"top_k": 0}) == sampling_params({"top_k": -1}) == {"top_k": -1}
    with pytest.raises(UntranslatableParameter):
        sampling_params({"typical_p": 0.5})


async def test_it_needs_the_models_config_and_makes_no_pair(config: Path) -> None:
    alone = EngineSettings(name="e0", url="http://e0", dialect="sglang")
    with pytest.raises(ModelNeeded, match="model_config_path"):
        async with lifespan(ProxySettings(engines=(alone,))):
            pass
    legs = tuple(
        EngineSettings(name=role, url=f"http://{role}", role=role, dialect="sglang")
        for role in ("prefill", "decode")
    )
    with pytest.raises(CannotPair, match="sglang"):
        async with lifespan(ProxySettings(engines=legs, model_config_path=config)):
            pass


def lifespan(settings: ProxySettings) -> Any:
    app = create_app(settings)
    return app.router.lifespan_context(app)
