"""One set of payload files serves many runs; what stays behind is seen."""

import os
from pathlib import Path
from typing import Any

import pytest

from sideband.payload import PayloadRoot
from simulation import strays
from simulation.calls import RunStopped
from simulation.generation import RUN_ID, make_root
from simulation.rank import DONE_SUFFIX
from simulation.replay import copy_root, counter, rank_growth
from simulation.strays import emptied, stray_files

FILE = f"v0/{RUN_ID}/a1/r0.t0.a0-0123456789abcdef.sbp"


def root_with_file(path: Path) -> Path:
    make_root(path)
    (path / FILE).parent.mkdir(parents=True)
    (path / FILE).write_bytes(b"rows")
    return path


def test_a_run_that_deletes_a_file_takes_it_from_no_other_run(tmp_path: Path) -> None:
    source = root_with_file(tmp_path / "root")
    first, second = (copy_root(source, tmp_path / name) for name in ("first", "second"))
    PayloadRoot.open(first, run_id=RUN_ID).delete(FILE)
    assert stray_files(first) == []
    assert (source / FILE).read_bytes() == (second / FILE).read_bytes() == b"rows"


def test_copies_of_a_root_hold_no_byte_twice(tmp_path: Path) -> None:
    source = root_with_file(tmp_path / "root")
    copy = copy_root(source, tmp_path / "copy")
    assert (copy / FILE).samefile(source / FILE)


async def test_payload_files_and_leftovers_of_writers_are_strays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strays, "EMPTY_TIMEOUT_S", 0.1)
    root = root_with_file(tmp_path / "root")
    leftover = (root / FILE).with_name(".r1.staging")
    leftover.touch()
    assert sorted(await emptied(root)) == sorted([root / FILE, leftover])
    leftover.unlink()
    (root / FILE).unlink()
    assert await emptied(root) == []  # the root's marker is no stray


def test_a_folder_that_goes_while_a_root_is_looked_through_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orchestrator removes folders that its deletes have emptied."""
    root = root_with_file(tmp_path / "root")
    emptied_folder = (root / FILE).parent.with_name("b2")
    emptied_folder.mkdir()
    scan = os.scandir

    def removing(path: str) -> Any:
        if Path(path).name == "b2":
            emptied_folder.rmdir()
        return scan(path)

    monkeypatch.setattr(os, "scandir", removing)
    assert stray_files(root) == [root / FILE]
    assert not emptied_folder.exists()


def test_a_rank_that_never_saw_the_end_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / f"rank0{DONE_SUFFIX}").write_text('{"grown_bytes": 7}')
    (tmp_path / f"rank1{DONE_SUFFIX}").write_text('{"grown_bytes": 9}')
    assert rank_growth(tmp_path, 2) == 9
    with pytest.raises(RunStopped, match="2 of 3 ranks"):
        rank_growth(tmp_path, 3)


def test_a_metric_is_the_sum_over_its_labels_and_of_no_namesake() -> None:
    text = '# HELP a_total x\na_total{rank="0"} 2\na_total{rank="1"} 3.5\na_total_created 99\n'
    assert counter(text, "a_total") == 5.5
    assert counter(text, "b_total") == 0
