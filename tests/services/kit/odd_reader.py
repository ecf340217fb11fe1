"""A reader for tests: counts what it was asked, and misbehaves when told so."""

import os
import threading


class Reading:
    """One conversation."""

    def __init__(self) -> None:
        self._asked = 0

    def ask(self, head: bytes, body: bytearray) -> tuple[bytes, bytes]:
        """How often it was asked and as which process, and the body backwards."""
        os.write(1, b"something that is no answer")
        self._asked += 1
        if head == b"die":
            os._exit(3)
        if head == b"raise":
            raise ValueError("a bug")
        if head == b"hang":
            threading.Event().wait()
        return b"%d %d" % (self._asked, os.getpid()), bytes(reversed(body))
