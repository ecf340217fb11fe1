"""Log probabilities in the form of vLLM 0.32 or 0.30, whatever the engine answers."""

from typing import Any

import msgspec
import orjson
import pytest
from fastapi import Response

from services.inference_proxy.answers import MalformedAnswer
from services.inference_proxy.logprob_forms import PREFIX, in_form
from tests.services.inference_proxy.harness import GENERATE, TRAIN, request_body, running
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.test_recorded import DATA, recorded
from tests.services.inference_proxy.test_streams import events_of

NAME = "p40_m5_logprobs"
IDS, STRINGS = recorded(f"0.32-{NAME}.response"), recorded(f"0.30-{NAME}.response")
FORMS = {"0.32": "token_ids", "0.30": "token_strings"}


def content_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    (choice,) = answer["choices"]
    content: list[dict[str, Any]] = choice["logprobs"]["content"]
    return content


def shape_of(answer: dict[str, Any]) -> Any:
    """The names of members, level by level."""
    first = content_of(answer)[0]
    return set(first), [set(top) for top in first["top_logprobs"]]


def values_of(answer: dict[str, Any]) -> list[tuple[int, float]]:
    """Token and log probability, whatever the form."""
    return [
        (e.get("token_id", int(e.get("token", ":0").split(":")[1])), e["logprob"])
        for e in content_of(answer)
    ]


@pytest.mark.parametrize("asked", ["engine", "token_ids", "token_strings", None])
@pytest.mark.parametrize("by", ["header", "setting"])
@pytest.mark.parametrize("version", ["0.32", "0.30"])
async def test_recorded_answers_come_in_the_form_that_was_asked_for(
    version: str, by: str, asked: str | None
) -> None:
    sent = recorded(f"{version}-{NAME}.response")
    engine = StubEngine()
    engine.script.append(lambda _: StubEngine.json(sent))
    settings: dict[str, Any] = {"logprob_form": asked} if by == "setting" and asked else {}
    headers = {"X-Sideband-Logprobs": asked} if by == "header" and asked else {}
    async with running({"e0": engine}, **settings) as proxy:
        answer = await proxy.http.post(
            GENERATE, json=recorded(f"{version}-{NAME}.request"), headers={**TRAIN, **headers}
        )
        found = answer.json()
        form = FORMS[version] if asked in {None, "engine"} else asked
        assert shape_of(found) == shape_of(IDS if form == "token_ids" else STRINGS)
        assert values_of(found) == values_of(sent)
        if asked in {None, "engine"}:
            assert found["choices"] == sent["choices"]


async def test_a_header_wins_over_the_setting_and_a_wrong_one_is_refused() -> None:
    engine = StubEngine()
    engine.script.append(lambda _: StubEngine.json(IDS))
    async with running({"e0": engine}, logprob_form="token_ids") as proxy:
        body = recorded(f"0.32-{NAME}.request")
        headers = {"X-Sideband-Logprobs": "token_strings"}
        answer = await proxy.http.post(GENERATE, json=body, headers=headers)
        assert shape_of(answer.json()) == shape_of(STRINGS)
        headers = {"X-Sideband-Logprobs": "words"}
        answer = await proxy.http.post(GENERATE, json=body, headers=headers)
        assert answer.status_code == 422


@pytest.mark.parametrize("is_stream", [False, True])
async def test_answers_without_log_probabilities_have_none_in_any_form(is_stream: bool) -> None:
    async with running({"e0": StubEngine()}, logprob_form="token_strings") as proxy:
        answer = await proxy.generate({**request_body([1, 2, 3]), "stream": is_stream})
        events = events_of(answer.text)[:-1] if is_stream else [answer.json()]
        choices = [choice for event in events for choice in event["choices"]]
        assert all(choice.get("logprobs") is None for choice in choices)
        assert sum(len(choice["token_ids"]) for choice in choices) == 4


async def test_each_event_of_a_stream_comes_in_the_form() -> None:
    entry = {"token_id": 7, "logprob": -0.5, "rank": 2}
    choice = {"index": 0, "token_ids": [7], "logprobs": {"content": [entry]}}
    events = [{"choices": [choice]}, {"choices": [{**choice, "finish_reason": "length"}]}]
    content = b"".join(b"data: " + orjson.dumps(e) + b"\n\n" for e in events) + b"data: [DONE]\n\n"
    engine = StubEngine()
    engine.script.append(lambda _: Response(content, media_type="text/event-stream"))
    async with running({"e0": engine}, logprob_form="token_strings") as proxy:
        answer = await proxy.generate({**request_body([1, 2, 3], 2), "stream": True})
        found = [c["logprobs"] for e in events_of(answer.text)[:-1] for c in e["choices"]]
        token = {"token": "token_id:7", "logprob": -0.5, "bytes": None}
        assert found == [{"content": [{**token, "top_logprobs": []}]}] * 2


def test_raw_json_converts_as_objects_do() -> None:
    for answer in (IDS, STRINGS):
        (choice,) = answer["choices"]
        raw = {**choice, "logprobs": msgspec.Raw(orjson.dumps(choice["logprobs"]))}
        for form in ("token_ids", "token_strings"):
            assert in_form([raw], form) == in_form([choice], form)
    null: dict[str, Any] = {"index": 0, "logprobs": msgspec.Raw(b"null")}
    assert in_form([null], "token_ids") == [{"index": 0, "logprobs": None}]


@pytest.mark.parametrize(
    "logprobs",
    [
        {"content": [{"token": "cat", "logprob": -1.0}]},
        {"content": [{"token": "token_id:", "logprob": -1.0}]},
        {"content": [{"token": "token_id:-4", "logprob": -1.0}]},
        {"content": [{"logprob": -1.0}]},
        {"content": [{"token_id": "4"}]},
        {"content": 3},
        [1],
    ],
)
async def test_a_form_that_names_no_tokens_is_not_guessed_at(logprobs: Any) -> None:
    with pytest.raises(MalformedAnswer, match="logprobs"):
        in_form([{"index": 0, "logprobs": logprobs}], "token_ids")
    engine = StubEngine()
    choice = {"index": 0, "token_ids": [4], "logprobs": logprobs}
    engine.script.append(lambda _: StubEngine.json({"choices": [choice]}))
    async with running({"e0": engine}, logprob_form="token_ids") as proxy:
        answer = await proxy.generate(request_body([1, 2, 3]))
        assert (answer.status_code, answer.json()["part"]) == (502, "logprobs")


def test_the_recordings_are_of_both_forms() -> None:
    assert DATA.is_dir()
    assert shape_of(IDS) != shape_of(STRINGS)


@pytest.mark.parametrize("token", ["x", PREFIX, f"{PREFIX}-1", f"{PREFIX}{'1' * 5000}"])
def test_a_token_that_names_no_id_is_malformed(token: str) -> None:
    with pytest.raises(MalformedAnswer):
        in_form([{"logprobs": {"content": [{"token": token, "logprob": -1.0}]}}], "token_ids")
