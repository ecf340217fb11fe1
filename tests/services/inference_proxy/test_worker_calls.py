"""Calls between workers, cut off at each byte by the death of one of them."""

import asyncio
import socket
from contextlib import ExitStack
from typing import cast

import msgspec
import pytest
from fastapi import FastAPI

from services.inference_proxy.workers import worker
from services.inference_proxy.workers.answering import Answering
from services.inference_proxy.workers.asks import Adopt, AnyAsk, AnyReply, Done, Look, Seen
from services.inference_proxy.workers.calls import Calls, answer
from services.inference_proxy.workers.errors import WorkerSilent
from services.inference_proxy.workers.listening import listeners
from services.inference_proxy.workers.parcels import Inbox, Outbox, stop_reading
from services.inference_proxy.workers.state import SharedState
from services.kit.settings import ServiceSettings

SEEN = Seen(
    in_flight=1,
    not_ready=["it is paused"],
    engines=[{"name": "e0"}],
    sessions=[],
    session_count=0,
    older=["e0"],
    naming=[],
)


async def test_an_answer_that_its_worker_died_over_is_a_silence() -> None:
    inbox, content = Inbox.create(), msgspec.msgpack.encode(SEEN)
    calls, sizes = Calls([Outbox(inbox)]), iter(range(len(content) + 1))

    def dies() -> None:
        parcel = inbox.take()
        assert parcel is not None
        theirs = held.enter_context(socket.socket(fileno=parcel.descriptors.pop()))
        theirs.sendall(content[: next(sizes)])
        theirs.shutdown(socket.SHUT_WR)  # what was asked is never read, so closing is no end

    with inbox.taking, inbox.sending, ExitStack() as held:
        asyncio.get_running_loop().add_reader(inbox.taking.fileno(), dies)
        for _ in range(len(content)):
            with pytest.raises(WorkerSilent, match="ended before it had answered"):
                await calls.ask(0, Look(), Seen)
        assert await calls.ask(0, Look(), Seen) == SEEN
        stop_reading(inbox)


async def test_a_question_that_its_worker_died_over_is_not_heard() -> None:
    content = msgspec.msgpack.encode(Look(sessions=7))
    heard: list[AnyAsk] = []

    async def handle(ask: AnyAsk) -> AnyReply:
        heard.append(ask)
        return Done()

    for size in range(len(content) + 1):
        ours, theirs = socket.socketpair()
        with ours:
            ours.sendall(content[:size])
            ours.shutdown(socket.SHUT_WR)
            await answer(theirs.detach(), handle)
            assert (size < len(content)) == (heard == [])
    assert heard == [Look(sessions=7)]


async def test_what_holds_for_all_is_heard_by_a_worker_that_is_asked_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "CALLS_MAX", 0)
    inboxes = [Inbox.create() for _ in range(3)]
    (lifeline, parent), (listener,) = socket.socketpair(), listeners("127.0.0.1", 0, 1)
    outboxes = tuple(Outbox(inbox) for inbox in inboxes)
    seat = worker.Seat(
        index=1, inbox=inboxes[1], outboxes=outboxes, listener=listener, lifeline=lifeline
    )

    async def handle(ask: AnyAsk) -> AnyReply:
        assert isinstance(ask, Adopt), "nothing else fits"
        return Done()

    server = worker.WorkerServer(
        FastAPI(), seat, ServiceSettings(), answering=lambda: cast("Answering", handle)
    )
    serving = asyncio.create_task(server.serve([listener]))
    state = SharedState(
        number=1, is_settled=True, gate="open", applied=0, has_gone_back=False, engines={}
    )
    calls = Calls(outboxes)
    assert await calls.ask(1, Adopt(state), Done) == Done()
    with pytest.raises(WorkerSilent):
        await calls.ask(1, Look(), Seen)
    server.should_exit = True
    await serving
    for end in (lifeline, parent, *(e for i in inboxes for e in (i.taking, i.sending))):
        end.close()
