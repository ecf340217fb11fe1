"""Samples lie in the ledger in parts: no call of a driver handles much at a time."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alembic import command
from alembic.config import Config
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine, event, func, select, text

from services.orchestrator.ledger import LedgerFailed
from services.orchestrator.records import Change, DropReason, Rollout, RolloutState
from services.orchestrator.storage import ledger as ledger_module
from services.orchestrator.storage import parts, samples, tables
from services.orchestrator.storage.ledger import (
    PIECE_BYTES_MIN,
    SqlLedger,
    body_rows,
    piece_of,
)
from services.orchestrator.storage.migrate import MIGRATIONS
from services.orchestrator.storage.opening import LedgerPlace, open_ledger
from services.orchestrator.storage.parts import PART_BYTES, BodiesRead, encoded_parts
from services.orchestrator.storage.rows import Row
from services.orchestrator.storage.samples import (
    UnreadableSamples,
    encode_samples,
    encoded_pieces,
)
from sideband import packed
from sideband.batch.types import Sample
from sideband.ids import GroupId, RolloutId
from sideband.packed import JOINED_BYTES_MAX
from sideband.segments import InlineSegment
from sideband.testing.batches import make_sample
from tests import postgres
from tests.services.orchestrator.dump import sample_facts

LARGE = (make_sample(1, tokens=500_000), make_sample(2, tokens=70_000, with_weight_versions=True))
SMALL = (make_sample(3, tokens=9, form="handle"), make_sample(4, tokens=9))
NAME = RolloutId("large")


def large_calls(ledger: SqlLedger) -> list[int]:
    """Fills with the bytes of samples that each statement carries from now on."""
    sizes: list[int] = []

    def seen(*call: Any) -> None:
        rows = call[3] if call[5] else [call[3]]
        carried = (value for row in rows for value in row if isinstance(value, (bytes, memoryview)))
        sizes.append(sum(map(len, carried)))

    event.listen(ledger._engine.sync_engine, "before_cursor_execute", seen)
    return sizes


@pytest.fixture(params=["sqlite", "postgresql"])
async def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SqlLedger]:
    def place(url: str) -> LedgerPlace:
        return LedgerPlace(url=url, run_id="run", name="one", lease_s=60.0)

    if request.param == "sqlite":
        opened = await open_ledger(place(f"sqlite:///{tmp_path}/ledger.sqlite3"))
        assert isinstance(opened, SqlLedger)
        yield opened
        await opened.close()
        return
    with postgres.server() as url:
        opened = await open_ledger(place(url))
        assert isinstance(opened, SqlLedger)
        yield opened
        await opened.close()


async def test_no_call_of_a_driver_carries_a_large_rollout(ledger: SqlLedger) -> None:
    sizes = large_calls(ledger)
    names = [RolloutId(f"r{number}") for number in range(50)]
    bodies = {NAME: LARGE, **dict.fromkeys(names, SMALL)}
    await ledger.commit([Change(bodies=dict(bodies))])
    assert sum(sizes) == sum(len(encode_samples(body)) for body in bodies.values())
    assert max(sizes) < PIECE_BYTES_MIN + PART_BYTES

    found = await ledger.samples([NAME, *names])
    assert {name: [sample_facts(s) for s in one] for name, one in found.items()} == {
        name: [sample_facts(s) for s in one] for name, one in bodies.items()
    }
    async with ledger._connection.begin():
        longest = await ledger._connection.scalar(
            select(func.max(func.length(tables.BODIES.c.samples)))
        )
    assert longest == PART_BYTES


async def test_all_parts_of_a_dropped_rollout_go(ledger: SqlLedger) -> None:
    await ledger.commit([Change(bodies={NAME: LARGE, RolloutId("other"): SMALL})])
    gone = Rollout(
        rollout_id=NAME,
        group_id=GroupId("g"),
        policy_version=0,
        index=0,
        digest="",
        state=RolloutState.DROPPED,
        reason=DropReason.STALE,
    )
    await ledger.commit([Change(rollouts=[gone])])
    assert list(await ledger.samples([NAME, RolloutId("other")])) == ["other"]
    async with ledger._connection.begin():
        assert await ledger._connection.scalar(select(func.count()).select_from(tables.BODIES)) == 1


async def test_samples_that_an_earlier_version_wrote_are_read_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite3"
    with create_engine(f"sqlite:///{file}").begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        config.attributes["connection"] = connection
        command.upgrade(config, "0006")
        connection.execute(
            text("INSERT INTO bodies (run_id, rollout_id, samples) VALUES ('run', 'large', :body)"),
            {"body": encode_samples(LARGE)},
        )
    ledger = await open_ledger(
        LedgerPlace(url=f"sqlite:///{file}", run_id="run", name="one", lease_s=60.0)
    )
    found = await ledger.samples([NAME])
    assert [sample_facts(one) for one in found[NAME]] == [sample_facts(one) for one in LARGE]
    await ledger.close()


def sample_of(tokens: int, serial: int) -> Sample:
    sample = make_sample(serial, tokens=tokens, with_weight_versions=serial % 2 == 0)
    return sample if serial % 3 else replace(sample, weight_versions=None)


@given(st.lists(st.tuples(st.integers(1, 120_000), st.integers(1, 9)), max_size=4))
def test_the_parts_are_cut_from_what_is_encoded_at_once(sizes: list[tuple[int, int]]) -> None:
    body = tuple(sample_of(tokens, serial) for tokens, serial in sizes)
    whole = encode_samples(body)
    assert b"".join(encoded_pieces(body)) == whole
    count, pieces = encoded_parts(body)
    cut = list(pieces)
    assert b"".join(cut) == whole
    assert [len(part) for part in cut[:-1]] == [PART_BYTES] * (count - 1)
    assert 0 < len(cut[-1]) <= PART_BYTES


def samples_of_any_form() -> st.SearchStrategy[Sample]:
    return st.builds(
        make_sample,
        st.integers(0, 9),
        tokens=st.integers(1, 300),
        form=st.sampled_from(["inline", "handle", None]),
        with_scores=st.booleans(),
        with_weight_versions=st.booleans(),
        breaks=st.sampled_from([(), (7,)]),
        gaps=st.sampled_from([(), ((3, 5),)]),
    )


@given(
    st.lists(st.lists(samples_of_any_form(), min_size=1, max_size=3), max_size=4),
    st.integers(1, 5000),
    st.integers(0, 900),
    st.integers(1, 9),
)
def test_what_is_read_from_parts_of_any_size_is_what_was_delivered(
    rollouts: list[list[Sample]], part_bytes: int, joined_bytes_max: int, rows_per_read: int
) -> None:
    bodies = {RolloutId(f"r{number}"): tuple(one) for number, one in enumerate(rollouts)}
    read = BodiesRead()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART_BYTES", part_bytes)
        patch.setattr(packed, "JOINED_BYTES_MAX", joined_bytes_max)
        patch.setattr(samples, "JOINED_BYTES_MAX", joined_bytes_max)
        rows = [
            (row["rollout_id"], row["part"], row["parts"], row["samples"])
            for row in body_rows(bodies)
        ]
        for at in range(0, len(rows), rows_per_read):
            read.take(rows[at : at + rows_per_read])
        found = read.samples()
    assert {name: [sample_facts(one) for one in body] for name, body in found.items()} == {
        name: [sample_facts(one) for one in body] for name, body in bodies.items()
    }


async def test_of_a_rollout_all_parts_are_kept_or_none(
    ledger: SqlLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that ends between two parts, as when its process does."""
    pieces = 0

    def ending(rows: Iterator[Row]) -> list[Row]:
        nonlocal pieces
        pieces += 1
        if pieces == 2:
            raise OSError("ends here")
        return piece_of(rows)

    change = Change(bodies={NAME: LARGE, RolloutId("other"): SMALL})
    with monkeypatch.context() as patch:
        patch.setattr(ledger_module, "piece_of", ending)
        with pytest.raises(LedgerFailed):
            await ledger.commit([change])
    assert pieces == 2
    assert await ledger.samples([NAME, RolloutId("other")]) == {}
    await ledger.commit([change])
    found = await ledger.samples([NAME])
    assert [sample_facts(one) for one in found[NAME]] == [sample_facts(one) for one in LARGE]
    await ledger.wipe()
    assert await ledger.samples([NAME, RolloutId("other")]) == {}


