"""Several workers behind one address, as real processes: every rule of one holds over all."""

import asyncio
from functools import partial
from pathlib import Path

import httpx
import orjson
import pytest
from fastapi import FastAPI, Request, Response

from tests.services.inference_proxy.harness import GENERATE, TRAIN, served, until
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.stub_model import sampled
from tests.services.inference_proxy.workers import (
    PROMPT,
    arrived,
    rollout,
    session_of,
    starts,
    turn,
    workers,
)

pytestmark = pytest.mark.e2e


def cancelled(engine: StubEngine, count: int) -> bool:
    return engine.cancelled == count


async def test_a_session_keeps_its_version_and_its_rows_whatever_connection_it_comes_by(
    tmp_path: Path,
) -> None:
    engine = StubEngine()
    async with workers({"e0": engine}, tmp_path) as proxy:
        sessions = [session_of(worker, number=n) for worker in (0, 1) for n in range(4)]
        before = await asyncio.gather(*(rollout(proxy, session) for session in sessions))
        assert before == [[0, 0, 0]] * 8
        reported = await proxy.ask("POST", "/v1/policy-version", json={"policy_version": 3})
        assert reported.json()["applied"] == 3
        # Both workers have it by the time of the answer, and old sessions keep theirs.
        late = [session_of(worker, number=n) for worker in (0, 1) for n in range(4, 8)]
        after = await asyncio.gather(*(rollout(proxy, session) for session in late))
        assert after == [[3, 3, 3]] * 8
        again = [turn([*PROMPT, 1], f"{session}.t3") for session in sessions]
        answers = await asyncio.gather(
            *(proxy.generate(body, session=s) for body, s in zip(again, sessions, strict=True))
        )
        assert [answer.headers["x-sideband-policy-version"] for answer in answers] == ["0"] * 8
        # prompt, then all but the last sampled token of each turn: 6 + 4 - 1, then five more
        for session in (*sessions, *late):
            assert starts(engine, session)[:3] == [0, 9, 14]
        listed = (await proxy.ask("GET", "/v1/sessions")).json()
        assert listed["count"] == 16
        assert {view["session_id"] for view in listed["sessions"]} == {*sessions, *late}
        assert len((await proxy.ask("GET", "/v1/sessions?limit=3")).json()["sessions"]) == 3


async def test_a_kept_connection_serves_sessions_of_both_workers_in_turn(tmp_path: Path) -> None:
    engine = StubEngine()
    async with workers({"e0": engine}, tmp_path) as proxy:
        async with httpx.AsyncClient(base_url=proxy.url, trust_env=False, timeout=30) as http:
            for number in range(6):
                session = session_of(number % 2)
                body = turn([*PROMPT, number], f"{session}.t{number}")
                headers = {**TRAIN, "X-Sideband-Session": session}
                answer = await http.post(GENERATE, json=body, headers=headers)
                assert answer.json()["choices"][0]["token_ids"] == sampled([*PROMPT, number], 4)
            views = (await http.get("/v1/sessions")).json()["sessions"]
        assert {view["session_id"]: view["turns_delivered"] for view in views} == {
            session_of(0): 3,
            session_of(1): 3,
        }


async def test_a_large_body_moves_with_its_connection(tmp_path: Path) -> None:
    engine = StubEngine()
    async with workers({"e0": engine}, tmp_path) as proxy:
        prompt = [n % 64 for n in range(200_000)]  # more than one read of a socket
        for worker in (0, 1):
            for _ in range(4):  # whichever worker it arrives at
                name = session_of(worker)
                answer = await proxy.generate(turn(prompt, f"{name}.t0"), session=name)
                assert answer.json()["choices"][0]["token_ids"] == sampled(prompt, 4)


