"""Sessions over HTTP: pinned versions, affinity, follow-up turns that ask only for new rows."""

from pathlib import Path
from typing import Any

import pytest
from fastapi import Response

from sideband.engines.inline import decode_npy_base64, encode_npy_base64
from tests.services.inference_proxy.harness import Running, pair, request_body, running, until
from tests.services.inference_proxy.reading import assert_rows, routing_of
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.stub_model import sampled, true_rows

FIRST = [5, 17, 3, 42]


def asked_start(proxy: Running, engine: str) -> int:
    """The first prompt row that the last request to an engine asked for."""
    params = proxy.engines[engine].requests[-1]["sampling_params"]
    return int(params.get("routed_experts_prompt_start", 0))


@pytest.mark.parametrize("by_handle", [True, False])
@pytest.mark.parametrize("is_pair", [True, False])
async def test_a_follow_up_asks_from_the_row_that_the_first_turn_lacks(
    tmp_path: Path, by_handle: bool, is_pair: bool
) -> None:
    root = tmp_path / "root" if by_handle else None
    engines = pair() if is_pair else {"e0": StubEngine()}
    first_leg = "p0" if is_pair else "e0"
    async with running(engines, root=root) as proxy:
        one = (await proxy.generate(request_body(FIRST), session="s1")).json()
        prompt = FIRST + one["choices"][0]["token_ids"] + [9, 9]
        two = (await proxy.generate(request_body(prompt), session="s1")).json()
        # Turn 1 has 8 tokens and rows [0, 7): row 7 comes with turn 2.
        assert asked_start(proxy, first_leg) == 7
        assert_rows(routing_of(one, root), true_rows((FIRST + sampled(FIRST, 4))[:-1]))
        whole = true_rows((prompt + sampled(prompt, 4))[:-1])
        assert_rows(routing_of(two, root), whole[7:], start=7)
        if not by_handle:
            assert two["routed_experts_start"] == {"0": 7}


async def test_a_prefix_that_differs_counts_only_what_is_shared(tmp_path: Path) -> None:
    async with running({"e0": StubEngine()}, root=tmp_path / "root") as proxy:
        await proxy.generate(request_body(FIRST), session="s1")
        retokenised = [*FIRST, sampled(FIRST, 4)[0], 63, 62, 61]
        await proxy.generate(request_body(retokenised), session="s1")
        assert asked_start(proxy, "e0") == 5
        # A turn on the first branch still knows the first branch.
        await proxy.generate(request_body([*FIRST, *sampled(FIRST, 4), 1]), session="s1")
        assert asked_start(proxy, "e0") == 7
        await proxy.generate(request_body([60, 1, 2]), session="s1")
        assert asked_start(proxy, "e0") == 0


async def test_a_clients_own_start_stands_without_a_session_only(tmp_path: Path) -> None:
    async with running({"e0": StubEngine()}, root=tmp_path / "root") as proxy:
        body = request_body(FIRST, routed_experts_prompt_start=2)
        await proxy.generate(body)
        assert asked_start(proxy, "e0") == 2
        await proxy.generate(body, session="s1")
        assert asked_start(proxy, "e0") == 0


async def test_a_turn_asked_again_is_given_whole_again(tmp_path: Path) -> None:
    """The same id and prompt: the client has lost the answer, so its rows were not delivered."""
    async with running({"e0": StubEngine()}, root=tmp_path / "root") as proxy:
        await proxy.generate(request_body(FIRST), session="s1")
        prompt = [*FIRST, *sampled(FIRST, 4), 9]
        follow_up = {**request_body(prompt), "request_id": "r2"}
        for _ in range(3):
            await proxy.generate(follow_up, session="s1")
            assert asked_start(proxy, "e0") == 7
        # The same prompt as a new request is another sample: its prompt rows are there already.
        await proxy.generate({**follow_up, "request_id": "r3"}, session="s1")
        assert asked_start(proxy, "e0") == len(prompt)


