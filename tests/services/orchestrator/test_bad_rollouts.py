"""Rollouts whose content breaks a rule: a named refusal, the lease ends, the files go at once."""

import asyncio
import base64
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from services.orchestrator.wire import ROLLOUT_CONTENT_TYPE
from tests.services.orchestrator.support import (
    MODEL,
    Bench,
    assert_problem,
    files_of,
    inline_turn,
    orchestrator,
    plain_turn,
)

Turn = dict[str, Any]
PROMPT, COMPLETION = [1, 2, 3], [4, 5, 6]


def changed(segment: int = 0, **values: Any) -> Callable[[Turn], None]:
    """Change members of one segment; by the writer 0 is routing [0, 5), 1 masks [3, 6)."""

    def change(turn: Turn) -> None:
        turn["payload_segments"][segment].update(values)

    return change


def with_turn(**values: Any) -> Callable[[Turn], None]:
    return lambda turn: turn.update(values)


def renamed(replace: Callable[[str], str]) -> Callable[[Turn], None]:
    def change(turn: Turn) -> None:
        for segment in turn["payload_segments"]:
            segment["file"] = replace(segment["file"])

    return change


def repeated(turn: Turn) -> None:
    turn["payload_segments"].append(dict(turn["payload_segments"][0]))


REFUSED: dict[str, tuple[str, Callable[[Turn], None]]] = {
    "a negative position": ("invalid_segment", changed(pos=-1)),
    "a negative row": ("invalid_segment", changed(row=-1)),
    "a negative offset": ("invalid_segment", changed(offset=-8)),
    "no rows": ("invalid_segment", changed(rows=0)),
    "rows beyond the tokens": ("invalid_segment", changed(rows=6)),
    "a row of the last sampled token": ("invalid_segment", changed(pos=1)),
    "masks in the prompt": ("invalid_segment", changed(1, pos=2)),
    "routing of another dtype": ("invalid_segment", changed(dtype="uint16")),
    "masks of another dtype": ("invalid_segment", changed(1, dtype="uint8")),
    "routing of another shape": ("invalid_segment", changed(shape=[3, 2])),
    "masks of another vocabulary": ("invalid_segment", changed(1, shape=[999])),
    "a path that climbs": ("invalid_segment", renamed(lambda f: f.replace("run-1", ".."))),
    "an absolute path": ("invalid_segment", renamed(lambda f: "/" + f)),
    "a path with a null": ("invalid_segment", renamed(lambda f: f[:-5] + "\0.sbp")),
    "another run": ("invalid_segment", renamed(lambda f: f.replace("run-1", "run-2"))),
    "another version": ("invalid_segment", renamed(lambda f: "v1" + f[2:])),
    "another folder": ("invalid_segment", renamed(lambda f: f[:9] + "zz" + f[11:])),
    "not its own folder": (
        "invalid_segment",
        renamed(lambda f: f.replace(f.split("/")[2], f"{int(f.split('/')[2], 16) ^ 1:02x}")),
    ),
    "the same rows twice": ("overlapping_segments", repeated),
    "another section": ("segment_not_in_file", changed(offset=1 << 20)),
    "rows of other positions": ("segment_not_in_file", changed(row=1, rows=4)),
    "rows beyond the section": ("segment_not_in_file", changed(row=2, pos=0)),
    "routing in the place of masks": ("segment_not_in_file", changed(1, row=1, rows=3)),
    "rows inline as well": (
        "invalid_segment",
        with_turn(sampling_mask=[[4], [5], [6]]),
    ),
    "another model": (
        "model_mismatch",
        with_turn(
            payload_model={**msgspec.to_builtins(MODEL), "id_space": 17},
        ),
    ),
    "too few logprobs": ("malformed_turn", with_turn(logprobs=[-1.0])),
    "an infinite logprob": ("malformed_turn", with_turn(logprobs=[-1.0, -1e300, -1.0])),
    "too many flags": ("malformed_turn", with_turn(sampled=[True] * 4)),
    "too few versions": ("malformed_turn", with_turn(weight_versions=[1])),
    "too few advantages": ("malformed_turn", with_turn(advantages=[1.0])),
    "a token beyond the vocabulary": ("malformed_turn", with_turn(prompt_token_ids=[1, 2, 1000])),
    "a negative token": ("malformed_turn", with_turn(completion_token_ids=[4, 5, -6])),
    "an empty prompt": ("malformed_turn", with_turn(prompt_token_ids=[])),
    "a negative temperature": ("malformed_turn", with_turn(temperature=-1.0)),
    "top-p of zero": ("malformed_turn", with_turn(top_p=0.0)),
    "top-k below -1": ("malformed_turn", with_turn(top_k=-2)),
}


