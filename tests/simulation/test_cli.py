"""The commands' own refusals; what they check is in tests/e2e."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from simulation.cli import app


@pytest.mark.parametrize("command", ["check", "crash"])
def test_a_model_that_is_none_is_refused_by_name(command: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    done = CliRunner().invoke(app, [command, "--out", out, "--model", "no-such-model"])
    assert done.exit_code == 2
    assert "Invalid value for --model" in done.output
    assert "no-such-model" in done.output
