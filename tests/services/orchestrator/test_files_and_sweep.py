"""The root at start, the sweep, deletions that fail, and the document of the service."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.app import describe
from sideband.ids import RunId
from sideband.payload.errors import ForeignRoot, MissingMarker, OtherRun, WriteFailed
from sideband.payload.root import PayloadRoot
from tests.services.orchestrator.support import (
    RUN,
    Bench,
    files_of,
    orchestrator,
    plain_turn,
    written_turn,
)


async def test_a_fresh_run_wipes_the_root_and_a_resumed_one_keeps_it(tmp_path: Path) -> None:
    root = PayloadRoot.create(tmp_path / "payloads", RUN, fresh=False)
    turn = written_turn(root, "old", [1, 2], [3])
    async with orchestrator(tmp_path, start="resume") as bench:
        assert bench.on_disk() == files_of(turn)
    async with orchestrator(tmp_path, start="fresh") as bench:
        assert bench.on_disk() == set()


async def test_a_foreign_folder_and_another_runs_root_are_refused(tmp_path: Path) -> None:
    (tmp_path / "payloads").mkdir()
    (tmp_path / "payloads" / "thesis.tex").write_text("years of work")
    for start in ("fresh", "resume"):
        with pytest.raises(ForeignRoot):
            async with orchestrator(tmp_path, start=start):
                pass
    assert (tmp_path / "payloads" / "thesis.tex").exists()
    other = tmp_path / "other"
    PayloadRoot.create(other / "payloads", RunId("run-2"), fresh=False)
    with pytest.raises(OtherRun):
        async with orchestrator(other, start="resume"):
            pass


async def advance(bench: Bench, steps: int) -> None:
    """Train and apply ``steps`` steps of rollouts without rows."""
    for step in range(1, steps + 1):
        await bench.lease(f"s{step}")
        await bench.deliver(f"s{step}", plain_turn(f"s{step}.t0", [1, 2], [3]))
        await bench.until(lambda step=step: step in bench.feed.taken, f"step {step} is shipped")  # type: ignore[misc]  # a default binds the loop's value
        bench.feed.commit(step)
        bench.proxy.applied = step
        await bench.until(
            lambda step=step: bench.service.book.policy_version == step,  # type: ignore[misc]  # as above
            f"v{step} is applied",
        )


async def sweep(bench: Bench, *, dry_run: bool) -> dict[str, Any]:
    answer = await bench.http.post("/v1/admin/sweep", params={"dry_run": dry_run})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_the_sweep_takes_old_orphans_and_spares_live_and_held_versions(
    tmp_path: Path,
) -> None:
    async with orchestrator(tmp_path, max_off_policy_steps=1) as bench:
        assert bench.root is not None
        orphans = {
            version: files_of(await bench.write("orphan", [1, 2], [3], policy_version=version))
            for version in range(6)
        }
        assert (await sweep(bench, dry_run=False))["versions"] == []
        await advance(bench, 4)
        planned = await sweep(bench, dry_run=True)
        assert planned["keep_from"] == 3
        assert [version["policy_version"] for version in planned["versions"]] == [0, 1, 2]
        assert all(version["file_count"] == 1 for version in planned["versions"])
        assert bench.on_disk() == set().union(*orphans.values()), "a dry run deletes nothing"
        swept = await sweep(bench, dry_run=False)
        assert swept["versions"] == planned["versions"]
        assert bench.on_disk() == orphans[3] | orphans[4] | orphans[5]
        assert bench.root.versions() == [3, 4, 5]
        assert (await sweep(bench, dry_run=False))["versions"] == []


async def test_a_live_rollout_holds_back_the_sweep_of_its_version(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, max_off_policy_steps=1) as bench:
        orphan = files_of(await bench.write("orphan", [1, 2], [3]))
        bench.service.book.next_step = 9  # nothing of v0 could train any more
        assert [v["policy_version"] for v in (await sweep(bench, dry_run=True))["versions"]] == [0]
        bench.service.book.next_step = 1
        await bench.lease("r0")
        bench.service.book.next_step = 9
        assert (await sweep(bench, dry_run=False))["versions"] == []
        assert bench.on_disk() == orphan


async def test_a_step_that_a_rank_still_reads_holds_back_the_sweep(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, max_off_policy_steps=0) as bench:
        orphan = files_of(await bench.write("orphan", [1, 2], [3]))
        await bench.lease("r0")
        turn = await bench.write("r0.t0", [1, 2], [3])
        await bench.deliver("r0", turn)
        await bench.until(lambda: bench.feed.taken == [1], "the step is shipped")
        swept = await sweep(bench, dry_run=False)
        [version] = swept["versions"]
        assert (version["is_whole"], version["file_count"], version["kept_count"]) == (False, 1, 1)
        assert bench.on_disk() == files_of(turn)
        assert not orphan & bench.on_disk()


async def test_the_sweep_runs_by_itself_and_finds_staging_leftovers(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, max_off_policy_steps=0, sweep_s=0.01) as bench:
        assert bench.root is not None
        [file] = files_of(await bench.write("orphan", [1, 2], [3]))
        path = bench.root.path / file
        os.rename(path, path.with_name(f".{path.name}.staging"))
        await advance(bench, 1)
        await bench.until(lambda: not bench.on_disk(), "the orphan is swept")
        await bench.until_metric('orchestrator_files_deleted_total{cause="sweep"}', 1)


@pytest.mark.parametrize("call", ["files", "remove_version"])
async def test_a_version_that_cannot_be_listed_or_deleted_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    whole = getattr(PayloadRoot, call)

    def refuse_the_first(root: PayloadRoot, version: int) -> Any:
        if version == 0:
            raise WriteFailed("v0", OSError(13, "Permission denied"))
        return whole(root, version)

    async with orchestrator(tmp_path, max_off_policy_steps=0) as bench:
        orphans = [
            files_of(await bench.write("orphan", [1, 2], [3], policy_version=version))
            for version in range(3)
        ]
        await advance(bench, 3)
        with monkeypatch.context() as patch:
            patch.setattr(PayloadRoot, call, refuse_the_first)
            swept = await sweep(bench, dry_run=False)
        assert [version["policy_version"] for version in swept["versions"]] == [1, 2]
        assert bench.on_disk() == orphans[0]
        await bench.until_metric("orchestrator_delete_failures_total", 1)
        swept = await sweep(bench, dry_run=False)
        assert [version["policy_version"] for version in swept["versions"]] == [0]
        assert bench.on_disk() == set()


async def test_a_deletion_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(116, "stale"), OSError(16, "busy")]
    delete = PayloadRoot.delete

    def flaky(root: PayloadRoot, file: str) -> int:
        if failures:
            raise WriteFailed(file, failures.pop())
        return delete(root, file)

    monkeypatch.setattr(PayloadRoot, "delete", flaky)
    async with orchestrator(tmp_path) as bench:
        await bench.lease("r0")
        await bench.deliver("r0", await bench.write("r0.t0", [1, 2], [3]), status="failed")
        await bench.until(lambda: not bench.on_disk(), "the file is deleted in the end")
        assert not failures


async def test_a_deletion_that_does_not_work_is_counted_and_outlives_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_root: PayloadRoot, file: str) -> int:
        raise WriteFailed(file, OSError(13, "denied"))

    with monkeypatch.context() as patch:
        patch.setattr(PayloadRoot, "delete", broken)
        async with orchestrator(tmp_path) as bench:
            await bench.lease("r0")
            await bench.deliver("r0", await bench.write("r0.t0", [1, 2], [3]), status="failed")
            await bench.until_metric("orchestrator_delete_failures_total", 1)
            assert await bench.metric("orchestrator_deletions_pending") == 1
            assert len(bench.on_disk()) == 1
            assert (await bench.http.get("/healthz")).status_code == 200
    async with orchestrator(tmp_path) as bench:
        await bench.until(lambda: not bench.on_disk(), "the next process deletes it")


async def test_an_ended_run_sweeps_what_nobody_named(tmp_path: Path) -> None:
    async with orchestrator(tmp_path) as bench:
        await bench.write("stray", [1, 2], [3])
        await bench.http.post("/v1/admin/drain")
        await bench.until(lambda: bench.service.book.run.is_terminal, "the run ends")
        await bench.until(lambda: not bench.on_disk(), "young as it is, it will never train")


async def test_a_known_run_is_not_begun_again_on_an_empty_mount_point(tmp_path: Path) -> None:
    ledger_url = f"sqlite:///{tmp_path}/ledger.sqlite3"
    async with orchestrator(tmp_path, ledger_url=ledger_url, step_rollouts=9) as bench:
        await bench.lease("r0")
        turn = await bench.write("r0.t0", [1, 2], [3])
        await bench.deliver("r0", turn)
    (tmp_path / "payloads").rename(tmp_path / "elsewhere")
    (tmp_path / "payloads").mkdir()
    with pytest.raises(MissingMarker):
        async with orchestrator(tmp_path, ledger_url=ledger_url):
            pass
    assert not list((tmp_path / "payloads").iterdir())
    (tmp_path / "payloads").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "payloads")
    async with orchestrator(tmp_path, ledger_url=ledger_url, step_rollouts=9) as bench:
        assert (await bench.http.get("/v1/rollouts/r0")).json()["files"] == list(files_of(turn))


async def test_files_are_listed_with_what_keeps_them(tmp_path: Path) -> None:
    async with orchestrator(tmp_path, step_rollouts=9) as bench:
        lease = await bench.lease("r0")
        first = await bench.write("r0.t0", [1, 2], [3])
        await bench.http.post(
            f"/v1/leases/{lease['lease_id']}/renew", json={"files": list(files_of(first))}
        )
        listed = (await bench.http.get("/v1/files")).json()
        [view] = listed["files"]
        assert view["kept_by"] == [f"lease {lease['lease_id']}"]
        assert view["size_bytes"] > 0
        await bench.deliver("r0", first)
        [view] = (await bench.http.get("/v1/files")).json()["files"]
        assert view["kept_by"] == ["rollout r0"]
        await bench.http.delete("/v1/rollouts/r0")
        await bench.until(lambda: not bench.on_disk(), "it is deleted")
        [file] = files_of(first)
        [view] = (await bench.http.get("/v1/files", params={"file": file})).json()["files"]
        assert (view["is_kept"], view["is_given_up"], view["size_bytes"]) == (False, True, None)


def schemas_in(node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict):
        yield from node.get("properties", {}).items()
        for value in node.values():
            yield from schemas_in(value)
    elif isinstance(node, list):
        for item in node:
            yield from schemas_in(item)


def test_the_document_describes_every_field_with_an_example_and_lists_errors() -> None:
    document = describe().openapi()
    bare = [
        name
        for name, schema in schemas_in(document)
        if "description" not in schema
        or not (
            schema.get("examples")
            or "$ref" in json.dumps(schema)
            or "properties" in json.dumps(schema)
        )
    ]
    assert bare == []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation.get("summary"), (method, path)
            for parameter in operation.get("parameters", []):
                assert parameter["description"], (method, path, parameter["name"])
            if path.startswith("/v1/"):
                assert {"401", "413", "422"} <= operation["responses"].keys(), (method, path)
    delivered = document["paths"]["/v1/rollouts"]["post"]["responses"]
    for code in ("mixed_forms", "invalid_segment", "segment_not_in_file", "missing_mask"):
        assert code in delivered["422"]["description"]
    assert "lease_unknown" in delivered["404"]["description"]
