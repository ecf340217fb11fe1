"""Request ids: the client's, and one of its own for each attempt and leg upstream: pure.

A payload file carries the upstream id in its name, so an id must never come twice: deleting what
a losing attempt left would take another request's file. Hence the random part.
"""

import secrets
from dataclasses import dataclass
from typing import Literal

from services.inference_proxy.limits import CLIENT_ID_CHARACTERS_MAX
from sideband.ids import RequestId

Leg = Literal["whole", "prefill", "decode"]
_SUFFIX: dict[Leg, str] = {"whole": "", "prefill": ".p", "decode": ".d"}


@dataclass(frozen=True, slots=True)
class AttemptIds:
    """The ids of one attempt."""

    base: str
    attempt: int

    def of(self, leg: Leg) -> RequestId:
        """``<client id>-<8 hex>.a<n>``, with ``.p`` or ``.d`` for a leg of a pair."""
        return RequestId(f"{self.base}.a{self.attempt}{_SUFFIX[leg]}")


def new_client_id() -> RequestId:
    """An id for a client that sends none."""
    return RequestId(secrets.token_hex(16))


def upstream_base(client_id: RequestId) -> str:
    """The part that all attempts of one request share.

    Some transfer connectors read peer addresses out of a request id (``___decode_addr_host:port``):
    a client must not be able to name a host that way.
    """
    kept = client_id[:CLIENT_ID_CHARACTERS_MAX].replace("_addr_", "-addr-")
    return f"{kept}-{secrets.token_hex(4)}"