async def test_a_head_in_pieces_is_served_by_its_worker(tmp_path: Path) -> None:
    async with workers({"e0": StubEngine()}, tmp_path) as proxy:
        for worker in (0, 1):
            body = orjson.dumps(turn(PROMPT, "r"))
            head = (
                f"POST {GENERATE} HTTP/1.1\r\nHost: proxy\r\nContent-Type: application/json\r\n"
                f"x-sideBAND-session:   {session_of(worker)}\r\nX-Sideband-Kind: train\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            ).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            for piece in (head[:7], head[7:120], head[120:-2], head[-2:] + body[:5], body[5:]):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.02)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200"), answer
            writer.close()
        views = (await proxy.ask("GET", "/v1/sessions")).json()["sessions"]
        assert {view["session_id"] for view in views} == {session_of(0), session_of(1)}


async def test_a_pipelined_request_of_another_worker_is_refused_and_never_served_there(
    tmp_path: Path,
) -> None:
    engine = StubEngine()
    async with workers({"e0": engine}, tmp_path) as proxy:

        def request(worker: int) -> bytes:
            body = orjson.dumps(turn(PROMPT, f"p{worker}"))
            return (
                f"POST {GENERATE} HTTP/1.1\r\nHost: proxy\r\nContent-Type: application/json\r\n"
                f"X-Sideband-Session: {session_of(worker)}\r\nX-Sideband-Kind: train\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            ).encode() + body

        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(request(0) + request(1))
        async with asyncio.timeout(10):
            answers = await reader.read()  # to the end: the refusal closes the connection
        assert answers.count(b"HTTP/1.1 ") == 2
        assert b"HTTP/1.1 200" in answers
        assert b"HTTP/1.1 421" in answers
        assert [body["request_id"].partition("-")[0] for body in engine.requests] == ["p0"]
        writer.close()


async def test_kept_turns_are_found_and_released_through_any_worker(tmp_path: Path) -> None:
    async with workers({"e0": StubEngine()}, tmp_path) as proxy:
        refs = []
        for worker in (0, 1):
            session = session_of(worker)
            for number in range(2):
                body = turn(
                    [*PROMPT, number],
                    f"{session}.t{number}",
                )
                body["sampling_params"]["logprobs"] = 0
                assert (await proxy.generate(body, session=session)).status_code == 200
                refs.append({"request_id": f"{session}.t{number}"})
        names = [ref["request_id"] for ref in refs]
        for _ in range(4):  # over new connections: both workers are asked
            found = await proxy.ask("POST", "/v1/turns/fetch", json={"turns": refs})
            assert [each["request_id"] for each in found.json()["turns"]] == names
            for worker in (0, 1):
                of_one = {"session_id": session_of(worker)}
                found = await proxy.ask("POST", "/v1/turns/fetch", json=of_one)
                ids = [each["request_id"] for each in found.json()["turns"]]
                assert ids == [f"{session_of(worker)}.t{number}" for number in range(2)]
            unknown = {"turns": [*refs, {"request_id": "nobody"}]}
            refused = await proxy.ask("POST", "/v1/turns/fetch", json=unknown)
            assert (refused.status_code, refused.json()["code"]) == (404, "turn_unknown")
        released = await proxy.ask("POST", "/v1/turns/release", json={"turns": refs[:3]})
        assert released.json() == {"released": 3}
        of_one = {"session_id": session_of(1)}
        assert (await proxy.ask("POST", "/v1/turns/release", json=of_one)).json()["released"] == 1
        gone = await proxy.ask("POST", "/v1/turns/fetch", json={"turns": refs})
        assert (gone.status_code, gone.json()["code"]) == (410, "turn_released")
        assert gone.json()["request_id"] == names[0]


async def test_an_id_that_two_workers_know_is_ambiguous_unless_it_was_repeated(
    tmp_path: Path,
) -> None:
    async with workers({"e0": StubEngine()}, tmp_path) as proxy:
        for worker in (0, 1):
            body = turn(PROMPT, "same")
            body["sampling_params"]["logprobs"] = 0
            answer = await proxy.generate(body, session=session_of(worker))
            assert answer.status_code == 200
        asked = {"turns": [{"request_id": "same"}]}
        for _ in range(4):
            refused = await proxy.ask("POST", "/v1/turns/fetch", json=asked)
            assert (refused.status_code, refused.json()["code"]) == (409, "turn_ambiguous")


async def test_a_discarded_session_ends_its_stream_whoever_was_asked(tmp_path: Path) -> None:
    engine = StubEngine(hold=asyncio.Event())
    async with workers({"e0": engine}, tmp_path) as proxy:
        for worker in (0, 1):
            session = session_of(worker)
            body = turn(PROMPT, f"{session}.t0", stream=True)
            running = asyncio.create_task(proxy.generate(body, session=session))
            await until(partial(arrived, engine, worker + 1))
            views = (await proxy.ask("GET", "/v1/sessions")).json()["sessions"]
            assert {view["session_id"]: view["in_flight"] for view in views}[session] == 1
            deleted = await proxy.ask("DELETE", f"/v1/sessions/{session}")
            assert deleted.json()["requests_cancelled"] == 1
            assert (await running).json()["code"] == "session_discarded"
            await until(partial(cancelled, engine, worker + 1))
            assert (await proxy.ask("DELETE", f"/v1/sessions/{session}")).status_code == 404


async def test_a_client_that_leaves_ends_its_request_wherever_it_is_served(tmp_path: Path) -> None:
    engine = StubEngine(hold=asyncio.Event())
    async with workers({"e0": engine}, tmp_path) as proxy:
        for worker in (0, 1):
            body = turn(PROMPT, "leaves")
            running = asyncio.create_task(proxy.generate(body, session=session_of(worker)))
            await until(partial(arrived, engine, worker + 1))
            running.cancel()
            await until(partial(cancelled, engine, worker + 1))


async def test_paused_and_drained_means_all_workers(tmp_path: Path) -> None:
    engine = StubEngine(hold=asyncio.Event())
    async with workers({"e0": engine}, tmp_path) as proxy:
        running = [
            asyncio.create_task(proxy.generate(turn(PROMPT, f"r{w}"), session=session_of(w)))
            for w in (0, 1)
        ]
        await until(lambda: len(engine.requests) == 2)
        paused = await proxy.ask("POST", "/v1/admin/pause")
        assert paused.json() == {"state": "paused", "in_flight": 2, "is_complete": True}
        for worker in (0, 1):
            refused = await proxy.generate(turn(PROMPT, "late"), session=session_of(worker))
            assert refused.json()["code"] == "not_admitted"
        late = await proxy.ask("POST", "/v1/admin/drain?timeout_s=0.2")
        assert late.json() == {"state": "draining", "in_flight": 2, "is_complete": False}
        draining = asyncio.create_task(proxy.ask("POST", "/v1/admin/drain?timeout_s=20"))
        assert engine.hold is not None
        engine.hold.set()
        assert (await draining).json() == {"state": "drained", "in_flight": 0, "is_complete": True}
        assert [(await each).status_code for each in running] == [200, 200]
        ready = await proxy.ask("GET", "/readyz")
        assert ready.json()["reasons"] == ["the proxy is drained", "worker 1: the proxy is drained"]
        assert (await proxy.ask("POST", "/v1/admin/resume")).json()["state"] == "open"
        for worker in (0, 1):
            taken = await proxy.generate(turn(PROMPT, "again"), session=session_of(worker))
            assert taken.status_code == 200


async def test_an_ejected_and_returned_engine_is_so_for_all_workers(tmp_path: Path) -> None:
    engines = {"e0": StubEngine(), "e1": StubEngine()}
    async with workers(engines, tmp_path) as proxy:

        async def served_by() -> set[str]:
            before = {name: len(engine.requests) for name, engine in engines.items()}
            for number in range(8):
                for worker in (0, 1):
                    await proxy.generate(
                        turn(PROMPT, "x"), session=session_of(worker, number=number)
                    )
            return {name for name, e in engines.items() if len(e.requests) > before[name]}

        assert await served_by() == {"e0", "e1"}
        view = (await proxy.ask("POST", "/v1/engines/e0/eject")).json()
        assert (view["name"], view["state"]) == ("e0", "held")
        assert await served_by() == {"e1"}
        view = (await proxy.ask("POST", "/v1/engines/e0/return")).json()
        assert (view["state"], view["is_serving"]) == ("healthy", True)
        assert await served_by() == {"e0", "e1"}
        views = (await proxy.ask("GET", "/v1/engines")).json()["engines"]
        assert sum(view["requests_total"] for view in views) == 48


async def test_new_weights_reach_every_worker_and_a_failed_engine_leaves_all(
    tmp_path: Path,
) -> None:
    engines = {"e0": StubEngine(), "e1": StubEngine(broken_paths={"/collective_rpc"})}
    async with workers(engines, tmp_path) as proxy:
        update = {"policy_version": 4, "weights_path": "/w/v4"}
        report = await proxy.ask("POST", "/v1/admin/weights", json=update)
        assert (report.json()["applied"], report.json()["updated"]) == (4, ["e0"])
        asked = len(engines["e1"].requests)
        for number in range(6):
            for worker in (0, 1):
                answer = await proxy.generate(
                    turn(PROMPT, "x"), session=session_of(worker, number=number)
                )
                assert answer.headers["x-sideband-policy-version"] == "4"
        assert len(engines["e1"].requests) == asked


async def test_what_is_applied_by_itself_is_applied_by_all_and_pushed_once(tmp_path: Path) -> None:
    orchestrator, taken = FastAPI(), []

    @orchestrator.get("/v1/policy-version")
    async def recorded() -> dict[str, int]:
        return {"policy_version": 5}

    @orchestrator.put("/v1/policy-version")
    async def take(request: Request) -> Response:
        taken.append((await request.json())["policy_version"])
        return Response(status_code=204)

    named = {"is_by_handle": True, "run_id": "run-1", "policy_version": 5}
    engines = {name: StubEngine(identity=dict(named)) for name in ("e0", "e1")}
    async with (
        served(orchestrator) as url,
        workers(engines, tmp_path, orchestrator_url=url, ejection_backoff_s=60) as proxy,
    ):
        # What was on record is known to both before either serves.
        for worker in (0, 1):
            assert await rollout(proxy, session_of(worker, number=99), turns=1) == [5]
        engines["e0"].identity = {**named, "policy_version": 6}
        body = {"policy_version": 6, "engines": ["e0"]}
        assert (await proxy.ask("POST", "/v1/policy-version", json=body)).json()["applied"] == 5
        engines["e1"].is_healthy = False  # its probes fail: what is left has v6
        await until(lambda: 6 in taken, timeout_s=20)
        async with asyncio.timeout(20):
            for worker in (0, 1):
                number = 0
                while await rollout(proxy, session_of(worker, number=number), turns=1) != [6]:
                    number += 1
        assert taken == [5, 6]


async def test_metrics_are_those_of_all_workers(tmp_path: Path) -> None:
    async with workers({"e0": StubEngine()}, tmp_path) as proxy:
        for worker in (0, 1):
            await rollout(proxy, session_of(worker), turns=worker + 1)
        text = (await proxy.ask("GET", "/metrics")).text
        lines = text.splitlines()
        assert lines.count("# TYPE proxy_generate_total counter") == 1
        for worker in (0, 1):
            sample = f'proxy_generate_total{{kind="train",outcome="ok",worker="{worker}"}}'
            assert f"{sample} {worker + 1}.0" in lines
            assert f'proxy_sessions{{worker="{worker}"}} 1.0' in lines
