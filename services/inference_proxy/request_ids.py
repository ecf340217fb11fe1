"""Request ids: the client's, and one of its own for each attempt and leg upstream: pure.

A payload file carries the upstream id in its name, so an id must never come twice: deleting what
a losing attempt left would take another request's file. Hence the random part.
"""

import os
from typing import Final, Literal

from msgspec import Struct

from services.inference_proxy.limits import CLIENT_ID_CHARACTERS_MAX
from sideband.ids import RequestId

Leg = Literal["whole", "prefill", "decode"]
_SUFFIX: dict[Leg, str] = {"whole": "", "prefill": ".p", "decode": ".d"}


RANDOM_BYTES: Final = 4096  # fetched at once: asking the kernel costs as much as a whole request


class RandomHex:
    """Random hexadecimal digits, never the same ones twice, also after a fork."""

    def __init__(self) -> None:
        self._digits, self._used = "", 0
        os.register_at_fork(after_in_child=self._forget)

    def take(self, count: int) -> str:
        """The next ``count`` digits."""
        if self._used + count > len(self._digits):
            self._digits, self._used = os.urandom(RANDOM_BYTES).hex(), 0
        self._used += count
        return self._digits[self._used - count : self._used]

    def _forget(self) -> None:
        self._digits, self._used = "", 0


_random = RandomHex()


class AttemptIds(Struct, frozen=True):
    """The ids of one attempt."""

    base: str
    attempt: int

    def of(self, leg: Leg) -> RequestId:
        """``<client id>-<8 hex>.a<n>``, with ``.p`` or ``.d`` for a leg of a pair."""
        return RequestId(f"{self.base}.a{self.attempt}{_SUFFIX[leg]}")


def new_client_id() -> RequestId:
    """An id for a client that sends none."""
    return RequestId(_random.take(32))


def upstream_base(client_id: RequestId) -> str:
    """The part that all attempts of one request share.

    Some transfer connectors read peer addresses out of a request id (``___decode_addr_host:port``):
    a client must not be able to name a host that way.
    """
    kept = client_id[:CLIENT_ID_CHARACTERS_MAX].replace("_addr_", "-addr-")
    return f"{kept}-{_random.take(8)}"