@pytest.mark.parametrize(("code", "change"), REFUSED.values(), ids=REFUSED.keys())
async def test_a_turn_that_breaks_a_rule_is_refused_and_its_file_deleted(
    tmp_path: Path, code: str, change: Callable[[Turn], None]
) -> None:
    async with orchestrator(tmp_path) as bench:
        lease = await bench.lease("r0")
        turn = await bench.write("r0.t0", PROMPT, COMPLETION)
        other = await bench.write("r0.t1", [1, 2, 3, 4, 5, 6, 7], [8])
        change(turn)
        answer = await bench.deliver("r0", turn, other)
        problem = assert_problem(answer, 422, code)
        assert problem["rollout_id"] == "r0"
        await bench.until(
            lambda: not files_of(other) & bench.on_disk(), "the files that it names are deleted"
        )
        again = await bench.deliver("r0", turn, other)
        assert_problem(again, 422, code)
        ended = (await bench.http.get(f"/v1/leases/{lease['lease_id']}")).json()
        assert ended["state"] == "delivered"
        assert await bench.metric(f'orchestrator_rollouts_refused_total{{code="{code}"}}') == 1
        assert bench.feed.taken == []


async def refuse(bench: Bench, code: str, *turns: Turn, **more: Any) -> dict[str, Any]:
    await bench.lease("r0")
    return assert_problem(await bench.deliver("r0", *turns, **more), 422, code)


async def test_mixed_forms_are_refused_and_the_file_deleted(tmp_path: Path) -> None:
    async with orchestrator(tmp_path) as bench:
        turn = await bench.write("r0.t0", PROMPT, COMPLETION)
        await refuse(
            bench, "mixed_forms", turn, inline_turn("r0.t1", [*PROMPT, *COMPLETION, 7], [8])
        )
        await bench.until(lambda: not bench.on_disk(), "the file is deleted")


INLINE: dict[str, dict[str, Any]] = {
    "not base64": {"routed_experts": "***"},
    "not npy": {"routed_experts": base64.b64encode(b"npy" * 40).decode()},
    "other tokens": {"prompt_token_ids": [1, 2, 3, 4, 5]},
    "unsorted mask": {"sampling_mask": [[5, 4], [5, 6], [6, 7]]},
    "mask without the sampled token": {"sampling_mask": [[5], [5, 6], [6, 7]]},
    "mask of too few tokens": {"sampling_mask": [[4]]},
    "mask beyond the vocabulary": {"sampling_mask": [[4], [5], [6, 5000]]},
    "other layers": {"routed_layer_ids": [0, 1]},
    "logprobs of too few kept sets": {"sampling_mask_logprobs": [[-1.0]]},
    "logprobs of too few kept ids": {"sampling_mask_logprobs": [[], [], []]},
    "logprobs without kept sets": {"sampling_mask": None, "sampling_mask_logprobs": [[-1.0]] * 3},
}


@pytest.mark.parametrize("change", INLINE.values(), ids=INLINE.keys())
async def test_inline_rows_that_do_not_fit_are_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    async with orchestrator(tmp_path, by_handle=False) as bench:
        await refuse(
            bench, "invalid_inline", {**inline_turn("r0.t0", PROMPT, COMPLETION), **change}
        )


