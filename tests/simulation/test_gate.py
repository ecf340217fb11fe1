"""The gate of a run with crashes: work for every kill, and some after the last."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.gate import Gate


@given(groups=st.integers(2, 50), kills=st.integers(1, 30))
def test_the_first_group_is_there_at_once_and_the_last_one_after_all_kills(
    tmp_path_factory: pytest.TempPathFactory, groups: int, kills: int
) -> None:
    gate = Gate(path=tmp_path_factory.mktemp("gate") / "gate", groups=groups)
    seen = []
    for number in range(kills + 1):
        gate.let_share(number / kills)
        seen.append(gate.let)
    assert seen[0] == 1
    assert seen == sorted(seen)
    assert max(seen[:-1]) < groups
    assert seen[-1] == groups


async def test_a_group_waits_until_it_is_let_and_a_successor_passes_what_was(
    tmp_path: Path,
) -> None:
    gate = Gate(path=tmp_path / "gate", groups=3)
    gate.let_share(0.0)
    await gate.passed(0)
    waiting = asyncio.create_task(gate.passed(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.let_another()
    await waiting
    await Gate(path=gate.path, groups=3).passed(1)
    gate.let_share(0.0)
    await gate.passed(1)
    gate.let_another()
    gate.let_another()
    assert gate.let == 3
