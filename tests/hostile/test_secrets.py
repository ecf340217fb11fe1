"""No secret of a service is in what it writes, whoever asks what: real processes, all at debug."""

import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Event

import httpx
import msgspec
import pytest

from bench.http.processes import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
ROOT = Path(__file__).parent.parent.parent
START_S = 60.0
SECRETS = {
    "ADMIN": "admin-s3cret-of-the-tests",
    "DATA": "data-s3cret-of-the-tests!",
    "FILE": "file-s3cret-of-the-tests!",
    "OTHER": "other-s3cret-of-the-tests",
    "WRONG": "wrong-s3cret-of-the-tests",
}
ENGINES = [{"name": "e0", "url": "http://127.0.0.1:1", "role": "colocated"}]
SERVICES: dict[str, tuple[str, dict[str, str]]] = {
    "inference_proxy": (
        "SIDEBAND_PROXY_",
        {
            "ENGINES": msgspec.json.encode(ENGINES).decode(),
            "ENGINE_TOKEN": SECRETS["OTHER"],
            "ORCHESTRATOR_URL": "http://127.0.0.1:1",
            "ORCHESTRATOR_TOKEN": SECRETS["OTHER"],
        },
    ),
    "orchestrator": (
        "SIDEBAND_ORCHESTRATOR_",
        {
            "LEDGER_URL": "memory",
            "FEED_URL": "http://127.0.0.1:1",
            "FEED_TOKEN": SECRETS["OTHER"],
            "PROXY_URL": "http://127.0.0.1:1",
            "PROXY_TOKEN": SECRETS["OTHER"],
        },
    ),
    "trainer_feed": ("SIDEBAND_FEED_", {"RUN_ID": "run", "ENDPOINT": "tcp://127.0.0.1:0"}),
}


def environment(prefix: str, folder: Path, settings: dict[str, str]) -> dict[str, str]:
    """Variables of a service with every kind of token."""
    file = folder / "tokens.json"
    file.write_bytes(msgspec.json.encode({"admin": [SECRETS["FILE"]]}))
    file.chmod(0o600)
    tokens = {
        "ADMIN_TOKENS": msgspec.json.encode([SECRETS["ADMIN"]]).decode(),
        "DATA_TOKENS": msgspec.json.encode([SECRETS["DATA"]]).decode(),
        "TOKENS_FILE": str(file),
        "LOG_LEVEL": "debug",
    }
    named = {f"{prefix}{name}": value for name, value in {**tokens, **settings}.items()}
    return {**os.environ, **named, "PYTHONPATH": f"{ROOT / 'shared'}:{ROOT}"}


def ask_everything(url: str) -> list[int]:
    """Each kind of token at routes of each kind, with bodies that are wrong; the answers."""
    found = []
    with httpx.Client(base_url=url, timeout=20, trust_env=False) as http:
        for secret in SECRETS.values():
            headers = {"authorization": f"Bearer {secret}", "cookie": f"a={secret}"}
            for method, path in (
                ("GET", "/v1/config"),
                ("POST", "/v1/rollouts"),
                ("POST", "/inference/v1/generate"),
                ("PUT", "/v1/steps/1"),
                ("GET", "/v1/run"),
            ):
                answer = http.request(method, path, content=b"{", headers=headers)
                assert not [name for name in SECRETS.values() if name in answer.text], path
                found.append(answer.status_code)
    return found


@pytest.mark.parametrize("service", SERVICES)
def test_no_secret_is_in_a_log_or_an_answer(service: str, tmp_path: Path) -> None:
    prefix, settings = SERVICES[service]
    port = free_port()
    log = tmp_path / "log"
    command = [sys.executable, "-m", f"services.{service}"]
    env = environment(prefix, tmp_path, {**settings, "PORT": str(port)})
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=output, stderr=output)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_it_answers(process, url)
            statuses = ask_everything(url)
            assert {200, 401, 403} <= set(statuses), "right, wrong and weak tokens were tried"
        finally:
            process.terminate()
            process.wait(timeout=60)
    said = log.read_text()
    assert "effective_settings" in said
    assert "request_refused" in said
    assert not [name for name, secret in SECRETS.items() if secret in said]


def test_the_password_of_a_ledger_is_in_no_log(tmp_path: Path) -> None:
    """The start fails, since nobody listens there: the operator's log says so without it."""
    prefix, settings = SERVICES["orchestrator"]
    password = SECRETS["OTHER"]
    url = f"postgresql://user:{password}@127.0.0.1:1/ledger"
    env = environment(prefix, tmp_path, {**settings, "LEDGER_URL": url, "PORT": "0"})
    command = [sys.executable, "-m", "services.orchestrator"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, timeout=90, check=False)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode != 0
    assert "effective_settings" in said
    assert not [name for name, secret in SECRETS.items() if secret in said]


def wait_until_it_answers(process: "subprocess.Popen[bytes]", url: str) -> None:
    """Raises AssertionError when the process ends or stays silent."""
    pause, deadline_s = Event(), time.monotonic() + START_S
    with httpx.Client(base_url=url, timeout=5, trust_env=False) as http:
        while time.monotonic() < deadline_s:
            assert process.poll() is None, "it ended"
            try:
                http.get("/healthz")
            except httpx.TransportError:
                pause.wait(0.1)
            else:
                return
    raise AssertionError("it does not answer")
