"""The commands of docs/quickstart.md, as they stand there; only ports and the folder are others."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httpx
import pytest

from simulation.processes import pick_ports

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = (ROOT / "docs" / "quickstart.md").read_text()
DEADLINE_S: Final = 60.0
SERVICES: Final = {"FEED": "8300", "ORCHESTRATOR": "8200", "PROXY": "8100"}


def blocks(kind: str, *, section: int) -> list[str]:
    """The fenced blocks of one numbered section."""
    text = PAGE.split("\n## ")[section]
    assert text.startswith(f"{section}. ")
    return re.findall(rf"```{kind}\n(.*?)```", text, re.S)


def until(holds: Callable[[], object]) -> None:
    """Wait for what the page says happens by itself."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.05)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


class Reader:
    """Types the page's blocks into shells."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        self.folder = folder
        self.ports = dict(zip((*SERVICES.values(), "8000", "5600"), map(str, ports), strict=True))
        own = {f"SIDEBAND_{name}_PORT": self.ports[port] for name, port in SERVICES.items()}
        endpoint = {"SIDEBAND_FEED_ENDPOINT": f"tcp://127.0.0.1:{self.ports['5600']}"}
        self.environment = os.environ | own | endpoint | {"PYTHONUNBUFFERED": "1"}
        self.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def typed(self, block: str) -> list[str]:
        for port, found in self.ports.items():
            block = re.sub(rf"\b{port}\b", found, block)
        return ["bash", "-euc", block.replace("/tmp/try", str(self.folder))]

    def output(self, block: str) -> str:
        """Of a block that ends."""
        done = subprocess.run(
            self.typed(block),
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
        return done.stdout

    @contextmanager
    def running(self, block: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """A block that goes on. Its last command replaces the shell, so that it can be ended."""
        command = self.typed(re.sub(r"^python ", "exec python ", block, flags=re.M))
        with (
            log.open("wb") as file,
            subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdout=file, stderr=file
            ) as process,
        ):
            try:
                yield process
            finally:
                process.terminate()

    def url(self, service: str) -> str:
        return f"http://127.0.0.1:{self.ports[SERVICES[service]]}"


@pytest.mark.e2e
@pytest.mark.timeout(5 * DEADLINE_S)
def test_every_line_of_the_page_does_what_it_says(tmp_path: Path) -> None:
    with ExitStack() as stack:
        reader = Reader(tmp_path, pick_ports(5))
        logs = [tmp_path / f"{number}.log" for number in range(5)]
        parts = [
            stack.enter_context(reader.running(block, log))
            for block, log in zip(blocks("sh", section=1), logs, strict=True)
        ]
        until(lambda: all(is_ready(reader.url(service)) for service in SERVICES))

        (rollouts,) = blocks("sh", section=2)
        said = reader.output(rollouts)
        assert said.count('"accepted":true') == 2
        assert '"payload_segments":{"0":[{' in said
        (printed,) = blocks("text", section=2)
        until(lambda: printed in logs[-1].read_text())

        look, tell = blocks("sh", section=3)
        assert len(reader.output(look).split()) == 2
        assert '"applied":1' in reader.output(tell)
        until(lambda: reader.output(look) == "")
        step = httpx.get(f"{reader.url('ORCHESTRATOR')}/v1/steps/1", trust_env=False).json()
        assert step["state"] == "closed"

        (end,) = blocks("sh", section=4)
        until(lambda: '"phase":"ended"' in reader.output(end))
        assert parts[-1].wait(DEADLINE_S) == 0, "the rank's loop ends"
