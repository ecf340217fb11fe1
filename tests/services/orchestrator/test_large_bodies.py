"""Large rollouts are read by another process, and nothing but the process differs."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kit.readers.held import SMALL_BYTES_MAX
from services.kit.readers.pool import ReaderJob, ReaderLost, ReaderPool
from services.orchestrator import decoding
from services.orchestrator.collecting import Delivery
from services.orchestrator.decoding import JSON, Undecodable, decode_delivered
from services.orchestrator.intake import IntakeRules, read
from services.orchestrator.reader import Reading
from services.orchestrator.reading import LargeRollout, reader_pool
from services.orchestrator.records import Lease
from services.orchestrator.rollout_schemas import RolloutBody
from services.orchestrator.storage.samples import encode_samples
from services.orchestrator.wire import ROLLOUT_CONTENT_TYPE, encode_rollout
from sideband.engines.inline import encode_npy_base64
from sideband.ids import GroupId, LeaseId, RolloutId
from tests.services.orchestrator.support import (
    MODEL,
    RUN,
    Bench,
    assert_problem,
    orchestrator,
    plain_turn,
)
from tests.services.orchestrator.test_bad_bodies import GOOD, JSON_BODIES
from tests.services.orchestrator.test_references import SESSION, KeepingProxy, two_turns

PADDING = b" " * SMALL_BYTES_MAX  # allowed around JSON, and makes any body a large one
LEASE = Lease(
    lease_id=LeaseId("l"),
    rollout_id=RolloutId("r0"),
    group_id=GroupId("g"),
    group_size=1,
    env_name="env",
    session_id=None,
    policy_version=3,
    index=0,
    taken_s=0.0,
    deadline_s=1.0,
)
RULES = IntakeRules(
    run_id=RUN,
    model=MODEL,
    has_root=True,
    seq_len=12,
    keep_rows_around_holes=False,
    strict_masks=False,
)


class HereJob(ReaderJob):
    """A reader without the process: the same bytes go to and fro."""

    def __init__(self) -> None:
        self._reading, self.is_done = Reading(), False

    async def ask(self, head: bytes, body: deque[bytes] | None = None) -> tuple[bytes, memoryview]:
        """As a reader answers."""
        answer, data = self._reading.ask(head, bytearray(b"".join(body or ())))
        return answer, memoryview(data)

    def done(self) -> None:
        """As for a reader."""
        self.is_done = True


@st.composite
def turns(draw: st.DrawFn) -> dict[str, Any]:
    prompt = draw(st.lists(st.integers(0, MODEL.vocab_size), min_size=1, max_size=6))
    completion = draw(st.lists(st.integers(0, MODEL.vocab_size - 1), max_size=6))
    turn = plain_turn(draw(st.sampled_from(["r0.t0", "r0.t1"])), prompt, completion)
    if draw(st.booleans()):
        rows = len(prompt) + len(completion) - 1
        ids = np.arange(rows * 6, dtype=np.uint8).reshape(rows, 3, 2) % MODEL.id_space
        turn["routed_experts"] = encode_npy_base64(ids)
    if draw(st.booleans()):
        turn["sampling_mask"] = [sorted({token, 7}) for token in completion]
        if draw(st.booleans()):
            turn["sampling_mask_logprobs"] = [[-0.5] * len(set_) for set_ in turn["sampling_mask"]]
    if draw(st.booleans()):
        turn["weight_versions"] = [3] * len(completion)
    if draw(st.booleans()):
        turn["sampled"] = draw(
            st.lists(st.booleans(), min_size=len(completion), max_size=len(completion))
        )
    if draw(st.integers(0, 4)) == 0:  # one member is wrong
        name = draw(st.sampled_from(sorted(turn)))
        turn[name] = draw(st.sampled_from([None, -1, "x", [2**40], [[]], {}]))
    return turn


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    rollout: dict[str, Any] = {
        "rollout_id": "r0",
        "status": draw(st.sampled_from(["completed", "completed", "failed", "done"])),
        "reward": draw(st.sampled_from([1.0, -0.0, 1e31, None])),
        "turns": draw(st.lists(turns(), max_size=3)),
    }
    if draw(st.integers(0, 9)) == 0:
        rollout["session_id"] = "s"
    content = json.dumps(rollout).encode()
    if draw(st.booleans()):
        return JSON, content
    try:
        wire = RolloutBody.model_validate(rollout).to_wire()
    except ValueError:
        return ROLLOUT_CONTENT_TYPE, content  # no MessagePack of such a rollout
    cut = draw(st.sampled_from([None, None, None, -1]))
    return ROLLOUT_CONTENT_TYPE, msgspec.msgpack.encode(wire)[:cut]


def facts(delivery: Delivery) -> dict[str, Any]:
    """All of it, samples bit by bit."""
    names = (name for name in Delivery.__slots__ if name != "samples")
    return {
        **{name: getattr(delivery, name) for name in names},
        "samples": encode_samples(delivery.samples),
        "dtypes": [
            (sample.token_ids_T.dtype, sample.loss_mask_T.dtype, sample.logprobs_T.dtype)
            for sample in delivery.samples
        ],
    }


def seen_here(content_type: str, body: bytes, lease: Lease | None, digest: str | None) -> object:
    try:
        wire = decode_delivered(content_type, body)
    except Undecodable as exc:
        return exc.detail, exc.faults
    delivery = read(wire.with_turns(wire.turns), lease, RULES, digest)
    return wire.ways, wire.session_id, facts(delivery)


async def seen_there(
    content_type: str, body: bytes, lease: Lease | None, digest: str | None
) -> object:
    job = HereJob()
    try:
        large = await LargeRollout.opened(job, content_type, deque([body[:7], body[7:]]))
    except Undecodable as exc:
        return exc.detail, exc.faults
    assert large.wire.turns == []
    delivery = await large.read(lease, RULES, digest)
    assert job.is_done
    return large.ways, large.wire.session_id, facts(delivery)


@given(bodies(), st.sampled_from([LEASE, None]), st.sampled_from([None, "digest"]))
def test_a_reader_gives_the_same_delivery_or_the_same_refusal(
    body: tuple[str, bytes], lease: Lease | None, digest: str | None
) -> None:
    assert asyncio.run(seen_there(*body, lease, digest)) == seen_here(*body, lease, digest)


@pytest.mark.parametrize("name", JSON_BODIES)
def test_a_reader_refuses_with_the_same_faults(name: str) -> None:
    body = (JSON, JSON_BODIES[name])
    assert asyncio.run(seen_there(*body, None, None)) == seen_here(*body, None, None)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with orchestrator(tmp_path, by_handle=False, with_feed=False, step_rollouts=9) as bench:
        await bench.lease("r0")
        yield bench


@pytest.fixture
def nothing_is_decoded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(content_type: str, body: bytes) -> None:
        raise AssertionError("this process decodes a large body")

    monkeypatch.setattr("services.orchestrator.endpoints.rollouts.decode_delivered", decode)
    monkeypatch.setattr("services.orchestrator.references.decode_turns", decode)
    monkeypatch.setattr(decoding, "decode_delivered", decode)


async def post(bench: Bench, body: bytes, content_type: str = JSON) -> Any:
    return await bench.http.post(
        "/v1/rollouts", content=body, headers={"content-type": content_type}
    )


async def test_a_large_body_is_the_rollout_that_the_small_one_is(bench: Bench) -> None:
    small = json.dumps(GOOD).encode()
    first, again = await post(bench, PADDING + small), await post(bench, small)
    assert (first.status_code, again.status_code) == (202, 202), first.text
    assert first.json() == again.json()  # another body of the same rollout would be a conflict
    assert len(bench.service.book.held) == 1


@pytest.mark.usefixtures("nothing_is_decoded_here")
@pytest.mark.parametrize("is_binary", [False, True])
async def test_this_process_decodes_no_large_body(bench: Bench, is_binary: bool) -> None:
    tokens = [1] * (SMALL_BYTES_MAX // 2)
    rollout = {**GOOD, "turns": [plain_turn("r0.t0", tokens, [3])]}
    wire = RolloutBody.model_validate(rollout).to_wire()
    body = json.dumps(rollout).encode()
    if is_binary:
        body = encode_rollout(wire.with_turns(wire.turns))
    assert len(body) > SMALL_BYTES_MAX
    answer = await post(bench, body, ROLLOUT_CONTENT_TYPE if is_binary else JSON)
    assert answer.status_code == 202, answer.text


async def test_a_large_body_is_refused_in_the_words_for_a_small_one(bench: Bench) -> None:
    for name, body in JSON_BODIES.items():
        if name == "empty":
            continue  # with the padding it is not
        small, large = [(await post(bench, pad + body)).json() for pad in (b"", PADDING)]
        assert (small["status"], large["status"]) == (422, 422), name
        for found in (small, large):  # the parser names the place of a character
            found["detail"] = found["detail"].partition(": line ")[0]
            for fault in found.get("faults", []):
                fault["rule"] = fault["rule"].partition(": line ")[0]
        assert large == small, name


async def test_more_than_one_way_of_saying_its_turns_is_refused(bench: Bench) -> None:
    body = PADDING + json.dumps({**GOOD, **SESSION}).encode()
    found = assert_problem(await post(bench, body), 422, "invalid_request")
    assert found["detail"] == "body: has more than one of turns, turn_refs and session_id"


@pytest.mark.usefixtures("nothing_is_decoded_here")
async def test_large_turns_of_the_proxy_are_read_elsewhere_too(tmp_path: Path) -> None:
    proxy = KeepingProxy()
    proxy.keep([*two_turns(), plain_turn("r.t2", [1] * (SMALL_BYTES_MAX // 2), [2])])
    async with orchestrator(tmp_path, proxy=proxy, with_feed=False, step_rollouts=9) as bench:
        await bench.lease("r")
        body = {"rollout_id": "r", "status": "completed", "reward": 1.0, **SESSION}
        answer = await post(bench, PADDING + json.dumps(body).encode())
        assert answer.status_code == 202, answer.text
        assert len(proxy.fetched) == 1
        await bench.until(lambda: len(proxy.released) == 1, "the turns are released")


async def test_a_lost_reader_is_said_and_the_client_may_try_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: object) -> None:
        raise ReaderLost("it died")

    body = PADDING + json.dumps(GOOD).encode()
    with monkeypatch.context() as patch:
        patch.setattr(ReaderJob, "ask", lost)
        answer = await post(bench, body)
    assert_problem(answer, 503, "reader_lost")
    assert answer.headers["retry-after"] == "1"
    assert (await post(bench, body)).status_code == 202


async def test_too_many_large_bodies_are_refused_while_they_come(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool: ReaderPool = bench.service.readers
    pool.hold(pool.limits.bytes_max - SMALL_BYTES_MAX)
    body = PADDING + json.dumps(GOOD).encode()
    assert_problem(await post(bench, body), 503, "readers_busy")
    assert (await post(bench, json.dumps(GOOD).encode())).status_code == 202
    pool.let_go(pool.limits.bytes_max - SMALL_BYTES_MAX)
    assert (await post(bench, body)).status_code == 202


def test_a_pool_holds_the_largest_body_that_is_taken() -> None:
    assert reader_pool(8 << 30).limits.bytes_max == 8 << 30
