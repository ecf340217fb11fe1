"""The environment's rollouts are what the orchestrator takes, in either form."""

from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from services.orchestrator.rollout_schemas import RolloutBody
from services.orchestrator.wire import decode_rollout
from simulation.bodies import encode, files_of, rollout_body, turn_body
from simulation.containers import app as containers
from simulation.corruption import Corruption, corrupt
from simulation.environment import Traffic, joined_events
from simulation.generation import Generated, Way
from simulation.plan import Scenario, make_plan
from simulation.rank import StoredArray
from tests.simulation.engines import URL, body, engine

PLAN = make_plan(Scenario())[0]
PROMPT = [1, 2, 3, 4]


async def inline_rollout() -> dict[str, Any]:
    async with engine() as client:
        answer = (await client.post(URL, json=body(PROMPT))).json()
    return rollout_body(PLAN, [turn_body("t0", PROMPT, PLAN, answer)])


async def test_both_forms_are_the_same_rollout() -> None:
    whole = await inline_rollout()
    plain, kind = encode(whole, is_binary=False)
    assert kind == "application/json"
    binary, kind = encode(whole, is_binary=True)
    assert kind.endswith("msgpack")
    assert decode_rollout(binary) == RolloutBody.model_validate_json(plain).to_wire()
    assert files_of(whole) == []


async def test_a_stream_joined_is_the_whole_answer() -> None:
    async with engine() as client:
        whole = (await client.post(URL, json=body(PROMPT))).json()
        streamed = await client.post(URL, json={**body(PROMPT), "stream": True})
    joined = turn_body("t0", PROMPT, PLAN, joined_events(streamed.content))
    assert joined == turn_body("t0", PROMPT, PLAN, whole)


@pytest.mark.parametrize("corruption", ["row", "mask"])
async def test_damage_changes_an_inline_rollout_only_once(corruption: Corruption) -> None:
    whole = await inline_rollout()
    way = Way(pairing="colocated", form="inline")
    generated = Generated(
        way=way,
        bodies={"a": whole},
        traffic=Traffic(),
        root=None,
        counters={},
        proxy_grown_bytes=0,
    )
    before = encode(whole, is_binary=False)[0]
    assert corrupt(generated, "none") is False
    assert corrupt(generated, "file") is False  # there is no file
    assert encode(whole, is_binary=False)[0] == before
    assert corrupt(generated, corruption)
    assert encode(whole, is_binary=False)[0] != before


@pytest.mark.parametrize("array", [np.arange(6, dtype=np.uint16).reshape(1, 3, 2), np.zeros(0)])
def test_a_stored_array_comes_back(array: np.ndarray[Any, Any]) -> None:
    found = StoredArray.of(array).array()
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


def test_the_commands_of_containers_explain_themselves() -> None:
    runner = CliRunner()
    for command in ("engine", "rank", "environment", "checker"):
        assert runner.invoke(containers, [command, "--help"]).exit_code == 0
    wrong = ["engine", "--name", "a", "--role", "chef", "--payload-root", "/nowhere"]
    assert runner.invoke(containers, wrong).exit_code == 2
