"""The whole example as a person runs it: torchrun, gloo, DP 2 × CP 2, two steps, both layouts."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from examples.train_tiny_moe.learner import Use
from examples.train_tiny_moe.rank import StepReport, report_path

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.timeout(300)]


def test_ranks_under_torchrun_train_as_one_process_does(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.train_tiny_moe", "train", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "files left after the last policy was applied: 0" in done.stdout
    for layout in ("contiguous", "zigzag"):
        for step in (1, 2):
            path = report_path(tmp_path / layout, step)
            report = msgspec.json.decode(path.read_bytes(), type=StepReport)
            assert report.dummies == 1
            assert report.learners["float64"].tokens > 200
            found = report.mismatch()
            replayed = found[Use(routing=True, masks=True)]
            assert replayed.mean_k3 < found[Use(routing=False, masks=True)].mean_k3
            # Estimated from the drawn tokens, and computed over all that were kept.
            assert 0 < replayed.scored < replayed.tokens
            assert replayed.mean_divergence is not None
            assert replayed.mean_k3 / 3 < replayed.mean_divergence < replayed.mean_k3 * 3
            assert replayed.mean_k3 < 0.01 < 0.1 < found[Use(routing=False, masks=False)].mean_k3


def test_a_rank_that_fails_ends_the_run_with_its_log(tmp_path: Path) -> None:
    """A model folder that is not there: every rank dies, and the run says why."""
    import asyncio

    from examples.train_tiny_moe.launch import ranks
    from examples.train_tiny_moe.rank import RankSettings
    from examples.train_tiny_moe.services import RunFailed

    settings = RankSettings(
        endpoint="tcp://127.0.0.1:9",
        payload_root=str(tmp_path),
        model_folder=str(tmp_path / "absent"),
        out=str(tmp_path),
        dp_size=1,
        cp_size=2,
        data_workers=0,
        step_timeout_s=5.0,
    )

    async def start() -> None:
        async with ranks(settings) as ended, asyncio.timeout(120):
            await ended

    with pytest.raises(RunFailed, match=r"(?s)the ranks ended with 1.*absent"):
        asyncio.run(start())
