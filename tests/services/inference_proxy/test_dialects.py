"""Kinds of engines: a new one is one file, named in the settings."""

from pathlib import Path

import pytest

from services.inference_proxy.app import create_app
from services.inference_proxy.config import EngineSettings, ProxySettings
from services.inference_proxy.dialects.load import CannotPair, UnknownDialect, load_dialect
from tests.services.inference_proxy import plain_dialect
from tests.services.inference_proxy.harness import GENERATE, TRAIN, request_body, running
from tests.services.inference_proxy.plain_dialect import PlainEngine
from tests.services.inference_proxy.reading import assert_rows, routing_of
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.stub_model import kept_ids, sampled, true_rows

PROMPT = [5, 17, 3, 42, 8, 1]
TOKENS = PROMPT + sampled(PROMPT, 4)
PLAIN = plain_dialect.__name__


@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize("spills", [False, True])
async def test_a_dialect_in_one_file_is_asked_and_read(
    tmp_path: Path, spills: bool, kind: str
) -> None:
    root = tmp_path / "root" if spills else None
    engine = PlainEngine(spills=spills, dialect=PLAIN)
    async with running({"e0": engine}, root=root) as proxy:
        answer = await proxy.http.post(
            GENERATE, json=request_body(PROMPT), headers={"X-Sideband-Kind": kind}
        )
        body, (choice,) = answer.json(), answer.json()["choices"]
        assert (body["request_id"], choice["token_ids"]) == ("r1", TOKENS[6:])
        assert_rows(routing_of(body, root), true_rows(TOKENS[:-1]))
        by_handle = spills and kind == "train"
        masks = None if by_handle else [kept_ids(token) for token in TOKENS[6:]]
        assert choice["sampling_mask"] == masks
        assert len(proxy.files() if spills else []) == by_handle
        # Its session is followed like any other's: only new rows are asked for.
        turn = [*TOKENS, 1]
        await proxy.generate(request_body(turn), session="s1")
        await proxy.generate(request_body([*turn, *sampled(turn, 4), 2]), session="s1")
        assert [r["first_row"] for r in engine.requests] == [0, 0, 14]


async def test_an_answer_that_is_none_of_its_dialect_is_a_problem() -> None:
    engine = PlainEngine(dialect=PLAIN)
    engine.script.append(lambda _: StubEngine.json({"old": []}))
    async with running({"e0": engine}) as proxy:
        answer = await proxy.generate(request_body(PROMPT))
        assert (answer.status_code, answer.json()["code"]) == (502, "engine_answer_malformed")
        assert answer.json()["part"] == "new"


@pytest.mark.parametrize("name", ["klingon", "base", "sideband.ids", "no.such.module"])
def test_a_dialect_that_nobody_wrote_fails_at_start(name: str) -> None:
    with pytest.raises(UnknownDialect, match=name):
        load_dialect(name, None)


@pytest.mark.parametrize("name", ["", "../x", "a..b", "A", "a b", ".a"])
def test_a_dialect_is_named_like_a_module(name: str) -> None:
    with pytest.raises(ValueError, match="dialect"):
        EngineSettings(name="e0", url="http://e0", dialect=name)


async def test_a_dialect_whose_decode_goes_on_from_prefills_token_makes_no_pair() -> None:
    engines = tuple(
        EngineSettings(name=role, url=f"http://{role}", role=role, dialect=PLAIN)
        for role in ("prefill", "decode")
    )
    app = create_app(ProxySettings(engines=engines))
    with pytest.raises(CannotPair, match="plain"):
        async with app.router.lifespan_context(app):
            pass


async def test_kinds_of_engines_serve_side_by_side() -> None:
    engines = {"a": StubEngine(), "b": PlainEngine(dialect=PLAIN)}
    async with running(engines) as proxy:
        proxy.parts.book.hold("a", "for the test")
        second = await proxy.http.post(GENERATE, json=request_body(PROMPT), headers=TRAIN)
        proxy.parts.book.hold("b", "for the test")
        proxy.parts.book.release("a")
        await proxy.parts.probes.probe(proxy.parts.book.get("a"))
        first = await proxy.http.post(GENERATE, json=request_body(PROMPT), headers=TRAIN)
        assert (len(engines["a"].requests), len(engines["b"].requests)) == (1, 1)
        one, other = first.json()["choices"][0], second.json()["choices"][0]
        for part in ("token_ids", "routed_experts", "sampling_mask"):
            assert one[part] == other[part]
