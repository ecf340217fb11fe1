"""Engines that name their weights nowhere: one that was started anew shows by its process."""

import asyncio
from collections.abc import Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from tests.services.inference_proxy.harness import (
    GENERATE,
    TRAIN,
    Running,
    request_body,
    running,
    until,
)
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.test_sampled import report, view_of
from tests.services.inference_proxy.test_streams import events_of
from tests.services.inference_proxy.workers import session_of, turn, workers

PROMPT = [5, 17, 3, 42]
IDENTITY = {"is_by_handle": True, "run_id": "run-1", "policy_version": None}
NOT_ASKED: dict[str, Any] = {"probe_interval_s": 3600}  # whatever shows, shows in answers
OPENAI = {"model": "m", "prompt": "Hello", "max_tokens": 4}

Anew = Callable[[StubEngine], None]


def with_plugin(role: str = "colocated") -> StubEngine:
    """As vLLM 0.30 with the plugin, of one API process."""
    return StubEngine(role, identity=dict(IDENTITY), process="a")


def with_old_plugin(role: str = "colocated") -> StubEngine:
    """With a plugin that says nothing of its process."""
    return StubEngine(role, identity=dict(IDENTITY), started_s=1795961577.05)


def stock(role: str = "colocated") -> StubEngine:
    """As vLLM 0.30 without the plugin."""
    return StubEngine(role, spills=True, started_s=1795961577.05)


def start_anew(engine: StubEngine) -> None:
    """Nobody notices: every probe is answered, before and after."""
    engine.process = None if engine.process is None else engine.process + "'"
    engine.started_s = None if engine.started_s is None else engine.started_s + 0.01


def start_without_plugin(engine: StubEngine) -> None:
    start_anew(engine)
    engine.identity = engine.process = None


KINDS = pytest.mark.parametrize("kind", [with_plugin, with_old_plugin, stock])


async def openai(proxy: Running) -> httpx.Response:
    return await proxy.http.post("/v1/completions", json=OPENAI, headers=TRAIN)


@KINDS
async def test_an_engine_that_was_started_anew_unseen_answers_no_train_request(
    tmp_path: Path, kind: Callable[[], StubEngine]
) -> None:
    died, other = kind(), kind()
    engines = {"e0": died, "e1": other}
    async with running(engines, root=tmp_path / "root", **NOT_ASKED) as proxy:
        await report(proxy, 3)
        assert (await proxy.generate(request_body(PROMPT))).status_code == 200
        start_anew(died)
        died.requests.clear()
        for _ in range(6):
            assert (await proxy.generate(request_body(PROMPT))).status_code == 200
        assert (len(died.requests), len(other.requests) >= 6) == (1, True)
        view = await view_of(proxy, "e0")
        assert view["why_out"] == "stale weights: v0 is behind v3"
        await until(lambda: len(proxy.files()) == 7)  # the losing attempt's is gone
        await report(proxy, 3, engines=["e0"])
        other.is_healthy = False
        await proxy.parts.probes.probe(proxy.parts.book.get("e0"))
        assert (await view_of(proxy, "e0"))["is_serving"]
        died.requests.clear()
        for _ in range(4):
            assert (await proxy.generate(request_body(PROMPT))).status_code == 200
        assert died.requests


@KINDS
@pytest.mark.parametrize("leg", ["p0", "d0"])
async def test_either_leg_of_a_pair_is_looked_at(
    tmp_path: Path, kind: Callable[[str], StubEngine], leg: str
) -> None:
    engines = {"p0": kind("prefill"), "d0": kind("decode")}
    async with running(engines, root=tmp_path / "root", **NOT_ASKED) as proxy:
        await report(proxy, 3)
        assert (await proxy.generate(request_body(PROMPT))).status_code == 200
        start_anew(engines[leg])
        refused = await proxy.generate(request_body(PROMPT))
        assert (refused.status_code, refused.json()["code"]) == (503, "no_engine")
        assert (await view_of(proxy, leg))["why_out"] == "stale weights: v0 is behind v3"


@KINDS
@pytest.mark.parametrize("choices", [1, 3])
async def test_a_stream_of_another_process_breaks_and_leaves_nothing(
    tmp_path: Path, kind: Callable[[], StubEngine], choices: int
) -> None:
    engine, body = kind(), request_body(PROMPT)
    body |= {"stream": True, "request_id": "r1"}
    body["sampling_params"] |= {"n": choices}
    async with running({"e0": engine}, root=tmp_path / "root", **NOT_ASKED) as proxy:
        await report(proxy, 3)
        good = await proxy.generate(body)
        assert good.text.rstrip().endswith("data: [DONE]")
        files = proxy.files()
        start_anew(engine)
        bad = await proxy.generate({**body, "request_id": "r2"})
        said = events_of(bad.text)[-1]["error"]["message"]
        assert said == "engine e0: v0 sampled the answer to a request of v3"
        assert "[DONE]" not in bad.text
        assert "payload_segments" not in bad.text.replace('"payload_segments":null', "")
        await until(lambda: proxy.files() == files)
        assert len(proxy.parts.keeper.turns) == 1
        assert not (await view_of(proxy, "e0"))["is_serving"]


