"""From a lease to the deletion of the files, by HTTP, with both forms side by side."""

from pathlib import Path

import numpy as np

from sideband.segments import InlineSegment, PayloadSegment, by_field
from tests.services.orchestrator.support import files_of, inline_turn, orchestrator, plain_turn


async def test_a_rollout_by_handle_is_packed_shipped_trained_and_its_file_deleted(
    tmp_path: Path,
) -> None:
    async with orchestrator(tmp_path) as bench:
        lease = await bench.lease("r0")
        turn = await bench.write("r0.t0", [1, 2, 3], [4, 5])
        answer = await bench.deliver("r0", turn)
        assert answer.status_code == 202, answer.text
        assert answer.json()["accepted"] is True
        await bench.until(lambda: bench.feed.taken == [1], "step 1 is with the feed")
        [micro_batch] = bench.feed.steps[1].grid[0]
        bench.feed.commit(1)
        await bench.until(
            lambda: bench.service.book.steps[1].state == "acknowledged", "the commit is known"
        )
        kept = (
            await bench.http.get("/v1/files", params={"file": next(iter(files_of(turn)))})
        ).json()
        assert kept["files"][0]["kept_by"] == ["step 1"]
        assert bench.on_disk() == files_of(turn)
        bench.proxy.applied = 1
        await bench.until(lambda: not bench.on_disk(), "the file is deleted")
        assert (await bench.http.get("/v1/steps/1")).json()["state"] == "closed"
    assert lease["policy_version"] == 0
    assert micro_batch.token_ids_L.tolist() == [1, 2, 3, 4, 5]
    assert micro_batch.loss_mask_L.tolist() == [False, False, False, True, True]
    assert {s.file for s in micro_batch.segments if isinstance(s, PayloadSegment)} == files_of(turn)


async def test_inline_and_by_handle_live_side_by_side_and_never_in_one_micro_batch(
    tmp_path: Path,
) -> None:
    async with orchestrator(tmp_path, step_rollouts=3) as bench:
        for name in ("r0", "r1", "r2"):
            await bench.lease(name)
        await bench.deliver("r0", await bench.write("r0.t0", [1, 2, 3], [4, 5]))
        await bench.deliver("r1", inline_turn("r1.t0", [1, 2, 3], [6, 7]))
        await bench.deliver("r2", plain_turn("r2.t0", [1, 2, 3], [8, 9]))
        await bench.until(lambda: bench.feed.taken == [1], "the step is shipped")
        step = bench.feed.steps[1]
    forms = {batch.form: batch for batch in step.grid[0]}
    assert set(forms) == {"handle", "inline", None}
    [rows] = by_field(forms["inline"].segments, "routed_experts")
    assert (rows.pos, rows.stop) == (0, 4)
    assert isinstance(rows, InlineSegment)
    assert np.asarray(rows.data).shape == (4, 2, 2)
