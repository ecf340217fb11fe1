"""Ids on the wire: 1 to 128 of ``[A-Za-z0-9._:-]``, neither "." nor ".."; anything else is a 422.

A "." or ".." would be a legal string and a path component with a meaning: a rollout of that name
could be delivered and never be asked for.
"""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.errors import InvalidId
from sideband.ids import ID_PATTERN, check_id
from tests.services.inference_proxy.harness import request_body, running
from tests.services.inference_proxy.stub import StubEngine
from tests.services.orchestrator.support import orchestrator, plain_turn

LEGAL = ["a", "_", ":-", "...", "..a", ".a", "x" * 128, "." + "x" * 127, "." * 128]
ILLEGAL = ["", ".", "..", "x" * 129, "." * 129, "." + "x" * 128, "a b", "a/b", "a\n", "é", "a\0"]


def is_legal(text: str) -> bool:
    """The rule in its own words."""
    return bool(re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", text)) and text not in {".", ".."}


def is_accepted(text: str) -> bool:
    """What the library says."""
    try:
        return check_id("id", text) == text
    except InvalidId:
        return False


@given(st.text("ab._:-/ \n\0é", max_size=5) | st.text(".a", min_size=120, max_size=131))
def test_the_pattern_says_exactly_the_rule(text: str) -> None:
    assert is_accepted(text) == is_legal(text) == bool(re.fullmatch(ID_PATTERN[1:-1], text))


@pytest.mark.parametrize("text", [*LEGAL, *ILLEGAL])
def test_each_example_is_judged_by_the_rule(text: str) -> None:
    assert is_accepted(text) == (text in LEGAL)


async def test_an_illegal_id_is_a_422_wherever_it_stands(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, by_handle=False) as bench:
        for text in ILLEGAL:
            for name in ("rollout_id", "group_id", "session_id"):
                body = {"rollout_id": "r", "group_id": "g", "group_size": 1, name: text}
                answer = await bench.http.post("/v1/leases", json=body)
                assert answer.status_code == 422, (name, text)
            turn = plain_turn(text, [1], [2])
            assert (await bench.deliver("r", turn)).status_code == 422, text
        assert (await bench.http.get("/v1/leases")).json()["count"] == 0


async def test_the_proxy_refuses_the_same_ids() -> None:
    async with running({"c0": StubEngine()}) as proxy:
        for text in ILLEGAL:
            answer = await proxy.generate({**request_body([1, 2]), "request_id": text})
            assert answer.status_code == 422, text
        for text in ("..", "a b", "x" * 129):
            answer = await proxy.generate(request_body([1, 2]), session=text)
            assert answer.status_code == 422, text
        assert not proxy.engines["c0"].requests