@KINDS
async def test_an_openai_turn_of_another_process_is_not_kept(
    tmp_path: Path, kind: Callable[[], StubEngine]
) -> None:
    engine = kind()
    async with running({"e0": engine}, root=tmp_path / "root", **NOT_ASKED) as proxy:
        await report(proxy, 3)
        good = await openai(proxy)
        start_anew(engine)
        bad = await openai(proxy)
        assert (good.status_code, bad.status_code, len(proxy.parts.keeper.turns)) == (200, 503, 1)
        assert (await view_of(proxy, "e0"))["policy_version"] == 0


@pytest.mark.parametrize("kind", [with_plugin, with_old_plugin])
async def test_an_engine_that_comes_back_without_the_plugin_was_started_anew(
    tmp_path: Path, kind: Callable[[], StubEngine]
) -> None:
    engine = kind()
    async with running({"e0": engine}, root=tmp_path / "root", **NOT_ASKED) as proxy:
        await report(proxy, 3)
        assert (await openai(proxy)).status_code == 200
        start_without_plugin(engine)
        assert (await openai(proxy)).status_code == 503
        assert (await view_of(proxy, "e0"))["policy_version"] == 0


async def test_a_probe_sees_another_process_before_any_answer_does() -> None:
    engine = stock()
    async with running({"e0": engine}, **NOT_ASKED) as proxy:
        await report(proxy, 3)
        probed = proxy.parts.book.get("e0")
        await proxy.parts.probes.probe(probed)
        start_anew(engine)
        probed.doubts += 1  # a request had failed
        with capture_logs() as logs:
            await proxy.parts.probes.probe(probed)
        assert (await view_of(proxy, "e0"))["why_out"] == "stale weights: v0 is behind v3"
        assert started_anew(logs) == [("e0", 0)]


async def test_an_answer_of_another_process_is_logged_by_name() -> None:
    engine = with_plugin()
    async with running({"e0": engine}, **NOT_ASKED) as proxy:
        await report(proxy, 3)
        start_anew(engine)
        with capture_logs() as logs:
            await proxy.generate(request_body(PROMPT))
        assert started_anew(logs) == [("e0", 0)]


def started_anew(logs: Iterable[MutableMapping[str, Any]]) -> list[tuple[str, int]]:
    named = [entry for entry in logs if entry["event"] == "engine_started_anew"]
    return [(entry["engine"], entry["policy_version"]) for entry in named]


@pytest.mark.parametrize("status", [301, 307])
async def test_an_engine_whose_metrics_are_elsewhere_gives_no_such_sign(status: int) -> None:
    """As a server that has them without the slash."""
    engine = stock()
    engine.metrics_status = status
    async with running({"e0": engine}, **NOT_ASKED) as proxy:
        await report(proxy, 3)
        assert (await proxy.generate(request_body(PROMPT))).status_code == 200
        assert proxy.parts.book.get("e0").weights.process is None


@pytest.mark.parametrize("kind", [StubEngine, stock])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_only_on_record_is_not_believed_of_an_answer_that_names_nothing(
    tmp_path: Path, kind: Callable[[], StubEngine], stream: bool
) -> None:
    engine = kind()
    body = {**request_body(PROMPT), "stream": stream}
    async with running({"e0": engine}, root=tmp_path / "root", **NOT_ASKED) as proxy:
        proxy.parts.book.begin_at(3)  # perhaps said of a process that died with the proxy's
        assert (await view_of(proxy, "e0"))["is_serving"]
        refused = await proxy.generate(body)
        assert refused.status_code == 503 or "error" in events_of(refused.text)[-1]
        assert (await view_of(proxy, "e0"))["why_out"] == "stale weights: v0 is behind v3"
        await until(lambda: not proxy.files())
        await report(proxy, 3)
        taken = await proxy.generate(body)
        assert taken.status_code == 200
        assert '"error"' not in taken.text


