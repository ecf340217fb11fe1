"""The program of a reader process: answers questions until its input ends.

``MODULE.Reading()`` is one conversation: ``ask(head, body)`` gives the head and the body of an
answer. What it raises ends the process, with the trace on standard error.
"""

import ctypes
import importlib
import os
from io import FileIO
from typing import Final, Protocol

from services.kit.readers.framing import BEGIN, END, GO_ON, PREFIX

IN, OUT, ERROR = 0, 1, 2
STARTED: Final = PREFIX.pack(GO_ON, 0, 0)


class Conversation(Protocol):
    """What a module's ``Reading`` is."""

    def ask(self, head: bytes, body: bytearray) -> tuple[bytes, bytes]:
        """The head and the body of the answer."""


def main(module: str) -> None:
    """Read, answer, until the service is gone."""
    out_fd = os.dup(OUT)
    os.dup2(ERROR, OUT)  # whatever is printed must not get among the answers
    begin = importlib.import_module(module).Reading
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    conversation: Conversation | None = None
    with open(IN, "rb", buffering=0) as source, open(out_fd, "wb", buffering=0) as sink:
        send(sink, STARTED)
        while (question := next_question(source)) is not None:
            kind, head, body = question
            if kind == END:
                conversation = None
                if trim is not None:
                    trim(0)  # a large body may be followed by none for hours
                continue
            if kind == BEGIN:
                conversation = begin()
            assert conversation is not None, "a conversation begins with BEGIN"
            answer, data = conversation.ask(bytes(head), body)
            send(sink, PREFIX.pack(GO_ON, len(answer), len(data)), answer, data)


def next_question(source: FileIO) -> tuple[int, bytearray, bytearray] | None:
    """What is wanted, its head and its body; None when the service is gone, within one too."""
    prefix = received(source, PREFIX.size)
    if prefix is None:
        return None
    kind, head_bytes, body_bytes = PREFIX.unpack(prefix)
    head = received(source, head_bytes)
    body = None if head is None else received(source, body_bytes)
    return None if head is None or body is None else (kind, head, body)


def received(source: FileIO, size_bytes: int) -> bytearray | None:
    """So many bytes; None when the input ends before they do."""
    data = bytearray(size_bytes)
    view, at = memoryview(data), 0
    while at < size_bytes:
        count = source.readinto(view[at:])
        if not count:
            return None
        at += count
    return data


def send(sink: FileIO, *parts: bytes) -> None:
    """All bytes of all parts."""
    for part in parts:
        view = memoryview(part)
        while view:
            view = view[sink.write(view) :]