def test_what_is_encoded_apart_is_no_copy_and_all_else_is_small() -> None:
    pieces = list(encoded_pieces(LARGE))
    views = [piece for piece in pieces if isinstance(piece, memoryview)]
    copies = [piece for piece in pieces if isinstance(piece, bytes)]
    segments = [segment for sample in LARGE for segment in sample.segments]
    inline = [segment.data for segment in segments if isinstance(segment, InlineSegment)]
    routing = [data for data in inline if isinstance(data, np.ndarray)]
    shared = [any(np.shares_memory(np.asarray(view), data) for view in views) for data in routing]
    assert shared == [data.nbytes > JOINED_BYTES_MAX for data in routing]
    assert any(shared)
    assert all(len(piece) <= 2 * JOINED_BYTES_MAX for piece in copies)


@pytest.mark.parametrize(
    "rows",
    [
        [("r", 0, 2, b"a")],  # the last part is missing
        [("r", 1, 2, b"a")],
        [("r", 0, 2, b"a"), ("r", 0, 2, b"a")],
        [("r", 0, 2, b"a"), ("r", 1, 3, b"a")],
        [("r", 0, 2, b"a" * (PART_BYTES + 1))],
        [("r", 0, 1, b"no samples")],
    ],
)
def test_parts_that_make_no_rollout_are_refused(rows: list[tuple[str, int, int, bytes]]) -> None:
    read = BodiesRead()
    with pytest.raises(UnreadableSamples):  # noqa: PT012  either call may be the one
        read.take(rows)
        read.samples()
