"""The example's command where what it needs is not installed."""

import os
import subprocess
import sys

import pytest

COMMAND = """
import runpy, sys
sys.modules[{missing!r}] = None
sys.argv = ["train_tiny_moe", "--help"]
runpy.run_module("examples.train_tiny_moe", run_name="__main__", alter_sys=True)
"""


def helped(missing: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND.format(missing=missing)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("missing", ["torch", "typer"])
def test_what_is_not_installed_is_said_with_how_to_get_it(missing: str) -> None:
    if missing != "torch":
        pytest.importorskip("torch", reason="torch is not installed")
    done = helped(missing)
    said = f"needs {missing}: make torch, or pip install -e '.[examples]'"
    assert (done.returncode, done.stderr) == (2, f"python -m examples.train_tiny_moe: {said}\n")


def test_a_fault_of_our_own_is_no_missing_extra() -> None:
    done = helped("sideband.batch.types")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
