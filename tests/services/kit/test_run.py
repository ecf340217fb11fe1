"""How a service ends: with status 0 when it was told to, and with another when it gave up."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest

from bench.http.processes import free_port

SERVICE = """
import sys
from contextlib import asynccontextmanager

from services.kit.app import ProblemApp
from services.kit.background import Crash
from services.kit.run import serve
from services.kit.settings import ServiceSettings

kind = sys.argv[2]

@asynccontextmanager
async def lifespan(app):
    if kind == "unable":
        raise RuntimeError("cannot begin")
    yield
    print("ended in order", flush=True)

app = ProblemApp(lifespan=lifespan)
app.crash = Crash()

@app.get("/{path:path}")
async def answer():
    if kind == "crash":
        app.crash()

serve(app, ServiceSettings(port=int(sys.argv[1])))
"""


async def begun(kind: str, port: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SERVICE,
        str(port),
        kind,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=Path(__file__).parent.parent.parent.parent,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )


async def answered(port: int) -> None:
    async with asyncio.timeout(15), httpx.AsyncClient(trust_env=False) as http:
        while True:
            try:
                await http.get(f"http://127.0.0.1:{port}/")
            except httpx.TransportError:
                await asyncio.sleep(0.05)
            else:
                return


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_told_end_is_no_failure(number: int) -> None:
    port = free_port()
    service = await begun("plain", port)
    await answered(port)
    service.send_signal(number)
    out, _ = await service.communicate()
    assert (service.returncode, out) == (0, b"ended in order\n")


@pytest.mark.e2e
async def test_a_service_that_gives_up_ends_in_order_and_is_started_again() -> None:
    port = free_port()
    service = await begun("crash", port)
    await answered(port)
    out, _ = await service.communicate()
    assert (service.returncode, out) == (1, b"ended in order\n")


@pytest.mark.e2e
async def test_a_service_that_cannot_begin_says_so() -> None:
    service = await begun("unable", free_port())
    await service.communicate()
    assert service.returncode == 3
