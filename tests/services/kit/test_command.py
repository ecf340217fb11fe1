"""A service's command line: help, and settings that cannot be as lines for people."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.inference_proxy.config import ProxySettings
from services.kit.command import by_variables, settings_of
from services.kit.documents import SERVICES, settings_class
from services.kit.settings import ServiceSettings
from services.orchestrator.config import OrchestratorSettings
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


PAIR = '[{"name": "p0", "url": "http://p", "role": "prefill"}]'
SPILLED = '[{"name": "e0", "url": "http://e", "spill": "proxy"}]'


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (
            ProxySettings,
            {"HOST": "0.0.0.0"},
            "SIDEBAND_PROXY_ADMIN_TOKENS is empty: SIDEBAND_PROXY_HOST=0.0.0.0 is reachable beyond "
            "loopback, so at least one token is needed, there or in SIDEBAND_PROXY_TOKENS_FILE",
        ),
        (
            ProxySettings,
            {"ENGINES": PAIR},
            "SIDEBAND_PROXY_ENGINES: prefill and decode come together, one of each at least",
        ),
        (
            ProxySettings,
            {"ENGINES": SPILLED, "PAYLOAD_ROOT": "/x"},
            "SIDEBAND_PROXY_MODEL_CONFIG_PATH: `spill: proxy` needs the model's config.json",
        ),
        (
            OrchestratorSettings,
            {"RESUME_FROM_STEP": "3"},
            "SIDEBAND_ORCHESTRATOR_RESUME_FROM_STEP: needs a SIDEBAND_ORCHESTRATOR_START_ID, "
            "or each restart would go back",
        ),
        (
            OrchestratorSettings,
            {"RESUME_FROM_STEP": "3", "START": "fresh"},
            "SIDEBAND_ORCHESTRATOR_RESUME_FROM_STEP: a fresh start has no step to resume from",
        ),
        (
            FeedSettings,
            {"CURVE_KEY_FILE": "k"},
            "SIDEBAND_FEED_CURVE_KEY_FILE and SIDEBAND_FEED_CURVE_RANKS_DIR come together",
        ),
        (
            FeedSettings,
            {"ENDPOINT": "tcp://0.0.0.0:5600"},
            "SIDEBAND_FEED_ENDPOINT is ",
        ),
    ],
)
def test_a_rule_between_settings_names_their_variables(
    kind: type[ServiceSettings],
    given: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prefix = str(kind.model_config.get("env_prefix"))
    if kind is FeedSettings:
        given = {"RUN_ID": "run-1", **given}
    for name, value in given.items():
        monkeypatch.setenv(prefix + name, value)
    with pytest.raises(SystemExit):
        settings_of(kind, "any", [])
    shown = capsys.readouterr().err
    assert f"python -m services.any: {said}" in shown
    of_words = [name for name in kind.model_fields if "_" in name]
    assert not [name for name in of_words if re.search(rf"\b{name}\b", shown)]


def test_a_word_that_is_also_a_setting_stays_a_word() -> None:
    rule = "start: a start has one start, and start=fresh, restart=y, admin_tokens2, data_tokens"
    assert by_variables(OrchestratorSettings, rule) == (
        "SIDEBAND_ORCHESTRATOR_START: a start has one start, and "
        "SIDEBAND_ORCHESTRATOR_START=fresh, restart=y, admin_tokens2, "
        "SIDEBAND_ORCHESTRATOR_DATA_TOKENS"
    )


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