async def test_turns_that_failed_do_not_count(tmp_path: Path) -> None:
    engine = StubEngine()
    async with running({"e0": engine}, root=tmp_path / "root", attempts_max=1) as proxy:
        engine.script.append(lambda _: StubEngine.json({}, 500))
        assert (await proxy.generate(request_body(FIRST), session="s1")).status_code == 502
        await proxy.generate(request_body([*FIRST, *sampled(FIRST, 4)]), session="s1")
        assert asked_start(proxy, "e0") == 0


async def test_invalid_rows_are_asked_for_again() -> None:
    engine = StubEngine()
    async with running({"e0": engine}) as proxy:

        def zeroed(body: dict[str, Any]) -> Response:
            whole = engine.generate(body)
            choice = whole["choices"][0]
            rows = decode_npy_base64(choice["routed_experts"], bytes_max=1 << 20).copy()
            rows[3] = 0
            choice["routed_experts"] = encode_npy_base64(rows)
            return StubEngine.json(whole)

        engine.script.append(zeroed)
        await proxy.generate(request_body(FIRST), session="s1")
        await proxy.generate(request_body([*FIRST, *sampled(FIRST, 4)]), session="s1")
        assert asked_start(proxy, "e0") == 3


async def test_a_session_keeps_its_version_when_the_weights_change(tmp_path: Path) -> None:
    async with running({"e0": StubEngine()}, root=tmp_path / "root") as proxy:
        first = await proxy.generate(request_body(FIRST), session="s1")
        report = {"policy_version": 5}
        applied = await proxy.http.post("/v1/policy-version", json=report)
        assert applied.json()["applied"] == 5
        second = await proxy.generate(request_body(FIRST), session="s1")
        other = await proxy.generate(request_body(FIRST), session="s2")
        leased = await proxy.generate(request_body(FIRST), version="4")
        versions = [r.headers["x-sideband-policy-version"] for r in (first, second, other, leased)]
        assert versions == ["0", "0", "5", "4"]
        assert {file.split("/")[0] for file in proxy.files()} == {"v0", "v4", "v5"}
        changed = await proxy.generate(request_body(FIRST), session="s1", version="5")
        assert (changed.status_code, changed.json()["code"]) == (409, "policy_version_conflict")


async def test_sessions_keep_their_engine_and_spread_over_all() -> None:
    engines = {f"e{i}": StubEngine() for i in range(3)}
    async with running(engines) as proxy:
        for turn in range(3):
            for session in range(24):
                body = {**request_body([session + 1, 2]), "request_id": f"s{session}"}
                await proxy.generate(body, session=f"s{session}")
            assert sum(len(engine.requests) for engine in engines.values()) == 24 * (turn + 1)
        homes = [
            {request["request_id"].rsplit("-", 1)[0] for request in engine.requests}
            for engine in engines.values()
        ]
        assert all(homes)
        assert sum(map(len, homes)) == 24  # no session was on two engines


async def test_others_go_to_the_engine_with_the_least_in_flight() -> None:
    engines = {f"e{i}": StubEngine() for i in range(2)}
    async with running(engines) as proxy:
        proxy.parts.book.get("e0").in_flight = 5
        await proxy.generate(request_body(FIRST))
        assert (len(engines["e0"].requests), len(engines["e1"].requests)) == (0, 1)


async def test_a_discarded_session_takes_its_files_along(tmp_path: Path) -> None:
    async with running({"e0": StubEngine()}, root=tmp_path / "root") as proxy:
        await proxy.generate(request_body(FIRST), session="s1")
        await proxy.generate(request_body(FIRST), session="s2")
        shown = (await proxy.http.get("/v1/sessions")).json()
        assert [view["session_id"] for view in shown["sessions"]] == ["s1", "s2"]
        assert shown["sessions"][0]["files"] == 1
        answer = await proxy.http.delete("/v1/sessions/s1?delete_files=true")
        assert answer.json()["files_discarded"] == 1
        await until(lambda: len(proxy.files()) == 1)
        again = await proxy.http.delete("/v1/sessions/s1")
        assert (again.status_code, again.json()["code"]) == (404, "unknown_session")
