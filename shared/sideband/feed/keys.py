"""Key files of the feed's connections: CURVE pairs in the format of ``zmq.auth``, kept from others.

A pair NAME is two files: ``NAME.key_secret`` holds both halves and is its owner's alone (mode 600),
``NAME.key`` holds the public half. Secrets are never in a message, a log or a repr.

Errors: BadKeyFile.
"""

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

from sideband.errors import InvalidInput
from sideband.feed.errors import BadKeyFile
from sideband.ids import check_id

SECRET_SUFFIX: Final = ".key_secret"
PUBLIC_SUFFIX: Final = ".key"
RANKS_DIR: Final = "ranks"  # public keys that the feed lets in
FEED_NAME: Final = "feed"
RANK_NAME: Final = "rank"
KEY_FILE_BYTES_MAX: Final = 4096  # the format needs about 400
_KEY_BYTES: Final = 32
_OTHERS_READ: Final = 0o077
_OTHERS_WRITE: Final = 0o022


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Both halves, Z85."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedKeys:
    """The feed's own pair, and the folder of the public keys that may connect to it.

    The folder is read again when it changes; a key that is gone from it lets nobody in any more,
    and whoever is connected stays until the connection ends.
    """

    feed_key: Path | str  # feed.key_secret
    ranks_dir: Path | str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankKeys:
    """A rank's own pair, and the public key of the feed that it means to reach. Only paths: they
    are read in the process that connects."""

    feed_key: Path | str  # feed.key
    rank_key: Path | str  # rank.key_secret

    def load(self) -> "LoadedRankKeys":
        """What is in the files. Raises BadKeyFile."""
        return LoadedRankKeys(read_public(self.feed_key), read_pair(self.rank_key))


@dataclass(frozen=True, slots=True)
class LoadedRankKeys:
    """The feed's public key, and the rank's own pair."""

    feed_public: bytes
    own: KeyPair


def read_public(path: Path | str) -> bytes:
    """The public half in a file that only its owner may change. Raises BadKeyFile."""
    return _read(Path(path), forbidden=_OTHERS_WRITE, rule="others may change it: chmod go-w")[0]


def read_pair(path: Path | str) -> KeyPair:
    """Both halves of a file that only its owner may read. Raises BadKeyFile."""
    path = Path(path)
    public, secret = _read(path, forbidden=_OTHERS_READ, rule="others may read it: chmod 600")
    if secret is None:
        raise BadKeyFile(path, f"holds no secret key: the {SECRET_SUFFIX} file is needed")
    if zmq.curve_public(secret) != public:
        raise BadKeyFile(path, "its two halves do not belong together")
    return KeyPair(public, secret)


def _read(path: Path, *, forbidden: int, rule: str) -> tuple[bytes, bytes | None]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise BadKeyFile(path, "is not a file")
        if stat.S_IMODE(status.st_mode) & forbidden:
            raise BadKeyFile(path, rule)
        if status.st_size > KEY_FILE_BYTES_MAX:
            raise BadKeyFile(path, f"is over {KEY_FILE_BYTES_MAX} bytes")
        public, secret = load_certificate(path)
    except OSError as exc:
        raise BadKeyFile(path, exc.strerror or "cannot be read") from exc
    except ValueError as exc:  # its message names the file and nothing in it
        raise BadKeyFile(path, "holds no public key") from exc
    for half in (public, secret):
        if half is not None and not _is_key(half):
            raise BadKeyFile(path, "a key must be 40 characters of Z85")
    return public, secret


def _is_key(text: bytes) -> bool:
    try:
        return len(text) == 40 and len(z85.decode(text)) == _KEY_BYTES
    except (KeyError, ValueError):
        return False


def make_keys(folder: Path | str, ranks: Iterable[str] = (RANK_NAME,)) -> list[Path]:
    """Make what is missing in ``folder``: the feed's pair, and one for each name of ``ranks``.

    Their public halves go to ``ranks/``, where the feed looks. Nothing is overwritten; what is
    there is checked. Returns the files that were made. Raises BadKeyFile, InvalidInput for a name.
    """
    folder, names = Path(folder), list(ranks)
    for name in names:
        if check_id("rank", name) == FEED_NAME:
            raise InvalidInput("rank", name, "is the name of the feed's own keys")
    for one in (folder, folder / RANKS_DIR):
        try:
            one.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise BadKeyFile(one, exc.strerror or "cannot be made") from exc
    made = _make_pair(folder / f"{FEED_NAME}{SECRET_SUFFIX}", folder)
    for name in names:
        made += _make_pair(folder / f"{name}{SECRET_SUFFIX}", folder / RANKS_DIR)
    return made


def _make_pair(secret_path: Path, public_folder: Path) -> list[Path]:
    public_path = public_folder / f"{secret_path.name.removesuffix(SECRET_SUFFIX)}{PUBLIC_SUFFIX}"
    made = []
    if not secret_path.exists():
        public, secret = zmq.curve_keypair()
        _write(secret_path, _certificate(public, secret), mode=0o600)
        made.append(secret_path)
    pair = read_pair(secret_path)
    if not public_path.exists():
        _write(public_path, _certificate(pair.public), mode=0o644)
        made.append(public_path)
    if read_public(public_path) != pair.public:
        raise BadKeyFile(public_path, f"is not the public half of {secret_path}")
    return made


def _certificate(public: bytes, secret: bytes | None = None) -> bytes:
    lines = ["metadata", "curve", f'    public-key = "{public.decode()}"']
    if secret is not None:
        lines.append(f'    secret-key = "{secret.decode()}"')
    return ("\n".join(lines) + "\n").encode()


def _write(path: Path, content: bytes, *, mode: int) -> None:
    """A new file with its mode from the first byte on; never one that was there."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as exc:
        raise BadKeyFile(path, exc.strerror or "cannot be written") from exc
