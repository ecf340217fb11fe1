"""A service's command line: help, and settings that cannot be as lines for people."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from services.inference_proxy.config import ProxySettings
from services.kit.command import settings_of
from services.kit.documents import SERVICES, settings_class
from services.kit.settings import ServiceSettings
from services.trainer_feed.config import FeedSettings


@pytest.mark.parametrize("service", SERVICES)
def test_help_names_every_setting_and_serves_nothing(
    service: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = settings_class(service)
    with pytest.raises(SystemExit) as caught:
        settings_of(kind, service, ["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for name in kind.model_fields:
        assert f"{kind.model_config.get('env_prefix')}{name.upper()} " in shown


def test_what_is_missing_or_wrong_is_named_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SIDEBAND_FEED_PORT", "99999")
    with pytest.raises(SystemExit) as caught:
        settings_of(FeedSettings, "trainer_feed", [])
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert any("SIDEBAND_FEED_RUN_ID: Field required" in line for line in lines)
    assert any("SIDEBAND_FEED_PORT: " in line and "65535" in line for line in lines)
    assert "99999" not in "".join(lines)


@pytest.mark.parametrize(
    ("kind", "variable", "value", "said"),
    [
        (FeedSettings, "SIDEBAND_FEED_ADMIN_TOKENS", "secret", "must be JSON: Expecting value"),
        (ProxySettings, "SIDEBAND_PROXY_ENGINES", '[{"name": "secret"', "must be JSON: Expecting"),
    ],
)
def test_what_is_no_json_is_named_by_its_variable(
    kind: type[ServiceSettings],
    variable: str,
    value: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SIDEBAND_FEED_RUN_ID", "run-1")
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as caught:
        settings_of(kind, "any", [])
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert f": {variable}: {said}" in shown
    assert "secret" not in shown


def test_a_part_of_a_setting_is_named_where_it_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = '[{"name": "e0", "url": "http://a"}, {"name": "e1", "url": "http://b", "role": "x"}]'
    monkeypatch.setenv("SIDEBAND_PROXY_ENGINES", engines)
    with pytest.raises(SystemExit):
        settings_of(ProxySettings, "inference_proxy", [])
    assert ": SIDEBAND_PROXY_ENGINES[1].role: Input should be" in capsys.readouterr().err


def test_a_rule_between_settings_is_told_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SIDEBAND_PROXY_HOST", "0.0.0.0")
    with pytest.raises(SystemExit):
        settings_of(ProxySettings, "inference_proxy", [])
    shown = capsys.readouterr().err
    assert shown.startswith("python -m services.inference_proxy: admin_tokens is empty: host 0.0")


def test_an_argument_that_is_not_known_is_refused() -> None:
    with pytest.raises(SystemExit) as caught:
        settings_of(FeedSettings, "trainer_feed", ["--port=1"])
    assert caught.value.code == 2


def test_settings_that_can_be_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDEBAND_FEED_RUN_ID", "run-1")
    assert settings_of(FeedSettings, "trainer_feed", []).run_id == "run-1"


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_starts_through_it(service: str) -> None:
    source = importlib.util.find_spec(f"services.{service}.__main__")
    assert source is not None
    assert f'settings_of({settings_class(service).__name__}, "{service}")' in Path(
        source.origin or ""
    ).read_text("utf-8")


def test_documents_are_not_written_into_a_folder_named_help(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.kit.documents", "--help"],
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "folder" in done.stdout
    assert list(tmp_path.iterdir()) == []
