"""CURVE on the feed's connections: who is let in, and who was not.

``Doorman`` guards the feed's socket: a peer must hold a secret key whose public half lies in the
folder of ranks. It fails closed: without its thread nobody gets in. ``HandshakeWatch`` tells of
handshakes that failed, on either side.
"""

import ipaddress
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from sideband.errors import InvalidInput
from sideband.feed.errors import BadKeyFile, CurveUnavailable
from sideband.feed.keys import (
    PUBLIC_SUFFIX,
    FeedKeys,
    LoadedRankKeys,
    RankKeys,
    read_pair,
    read_public,
)
from sideband.feed.limits import RANKS_MAX

ZAP_DOMAIN: Final = b"sideband"
EVENTS_PER_LOOK_MAX: Final = 1000

Denial = Literal["key", "protocol", "handshake"]
_DENIALS: Final[dict[int, Denial]] = {
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "key",  # CURVE, and a key that is not let in
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "protocol",  # no CURVE, or not as it must be
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "handshake",  # not ZMQ, or gone in the middle
}
_DENIAL_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


def is_local(endpoint: str) -> bool:
    """Whether only this machine can reach the ZMQ address ``endpoint``."""
    scheme, _, address = endpoint.partition("://")
    host = address.rpartition(":")[0].strip("[]")
    if scheme in {"ipc", "inproc"} or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # an interface, or a name that may resolve to anything
        return False


def check_guarded(endpoint: str, *, has_keys: bool, plain_beyond_loopback: bool) -> None:
    """Raise InvalidInput for an address beyond this machine without keys, unless that is meant."""
    if not (has_keys or plain_beyond_loopback or is_local(endpoint)):
        rule = "lies beyond loopback: give keys (`sideband keys`), or set plain_beyond_loopback"
        raise InvalidInput("endpoint", endpoint, rule)


def rank_keys(
    endpoint: str, keys: RankKeys | None, *, plain_beyond_loopback: bool
) -> LoadedRankKeys | None:
    """What a rank needs to reach ``endpoint``.

    Raises InvalidInput, BadKeyFile, CurveUnavailable.
    """
    check_guarded(endpoint, has_keys=keys is not None, plain_beyond_loopback=plain_beyond_loopback)
    if keys is None:
        return None
    check_curve()
    return keys.load()


def check_curve() -> None:
    """Raise CurveUnavailable where libzmq was built without it."""
    if not zmq.has("curve"):
        raise CurveUnavailable


def secure_dealer(dealer: Socket, keys: LoadedRankKeys) -> None:
    """Reach only the feed that holds the other half of its public key."""
    dealer.setsockopt(zmq.CURVE_SERVERKEY, keys.feed_public)
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public)
    dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)


class KeyRing:
    """The public keys in a folder, read again when it changes. Used by the doorman's thread."""

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self._seen: tuple[tuple[str, int, int], ...] | None = None
        self._keys: frozenset[bytes] = frozenset()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the holder of ``key`` (Z85) may come in; nobody may while the folder is bad."""
        with suppress(BadKeyFile):
            return key in self.keys()
        return False

    def keys(self) -> frozenset[bytes]:
        """All keys. Raises BadKeyFile for a folder or a file that cannot be trusted."""
        seen = tuple(sorted(self._look()))
        if seen != self._seen:
            self._keys = frozenset(read_public(self._folder / name) for name, _, _ in seen)
            self._seen = seen
        return self._keys

    def _look(self) -> Iterator[tuple[str, int, int]]:
        """Names with what changes when a file does."""
        try:
            if self._folder.stat().st_mode & 0o022:
                raise BadKeyFile(self._folder, "others may change it: chmod go-w")
            paths = [path for path in self._folder.iterdir() if path.suffix == PUBLIC_SUFFIX]
            if len(paths) > RANKS_MAX:
                raise BadKeyFile(self._folder, f"holds more than {RANKS_MAX} keys")
            for path in paths:
                status = path.stat()
                yield path.name, status.st_mtime_ns, status.st_size
        except OSError as exc:
            raise BadKeyFile(self._folder, exc.strerror or "cannot be read") from exc


class Doorman:
    """Lets in holders of the keys in ``keys.ranks_dir``, from ``guard`` to ``close``."""

    def __init__(self, context: Context, keys: FeedKeys) -> None:
        """Raises BadKeyFile, CurveUnavailable."""
        check_curve()
        self._pair = read_pair(keys.feed_key)
        ring = KeyRing(keys.ranks_dir)
        ring.keys()  # a bad folder is said at the start, not to the first rank
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(ZAP_DOMAIN.decode(), ring)

    def guard(self, socket: Socket) -> None:
        """Before the socket is bound."""
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody gets in should the thread be gone
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._pair.public)

    def close(self) -> None:
        """After the socket is closed. Joins the thread."""
        self._authenticator.stop()


class HandshakeWatch:
    """Counts the handshakes of a socket that failed, by reason. Made before it is bound.

    ``fd`` becomes readable when there is something new since a ``take`` that found nothing.
    """

    def __init__(self, socket: Socket) -> None:
        self._watched = socket
        self._monitor = socket.get_monitor_socket(int(_DENIAL_EVENTS))
        self.fd = int(self._monitor.getsockopt(zmq.FD))

    def take(self) -> Counter[Denial]:
        """What failed since the last call, at most ``EVENTS_PER_LOOK_MAX`` of it."""
        found: Counter[Denial] = Counter()
        with suppress(zmq.Again):
            for _ in range(EVENTS_PER_LOOK_MAX):
                event = parse_monitor_message(self._monitor.recv_multipart(int(zmq.NOBLOCK)))
                found[_DENIALS[int(event["event"])]] += 1
        return found

    def close(self) -> None:
        """Before the watched socket is closed."""
        self._watched.disable_monitor()
        self._monitor.close(linger=0)