async def test_logprobs_where_no_kept_set_is_are_refused(tmp_path: Path) -> None:
    async with orchestrator(tmp_path) as bench:
        turn = await bench.write("r0.t0", PROMPT, COMPLETION)
        (masks,) = (s for s in turn["payload_segments"] if s["field"] == "sampling_mask")
        turn["payload_segments"].append(
            {**masks, "field": "sampling_mask_logprobs", "dtype": "float32"}
        )
        turn["payload_segments"].remove(masks)
        answer = await refuse(bench, "malformed_turn", turn)
        assert "must lie where sampling_mask has rows" in answer["detail"]


async def test_rows_without_a_model_or_a_root_are_refused(tmp_path: Path) -> None:
    async with orchestrator(tmp_path / "", by_handle=False, model_config_path=None) as bench:
        await refuse(bench, "no_model", inline_turn("r0.t0", PROMPT, COMPLETION))
    async with orchestrator(tmp_path) as bench:
        turn = await bench.write("r0.t0", PROMPT, COMPLETION)
    async with orchestrator(tmp_path, by_handle=False) as bench:
        await refuse(bench, "invalid_segment", turn)


@pytest.mark.parametrize(
    ("more", "turn"),
    [
        ({"reward": None}, {}),
        ({"reward": 1e300}, {}),
        ({"advantage": -1e300}, {}),
    ],
)
async def test_a_completed_rollout_needs_one_finite_source_of_its_advantage(
    tmp_path: Path, more: dict[str, Any], turn: Turn
) -> None:
    async with orchestrator(tmp_path, by_handle=False) as bench:
        await refuse(bench, "missing_advantage", plain_turn("r0.t0", [1], [2], **turn), **more)


async def test_advantages_per_token_of_some_turns_only_are_refused(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, by_handle=False) as bench:
        await refuse(
            bench,
            "missing_advantage",
            plain_turn("r0.t0", [1], [2], advantages=[1.0]),
            plain_turn("r0.t1", [1, 2, 3], [4]),
        )


async def test_a_completed_rollout_without_turns_is_refused(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, by_handle=False) as bench:
        await refuse(bench, "malformed_turn")


async def test_a_missing_mask_is_counted_and_refused_by_the_strict_setting(tmp_path: Path) -> None:
    turn = plain_turn("r0.t0", [1, 2], [3, 4], top_p=0.9)
    async with orchestrator(tmp_path, by_handle=False) as bench:
        with capture_logs() as logs:
            for number in range(2):
                name = f"r{number}"
                await bench.lease(name)
                assert (await bench.deliver(name, turn)).json()["accepted"] is True
        assert await bench.metric("orchestrator_masks_missing_total") == 4
        (warning,) = [entry for entry in logs if entry["event"] == "sampling_masks_missing"]
        assert (warning["rollout_id"], warning["tokens"]) == ("r0", 2), "the first is warned of"
        assert warning["log_level"] == "warning"
    async with orchestrator(tmp_path, by_handle=False, strict_masks=True) as bench:
        problem = await refuse(bench, "missing_mask", turn)
        assert "r0.t0" in problem["detail"]
        await bench.lease("greedy")
        answer = await bench.deliver("greedy", plain_turn("r1.t0", [1, 2], [3, 4], top_k=-1))
        assert answer.json()["accepted"] is True


