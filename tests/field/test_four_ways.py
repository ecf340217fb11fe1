"""Multi-turn rollouts, pair and colocated × inline and by handle: the same at each rank.

By handle the engines write the files, or the proxy does, or one of each in a pair.

The truth is made with plain lists (``rollouts``), and all ways are compared bitwise.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sideband.batch.types import Layout
from sideband.feed.micro_batch import RankMicroBatch
from sideband.payload.reader import PayloadReader
from sideband.payload.root import PayloadRoot
from tests.field.rollouts import (
    HF_CONFIG,
    Branch,
    HandIn,
    agent,
    check_branch,
    check_routing,
    long_one,
    packed,
)
from tests.integration.way import Way, running_way
from tests.services.inference_proxy.harness import RUN, pair
from tests.services.inference_proxy.sglang_engine import SglangEngine
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.stub_model import MODEL

SEQ_LEN = 48
REWARDS = (1.0, 0.0, 0.5)
ADVANTAGES = {"g-r0": 0.5, "g-r1": -0.5, "g-r2": 0.0, "long": 0.5}  # reward - mean; given
Engines = Callable[[], dict[str, StubEngine]]


def colocated() -> dict[str, StubEngine]:
    """One engine."""
    return {"c0": StubEngine()}


def stock() -> dict[str, StubEngine]:
    """One engine without the plugin: the proxy writes its files."""
    return {"c0": StubEngine(spills=True)}


def stock_pair() -> dict[str, StubEngine]:
    """A pair without the plugin, whose decode engine makes rows of the prompt up."""
    return {
        "p0": StubEngine("prefill", spills=True),
        "d0": StubEngine("decode", spills=True, obeys=False),
    }


def mixed_pair() -> dict[str, StubEngine]:
    """Only prefill has the plugin."""
    return {"p0": StubEngine("prefill"), "d0": StubEngine("decode", spills=True)}


def disobeying_pair() -> dict[str, StubEngine]:
    """A decode engine that sends rows of the prompt too, made up."""
    return {"p0": StubEngine("prefill"), "d0": StubEngine("decode", obeys=False)}


async def play(
    tmp_path: Path,
    engines: dict[str, StubEngine],
    *,
    by_handle: bool,
    cp_size: int,
    layout: Layout,
    hands_in: HandIn = "turns",
) -> tuple[list[list[RankMicroBatch]], dict[str, Branch], dict[str, Any]]:
    """All ranks' micro batches of one run, what is expected of each sample, and what was seen."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(HF_CONFIG))
    root = tmp_path / "root" if by_handle else None
    expected: dict[str, Branch] = {}
    async with running_way(
        engines,
        root=root,
        model_config=config,
        cp_size=cp_size,
        layout=layout,
        seq_len=SEQ_LEN,
        step_rollouts=len(REWARDS) + 1,
        deterministic=True,
    ) as way:
        for index, reward in enumerate(REWARDS):
            branches = await agent(
                way, index, group="g", size=len(REWARDS), reward=reward, hands_in=hands_in
            )
            _expect(expected, f"g-r{index}", branches)
        long = await long_one(way, seq_len=SEQ_LEN, hands_in=hands_in)
        _expect(expected, "long", long)
        seen = {"rows_on_disk": _rows_on_disk(root)}
        await _drain(way)
        return await way.train(), expected, seen


def _expect(expected: dict[str, Branch], rollout: str, branches: list[Branch]) -> None:
    expected.update({f"{rollout}.b{n}": branch for n, branch in enumerate(branches)})


async def _drain(way: Way) -> None:
    reply = await way.orchestrator.post("/v1/admin/drain")
    assert reply.status_code < 300, reply.text


def _rows_on_disk(root: Path | None) -> int:
    if root is None:
        return 0
    opened = PayloadRoot.open(root, run_id=RUN)
    reader = PayloadReader(opened, model=MODEL)
    files = [stored.file for k in opened.versions() for stored in opened.files(k)]
    sections = [section for file in files for section in reader.header(file).sections]
    reader.close()
    return sum(s.rows for s in sections if s.field == "routed_experts")


def check_all(batches: list[list[RankMicroBatch]], expected: dict[str, Branch]) -> None:
    """Every sample is at the ranks once, and as it must be."""
    found = []
    for row in packed(batches):
        bounds = row["cu_seqlens"].tolist()
        for place, sample in enumerate(row["sample_ids"].tolist()):
            if sample:
                check_branch(row, bounds[place], bounds[place + 1], expected[sample])
                advantage = ADVANTAGES[sample.split(".")[0]]
                at = slice(bounds[place], bounds[place + 1])
                trained = row["loss_mask"][at]
                assert row["advantages"][at].tolist() == [advantage * bool(t) for t in trained]
                is_cut = sample == "long.b0"
                check_routing(row, bounds[place], expected[sample], is_cut=is_cut)
                found.append(sample)
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(
    ("cp_size", "layout"), [(1, "contiguous"), (2, "contiguous"), (2, "zigzag")]
)
async def test_four_ways_give_each_rank_the_same_bits_and_the_truth(
    tmp_path: Path, cp_size: int, layout: Layout
) -> None:
    ways: list[tuple[str, Engines, bool]] = [
        ("colocated-inline", colocated, False),
        ("colocated-handle", colocated, True),
        ("pair-inline", pair, False),
        ("pair-handle", disobeying_pair, True),
        ("colocated-spill", stock, True),
        ("pair-spill", stock_pair, True),
        ("pair-mixed", mixed_pair, True),
        ("sglang-inline", lambda: {"c0": SglangEngine()}, False),
        ("sglang-spill", lambda: {"c0": SglangEngine(spills=True)}, True),
    ]
    digests = {}
    for name, engines, by_handle in ways:
        folder = tmp_path / name
        folder.mkdir()
        batches, expected, seen = await play(
            folder, engines(), by_handle=by_handle, cp_size=cp_size, layout=layout
        )
        check_all(batches, expected)
        digests[name] = [[batch.digest() for batch in rank] for rank in batches]
        if not name.startswith("pair-") and seen["rows_on_disk"]:
            # Three times tokens that ran of the main line and of the fork, then the long one.
            new = (19 - 1) + (13 - 1 - 7)
            assert seen["rows_on_disk"] == 3 * new + (SEQ_LEN + 3 - 1), "no row was written twice"
    assert len({str(each) for each in digests.values()}) == 1, digests


@pytest.mark.parametrize("name", ["inline", "handle", "spill", "pair"])
async def test_a_rollout_by_reference_gives_each_rank_the_same_bits(
    tmp_path: Path, name: str
) -> None:
    """The client knows request ids, or a session, and rewards: the proxy has the rest."""
    engines: dict[str, Engines] = {
        "inline": colocated,
        "handle": colocated,
        "spill": stock,
        "pair": disobeying_pair,
    }
    digests = []
    ways: list[HandIn] = ["turns", "requests", "session"]
    for hands_in in ways:
        folder = tmp_path / hands_in
        folder.mkdir()
        batches, expected, _ = await play(
            folder,
            engines[name](),
            by_handle=name != "inline",
            cp_size=2,
            layout="zigzag",
            hands_in=hands_in,
        )
        check_all(batches, expected)
        digests.append([[batch.digest() for batch in rank] for rank in batches])
    assert digests[0] == digests[1] == digests[2]
