"""Clients that nobody here wrote, through the proxy to the orchestrator and to every rank.

They are asked for by the extra ``clients``; without it these tests are skipped by name.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.field.test_four_ways import SEQ_LEN, disobeying_pair, stock
from tests.integration.way import Way, running_way
from tests.services.inference_proxy.harness import served_proxy
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.stub_model import (
    ALPHABET,
    HF_CONFIG,
    rendered,
    sampled,
    true_rows,
)

openai = pytest.importorskip("openai", reason="the extra `clients` is not installed")
renderers = pytest.importorskip("renderers", reason="the extra `clients` is not installed")

HELLO = [{"role": "user", "content": "Hello"}]
SAMPLING = {"max_tokens": 4, "temperature": 1.0, "top_k": 20, "top_p": 0.9}


class LetterTokenizer:
    """One letter a token: all that a real one needs to be here."""

    name_or_path = "letters"
    unk_token_id = None
    eos_token_id = None

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return [ALPHABET.index(letter) for letter in text if letter in ALPHABET]

    def decode(self, token_ids: Any, *_: Any, **__: Any) -> str:
        return "".join(ALPHABET[token] for token in token_ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return ALPHABET.index(tokens) if tokens in set(ALPHABET) else None
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
        plain = [m if isinstance(m, dict) else m.model_dump() for m in messages]
        return rendered({"messages": plain})


def client_of(url: str, session: str, **headers: str) -> Any:
    """An OpenAI client as anybody makes one, with two headers."""
    sent = {"X-Sideband-Kind": "train", "X-Sideband-Session": session, **headers}
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", default_headers=sent)


async def lease(way: Way, name: str) -> None:
    body = {"rollout_id": name, "group_id": name, "group_size": 1, "session_id": name}
    answer = await way.orchestrator.post("/v1/leases", json=body)
    assert answer.status_code == 200, answer.text


async def hand_in(way: Way, name: str, **by: Any) -> None:
    body = {"rollout_id": name, "status": "completed", "advantage": 0.5, **by}
    answer = await way.orchestrator.post("/v1/rollouts", json=body)
    assert answer.status_code == 202, answer.text
    assert answer.json()["accepted"], answer.text


async def check_ranks(way: Way, prompt: list[int]) -> None:
    """Every rank gets the tokens and the rows of what the engine ran."""
    drained = await way.orchestrator.post("/v1/admin/drain")
    assert drained.status_code < 300
    (batches,) = await way.train()
    tokens = [*prompt, *sampled(prompt, 4)]
    (batch,) = (batch for batch in batches if any(batch.sample_ids))
    count = len(tokens)
    assert batch.input_ids[0][:count].tolist() == tokens
    assert batch.routed_experts is not None
    assert batch.routing_valid[0][: count - 1].all()
    np.testing.assert_array_equal(batch.routed_experts[0][: count - 1], true_rows(tokens[:-1]))


@asynccontextmanager
async def reached(
    engines: dict[str, StubEngine], tmp_path: Path, **headers: str
) -> AsyncIterator[tuple[Way, Any]]:
    """The whole path before these engines, and a client of its proxy in session ``r``."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(HF_CONFIG))
    async with (
        running_way(
            engines,
            root=tmp_path / "root",
            model_config=config,
            cp_size=1,
            seq_len=SEQ_LEN,
            step_rollouts=1,
        ) as way,
        served_proxy(way.proxy) as url,
        client_of(url, "r", **headers) as client,
    ):
        yield way, client


def engines_named(name: str) -> dict[str, StubEngine]:
    return stock() if name == "stock" else disobeying_pair()


@pytest.mark.parametrize("name", ["stock", "pair"])
async def test_renderers_reaches_every_rank_by_its_request_id(tmp_path: Path, name: str) -> None:
    from renderers.client import generate
    from renderers.default import DefaultRenderer

    async with reached(
        engines_named(name), tmp_path, **{"X-Sideband-Logprobs": "token_strings"}
    ) as (way, client):
        await lease(way, "r")
        found = await generate(
            client=client,
            renderer=DefaultRenderer(LetterTokenizer()),
            messages=HELLO,
            model="m",
            sampling_params=SAMPLING,
            max_prompt_len=1000,
        )
        prompt = rendered({"messages": HELLO})
        assert found["prompt_ids"] == prompt
        assert found["completion_ids"] == sampled(prompt, 4)
        assert len(found["completion_logprobs"]) == 4
        assert "payload_segments" not in found, "it keeps nothing that it does not know"
        await hand_in(way, "r", turn_refs=[{"request_id": found["request_id"]}])
        await check_ranks(way, prompt)


async def test_renderers_refuses_the_form_that_it_does_not_know(tmp_path: Path) -> None:
    from renderers.client import MalformedGenerateResponseError, generate
    from renderers.default import DefaultRenderer

    async with reached(stock(), tmp_path) as (_, client):
        with pytest.raises(MalformedGenerateResponseError, match="token"):
            await generate(
                client=client,
                renderer=DefaultRenderer(LetterTokenizer()),
                messages=HELLO,
                model="m",
                sampling_params=SAMPLING,
                max_prompt_len=1000,
            )


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("route", ["chat", "text"])
async def test_openai_reaches_every_rank_by_its_session(
    tmp_path: Path, route: str, is_stream: bool
) -> None:
    async with reached(stock(), tmp_path) as (way, client):
        await lease(way, "r")
        asked: dict[str, Any] = {"model": "m", "max_tokens": 4, "extra_body": {"top_k": 20}}
        if route == "chat":
            asked["messages"] = HELLO
            call = client.chat.completions.create
        else:
            asked["prompt"] = "Hello"
            call = client.completions.create
        text = ""
        if is_stream:
            async for chunk in await call(**asked, stream=True):
                (choice,) = chunk.choices
                text += (choice.delta.content if route == "chat" else choice.text) or ""
        else:
            (choice,) = (await call(**asked)).choices
            text = choice.message.content if route == "chat" else choice.text
        prompt = rendered({"messages": HELLO} if route == "chat" else {"prompt": "Hello"})
        assert LetterTokenizer().encode(text) == sampled(prompt, 4)
        await hand_in(way, "r", session_id="r")
        await check_ranks(way, prompt)


async def test_openai_shows_a_refusal_with_its_status(tmp_path: Path) -> None:
    async with reached(stock(), tmp_path) as (_, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="m", prompt=["a", "b"], max_tokens=4)
        assert caught.value.body["code"] == "prompts_refused"
