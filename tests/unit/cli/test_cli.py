"""The command line as a user meets it: output, exit status, and errors in one line."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sideband.cli import app as cli
from sideband.cli import entry
from sideband.doctor import following, probes, visit
from sideband.feed.keys import read_pair
from tests.unit.payload.support import make_root, write_one

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(visit, "WATCH_S", 0.1)
    monkeypatch.setattr(visit, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(probes, "FSYNC_ROUNDS", 2)


def test_doctor_says_what_it_measured_and_the_verdict(tmp_path: Path) -> None:
    done = RUNNER.invoke(cli.app, ["doctor", str(tmp_path)])
    assert done.exit_code == 0, done.output
    for part in ("rename over a file", "always whole", "fit to be a payload root"):
        assert part in done.output


def test_doctor_exits_1_when_unfit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "is_whole", lambda content: False)
    monkeypatch.setattr(following, "REPLY_TIMEOUT_S", 0.3)
    done = RUNNER.invoke(cli.app, ["doctor", str(tmp_path)])
    assert done.exit_code == 1, done.output
    assert "NOT fit" in done.output


def run_main(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["sideband", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


def test_a_named_error_is_one_line_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(visit, "WATCH_S", 0.1)
    (tmp_path / ".sideband-doctor-m" / "lead").mkdir(parents=True)
    (tmp_path / ".sideband-doctor-m" / "follow").mkdir()
    assert run_main(monkeypatch, "doctor", str(tmp_path), "--meet", "m") == 2
    shown = capsys.readouterr().err
    assert "in use by two sides" in shown
    assert "Traceback" not in shown


@pytest.fixture
def payload(tmp_path: Path) -> Path:
    root = make_root(tmp_path / "root")
    report = write_one(root)
    return root.path / report.segments[0][0].file


def test_inspect_shows_the_header_and_verifies_every_block(payload: Path) -> None:
    done = RUNNER.invoke(cli.app, ["inspect", str(payload)])
    assert done.exit_code == 0, done.output
    for part in (
        "req-1",
        "routed_experts",
        "sampling_mask",
        "[1, 3), [4, 7), [9, 15)",
        "every checksum",
    ):
        assert part in done.output


def test_inspect_names_a_flipped_byte(
    payload: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = bytearray(payload.read_bytes())
    content[-1] ^= 1
    payload.write_bytes(content)
    assert run_main(monkeypatch, "inspect", str(payload)) == 2
    assert "checksum" in capsys.readouterr().err


def test_inspect_says_where_a_file_must_lie_that_lies_in_no_root(
    payload: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for copy in (tmp_path / "x.sbp", tmp_path / "a" / "b" / "c" / "d" / payload.name):
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(payload.read_bytes())
        assert run_main(monkeypatch, "inspect", str(copy)) == 2
        shown = capsys.readouterr().err
        for part in (
            str(copy),
            "<root>/v<k>/<run id>/<hh>/<name>.sbp",
            "root's .sideband-root.json",
        ):
            assert part in shown


def test_keys_makes_what_is_missing_and_shows_no_secret(tmp_path: Path) -> None:
    done = RUNNER.invoke(cli.app, ["keys", str(tmp_path / "keys")])
    assert done.exit_code == 0, done.output
    secret = read_pair(tmp_path / "keys" / "rank.key_secret").secret.decode()
    assert secret not in done.output
    for part in ("feed.key_secret", "SIDEBAND_FEED_CURVE_RANKS_DIR", "new"):
        assert part in done.output
    again = RUNNER.invoke(cli.app, ["keys", str(tmp_path / "keys"), "--rank", "rank"])
    assert (again.exit_code, "new" in again.output) == (0, False)
    assert read_pair(tmp_path / "keys" / "rank.key_secret").secret.decode() == secret


def test_keys_names_a_file_that_others_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert RUNNER.invoke(cli.app, ["keys", str(tmp_path)]).exit_code == 0
    (tmp_path / "feed.key_secret").chmod(0o644)
    assert run_main(monkeypatch, "keys", str(tmp_path)) == 2
    assert "chmod 600" in capsys.readouterr().err


def test_every_command_explains_itself() -> None:
    for words in (["--help"], ["doctor", "--help"], ["inspect", "--help"], ["keys", "--help"]):
        done = RUNNER.invoke(cli.app, words)
        assert (done.exit_code, "Usage" in done.output) == (0, True)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_library_without_the_extra_says_how_to_get_the_command(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == missing or n == "sideband.cli.app"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as caught:
        entry.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"sideband: needs {missing}: pip install 'sideband[cli]'\n"


def test_a_fault_of_our_own_is_not_taken_for_a_missing_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "sideband.cli.app")
    monkeypatch.setitem(sys.modules, "sideband.cli.inspect", None)
    with pytest.raises(ModuleNotFoundError):
        entry.main()
