"""``docker compose up`` for real, where an engine runs; what the file promises, everywhere."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def compose_file() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return content


def engine_problem() -> str | None:
    """Why containers cannot run here; None when they can."""
    if shutil.which("docker") is None:
        return "no docker command"
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        done = subprocess.run(command, capture_output=True, timeout=30, check=False)
        if done.returncode:
            return f"{' '.join(command)} fails: no engine answers"
    return None


def test_every_part_is_there_and_listens_on_loopback_only() -> None:
    services = compose_file()["services"]
    ranks = {f"rank-{number}" for number in range(4)}
    engines = {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    parts = {"proxy", "orchestrator", "feed", "environment", "checker"}
    assert services.keys() == ranks | engines | parts
    published = [port for service in services.values() for port in service.get("ports", ())]
    assert len(published) == 3
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_one_image_is_built_once_and_never_pulled() -> None:
    services = compose_file()["services"].values()
    assert {service["image"] for service in services} == {"sideband:local"}
    assert sum("build" in service for service in services) == 1
    for service in services:
        assert service["pull_policy"] == ("build" if "build" in service else "never")


def test_health_gates_the_order_and_the_checker_comes_last() -> None:
    services = compose_file()["services"]
    for name, service in services.items():
        if name != "checker":
            assert "healthcheck" in service, name
    gates = services["checker"]["depends_on"]
    assert all(gate["condition"] == "service_healthy" for gate in gates.values())
    assert gates.keys() == {"environment", *(f"rank-{number}" for number in range(4))}


def test_nobody_is_root_and_nothing_is_writable_but_volumes() -> None:
    for name, service in compose_file()["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "user" not in service, name
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert "USER sideband" in lines


@pytest.mark.docker
@pytest.mark.timeout(1200)
def test_compose_up_ends_with_the_checkers_verdict() -> None:
    problem = engine_problem()
    if problem is not None:
        pytest.skip(problem)
    compose = ["docker", "compose", "--project-name", "sideband-test"]
    ports = [f"SIDEBAND_{name}_PORT=0" for name in ("PROXY", "ORCHESTRATOR", "FEED")]
    up = ["env", *ports, *compose, "up", "--build", "--exit-code-from", "checker"]
    try:
        done = subprocess.run(
            up, cwd=ROOT, capture_output=True, text=True, timeout=1100, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        assert "each sample trained exactly once" in done.stdout
    finally:
        subprocess.run(
            [*compose, "down", "--volumes", "--timeout", "5"],
            cwd=ROOT,
            capture_output=True,
            timeout=120,
            check=False,
        )