@pytest.mark.parametrize("by_handle", [False, True], ids=["inline", "handle"])
async def test_an_empty_kept_set_is_a_missing_mask_in_both_forms(
    tmp_path: Path, by_handle: bool
) -> None:
    """P62: by handle the orchestrator sees no row, only that there is none."""

    async def turn(bench: Bench) -> Turn:
        if by_handle:
            return await bench.write("r0.t0", PROMPT, COMPLETION, top_p=0.9, empty_masks=(1,))
        return inline_turn("r0.t0", PROMPT, COMPLETION, top_p=0.9, empty_masks=(1,))

    async with orchestrator(tmp_path, by_handle=by_handle, strict_masks=True) as bench:
        problem = await refuse(bench, "missing_mask", await turn(bench))
        assert "r0.t0" in problem["detail"]
        if by_handle:
            await bench.until(lambda: not bench.on_disk(), "the file is deleted")
    async with orchestrator(
        tmp_path, by_handle=by_handle, start="fresh", start_id="2", mask_valid_fraction_min=0.5
    ) as bench:
        await bench.lease("r1")
        assert (await bench.deliver("r1", await turn(bench))).json()["accepted"] is True
        assert await bench.metric("orchestrator_masks_missing_total") == 1
        await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
        view = (await bench.http.get("/v1/steps/1")).json()
        assert view["mask_valid_fraction"] == 2 / 3


Damage = Callable[[Path], None]


def torn(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)


def linked(path: Path) -> None:
    elsewhere = path.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def foreign(path: Path) -> None:
    path.write_bytes(b"something else entirely" * 100)


@pytest.mark.parametrize("damage", [torn, flipped, linked, foreign])
async def test_a_file_that_cannot_be_read_right_is_refused_at_intake(
    tmp_path: Path, damage: Damage
) -> None:
    async with orchestrator(tmp_path) as bench:
        assert bench.root is not None
        turn = await bench.write("r0.t0", PROMPT, COMPLETION)
        [file] = files_of(turn)
        await asyncio.to_thread(damage, bench.root.path / file)
        await refuse(bench, "segment_not_in_file", turn)


async def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    other = msgspec.structs.replace(MODEL, num_layers=4)
    async with orchestrator(tmp_path) as bench:
        turn = await bench.write("r0.t0", PROMPT, COMPLETION, model=other)
        await refuse(bench, "model_mismatch", turn)


async def test_a_file_that_is_not_there_drops_the_rollout(tmp_path: Path) -> None:
    async with orchestrator(tmp_path) as bench:
        assert bench.root is not None
        await bench.lease("r0")
        turn = await bench.write("r0.t0", PROMPT, COMPLETION)
        await asyncio.to_thread(bench.root.delete, next(iter(files_of(turn))))
        receipt = (await bench.deliver("r0", turn)).json()
    assert receipt["accepted"] is False
    assert receipt["dropped"] == {"files_gone": 1}


async def test_a_rollout_without_a_lease_is_refused_and_its_file_deleted(tmp_path: Path) -> None:
    async with orchestrator(tmp_path) as bench:
        turn = await bench.write("r0.t0", PROMPT, COMPLETION)
        assert_problem(await bench.deliver("r0", turn), 404, "lease_unknown")
        await bench.until(lambda: not bench.on_disk(), "the file is deleted")


async def test_both_forms_of_a_body_are_one_rollout(tmp_path: Path) -> None:
    turn = {
        "request_id": "r0.t0",
        "prompt_token_ids": b"\1\0\0\0\2\0\0\0",
        "completion_token_ids": b"\3\0\0\0",
        "logprobs": b"\0\0\0\xbf",
    }
    wire = {"rollout_id": "r0", "status": "completed", "reward": 1.0, "turns": [turn]}
    async with orchestrator(tmp_path, by_handle=False) as bench:
        await bench.lease("r0")
        first = await bench.http.post(
            "/v1/rollouts",
            content=msgspec.msgpack.encode(wire),
            headers={"content-type": ROLLOUT_CONTENT_TYPE},
        )
        assert first.status_code == 202, first.text
        await bench.until(lambda: bench.feed.taken == [1], "it is shipped")
        again = await bench.deliver("r0", plain_turn("r0.t0", [1, 2], [3]))
        assert again.status_code == 202
        assert again.json()["samples"] == first.json()["samples"] == 1
        other = await bench.deliver("r0", plain_turn("r0.t0", [1, 2], [4]))
        assert_problem(other, 409, "rollout_conflict")
        [micro_batch] = bench.feed.steps[1].grid[0]
    assert micro_batch.logprobs_L.tolist() == [0.0, 0.0, -0.5]
