"""The parent of the workers by itself: what dying workers leave in its inbox does not end it."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from bench.http.processes import free_port

ROOT = Path(__file__).parent.parent.parent.parent
# A worker of which the parent hears all that one could leave behind that died while it asked.
FAMILY = """
import signal, socket, sys

import msgspec

from services.inference_proxy.workers.asks import End, Keep
from services.inference_proxy.workers.parcels import CALL, STARTED, Parcel
from services.inference_proxy.workers.parent import Parent
from services.inference_proxy.workers.state import SharedState

FACTS = {"gate": "open", "applied": 0, "has_gone_back": False, "engines": {}}
KEEP = Keep(SharedState(number=1, is_settled=True, **FACTS))

def work(seat, state):
    for ask in (KEEP, End(0)):
        content = msgspec.msgpack.encode(ask)
        for size in range(len(content)):
            ours, theirs = socket.socketpair()
            ours.sendall(content[:size])
            seat.outboxes[-1].post(Parcel(CALL, [theirs.detach()]))
            ours.close()
    seat.outboxes[-1].post(Parcel(STARTED + bytes([seat.index]), []))
    signal.pause()

Parent(work, host="127.0.0.1", port=int(sys.argv[1]), workers=1, drain_timeout_s=1).run()
"""


@pytest.mark.e2e
async def test_a_worker_that_dies_at_any_byte_of_a_question_does_not_end_its_parent() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        FAMILY,
        str(free_port()),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert parent.stdout is not None
    said = b""
    while b"worker_started" not in said:
        line = await parent.stdout.readline()
        assert line, said.decode()
        said += line
    assert said.count(b"ask_lost") > 50
    parent.send_signal(signal.SIGTERM)
    await parent.communicate()
    assert parent.returncode == 0