@pytest.mark.parametrize("status", [401, 403, 429, 500])
@pytest.mark.parametrize("kind", [with_old_plugin, stock])
async def test_an_engine_that_does_not_say_which_process_it_is_has_not_answered(
    tmp_path: Path, status: int, kind: Callable[[], StubEngine]
) -> None:
    engine = kind()
    async with running({"e0": engine}, root=tmp_path / "root", **NOT_ASKED) as proxy:
        await report(proxy, 3)
        engine.metrics_status = status
        answer = await proxy.generate(request_body(PROMPT))
        assert answer.status_code in {502, 503}
        assert proxy.parts.book.get("e0").policy_version == 3  # nothing shows that it was
        await until(lambda: not proxy.files())
        engine.metrics_status = 200
        assert (await proxy.generate(request_body(PROMPT))).status_code == 200


async def test_the_answers_of_the_plugin_cost_no_question(tmp_path: Path) -> None:
    engine = with_plugin()
    async with running({"e0": engine}, root=tmp_path / "root", **NOT_ASKED) as proxy:
        await report(proxy, 3)
        engine.asked.clear()
        for stream in (False, True):
            answer = await proxy.generate({**request_body(PROMPT), "stream": stream})
            assert answer.status_code == 200
            assert "engine_process" not in answer.text
        assert engine.asked == []


@pytest.mark.parametrize("version", [0, 3])
async def test_only_what_the_start_would_not_have_is_asked_for(version: int) -> None:
    engine = StubEngine(started_s=1.5)
    async with running({"e0": engine}, **NOT_ASKED) as proxy:
        await report(proxy, version)
        engine.asked.clear()
        await proxy.generate(request_body(PROMPT))
        await proxy.http.post(GENERATE, json=request_body(PROMPT))  # nobody trains on it
        assert engine.asked == ["identity", "metrics"] * (version > 0)


async def test_a_process_that_is_no_name_is_no_answer() -> None:
    engine = with_plugin()
    answer = {"choices": [{"index": 0, "token_ids": [1]}], "engine_process": 7}
    engine.script.extend([lambda _: StubEngine.json(answer)] * 9)
    async with running({"e0": engine}, **NOT_ASKED) as proxy:
        refused = await proxy.generate(request_body(PROMPT))
        assert (refused.status_code, refused.json()["code"]) == (502, "engine_answer_malformed")


@pytest.mark.parametrize("status", [400, 401, 403, 405, 418])
async def test_only_a_404_means_that_an_engine_has_no_such_route(status: int) -> None:
    engine = with_plugin()
    engine.identity_status = status
    async with running({"e0": engine}, waits=False) as proxy:
        await until(lambda: proxy.parts.book.get("e0").misfit is not None)
        out = (await view_of(proxy, "e0"))["why_out"]
        assert out.startswith(f"identity_unreadable: /inference/v1/sideband: status {status}")
        engine.identity_status = 200
        await until(lambda: proxy.parts.book.is_serving(proxy.parts.book.get("e0")))


@pytest.mark.parametrize("status", [401, 403, 429])
async def test_an_engine_that_refuses_to_say_what_it_runs_was_not_started_anew(
    tmp_path: Path, status: int
) -> None:
    engine = StubEngine(identity=IDENTITY | {"policy_version": 3})
    async with running({"e0": engine}, root=tmp_path / "root", **NOT_ASKED) as proxy:
        assert (await openai(proxy)).status_code == 200
        engine.identity_status = status
        refused = await openai(proxy)
        assert refused.status_code in {502, 503}
        assert refused.json()["code"] != "no_engine"
        assert len(proxy.parts.keeper.turns) == 1
        assert proxy.parts.book.get("e0").policy_version == 3


@pytest.mark.e2e
@pytest.mark.parametrize("kind", [with_plugin, with_old_plugin])
async def test_no_worker_takes_an_answer_of_another_process(
    tmp_path: Path, kind: Callable[[], StubEngine]
) -> None:
    engine = kind()
    async with workers({"e0": engine}, tmp_path, retry_wait_s_max=0.01) as proxy:
        for version, number in ((3, 0), (4, 2)):
            answer = await proxy.ask("POST", "/v1/policy-version", json={"policy_version": version})
            assert answer.json()["engines"] == {"e0": version}
            for worker in (0, 1):
                name = session_of(worker, number=number)
                taken = await proxy.generate(turn(PROMPT, f"{name}.t0"), session=name)
                assert taken.headers["x-sideband-policy-version"] == str(version)
            start_anew(engine)
            for worker in (0, 1):
                name = session_of(worker, number=number + 1)
                refused = await proxy.generate(turn(PROMPT, f"{name}.t0"), session=name)
                assert (refused.status_code, refused.json()["code"]) == (503, "no_engine")
            async with asyncio.timeout(15):  # whoever found it out, all know
                versions: dict[str, int] = {}
                while versions != {"e0": 0}:
                    versions = (await proxy.ask("GET", "/v1/policy-version")).json()["engines"]
