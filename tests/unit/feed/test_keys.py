"""Key files: made for their owner alone, and refused by name when they are anything else."""

import os
import stat
from pathlib import Path

import pytest
import zmq
from zmq.auth import create_certificates

from sideband.errors import InvalidInput
from sideband.feed.curve import KeyRing
from sideband.feed.errors import BadKeyFile
from sideband.feed.keys import FeedKeys, RankKeys, make_keys, read_pair, read_public


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_secrets_are_for_their_owner_alone_from_the_first_byte(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = make_keys(tmp_path / "keys", ["rank-0", "rank-1"])
    finally:
        os.umask(before)
    names = {str(path.relative_to(tmp_path / "keys")) for path in made}
    assert names == {
        "feed.key_secret", "feed.key",
        "rank-0.key_secret", "ranks/rank-0.key",
        "rank-1.key_secret", "ranks/rank-1.key",
    }  # fmt: skip
    for path in made:
        assert mode_of(path) == (0o600 if path.suffix == ".key_secret" else 0o644)
    assert mode_of(tmp_path / "keys") == mode_of(tmp_path / "keys" / "ranks") == 0o700
    pair = read_pair(tmp_path / "keys" / "rank-0.key_secret")
    assert read_public(tmp_path / "keys" / "ranks" / "rank-0.key") == pair.public
    assert zmq.curve_public(pair.secret) == pair.public


def test_nothing_is_overwritten_and_what_is_missing_is_made(tmp_path: Path) -> None:
    make_keys(tmp_path)
    feed, rank = read_pair(tmp_path / "feed.key_secret"), read_pair(tmp_path / "rank.key_secret")
    assert make_keys(tmp_path) == []
    (tmp_path / "ranks" / "rank.key").unlink()
    assert make_keys(tmp_path, ["rank", "late"]) == [
        tmp_path / "ranks" / "rank.key",
        tmp_path / "late.key_secret",
        tmp_path / "ranks" / "late.key",
    ]
    assert read_pair(tmp_path / "feed.key_secret") == feed
    assert read_pair(tmp_path / "rank.key_secret") == rank
    assert read_public(tmp_path / "ranks" / "rank.key") == rank.public


def test_halves_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    make_keys(tmp_path, ["a", "b"])
    public = tmp_path / "ranks" / "a.key"
    public.write_bytes((tmp_path / "ranks" / "b.key").read_bytes())
    with pytest.raises(BadKeyFile, match="not the public half"):
        make_keys(tmp_path, ["a"])
    mixed = (tmp_path / "a.key_secret").read_text().splitlines()[:3]
    mixed += (tmp_path / "b.key_secret").read_text().splitlines()[3:]
    (tmp_path / "a.key_secret").write_text("\n".join(mixed))
    with pytest.raises(BadKeyFile, match="do not belong together"):
        read_pair(tmp_path / "a.key_secret")


def test_files_of_zmq_itself_are_read_once_they_are_closed_to_others(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        public, secret = create_certificates(tmp_path, "other")
    finally:
        os.umask(before)
    with pytest.raises(BadKeyFile, match="chmod 600"):
        read_pair(secret)
    Path(secret).chmod(0o600)
    assert read_public(public) == read_pair(secret).public


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o601, 0o777])
def test_a_secret_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    make_keys(tmp_path)
    path = tmp_path / "rank.key_secret"
    path.chmod(mode)
    with pytest.raises(BadKeyFile, match="chmod 600") as caught:
        read_pair(path)
    assert caught.value.path == path


KEY = "a" * 40


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "no public key"),
        (b"\xff\xfe\x00", "no public key"),
        (b'public-key = "short"\n', "40 characters of Z85"),
        (f'public-key = "{KEY[:-1]}~"\n'.encode(), "40 characters of Z85"),
        (f'public-key = "{KEY}"\nsecret-key = "x"\n'.encode(), "40 characters of Z85"),
        (f'public-key = "{KEY}"\n'.encode(), "no secret key"),
        (b"#" * 5000, "over 4096 bytes"),
    ],
)
def test_a_file_that_is_no_key_is_refused_and_not_shown(
    tmp_path: Path, content: bytes, rule: str
) -> None:
    path = tmp_path / "one.key_secret"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(BadKeyFile, match=rule) as caught:
        read_pair(path)
    assert KEY not in str(caught.value)


def test_a_missing_file_a_folder_and_an_unwritable_place_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadKeyFile, match="No such file"):
        read_pair(tmp_path / "none.key_secret")
    with pytest.raises(BadKeyFile, match="is not a file"):
        read_public(tmp_path)
    (tmp_path / "ranks").write_bytes(b"")
    with pytest.raises(BadKeyFile, match="exists"):
        make_keys(tmp_path)


@pytest.mark.parametrize("name", ["", ".", "../up", "a/b", "feed", "x\n", "n" * 129])
def test_a_name_of_a_rank_is_an_id_and_not_that_of_the_feed(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput):
        make_keys(tmp_path / "keys", [name])
    assert not list(tmp_path.glob("*.key*"))


def test_secrets_are_not_in_what_is_shown_of_them(tmp_path: Path) -> None:
    make_keys(tmp_path)
    pair = read_pair(tmp_path / "rank.key_secret")
    loaded = RankKeys(feed_key=tmp_path / "feed.key", rank_key=tmp_path / "rank.key_secret").load()
    feed = FeedKeys(feed_key=tmp_path / "feed.key_secret", ranks_dir=tmp_path / "ranks")
    for shown in (repr(pair), repr(loaded), repr(feed)):
        assert pair.secret.decode() not in shown


def test_the_ring_knows_what_changes_in_its_folder_and_trusts_no_open_one(tmp_path: Path) -> None:
    make_keys(tmp_path, ["a"])
    ring = KeyRing(tmp_path / "ranks")
    a = read_pair(tmp_path / "a.key_secret").public
    assert ring.keys() == {a}
    make_keys(tmp_path, ["b"])
    b = read_pair(tmp_path / "b.key_secret").public
    assert ring.keys() == {a, b}
    (tmp_path / "ranks" / "a.key").unlink()
    assert ring.callback("sideband", b)
    assert not ring.callback("sideband", a)
    for path in (tmp_path / "ranks" / "b.key", tmp_path / "ranks"):
        before = mode_of(path)
        path.chmod(before | 0o020)
        assert not KeyRing(tmp_path / "ranks").callback("sideband", b)
        with pytest.raises(BadKeyFile, match="chmod go-w"):
            KeyRing(tmp_path / "ranks").keys()
        path.chmod(before)
    (tmp_path / "ranks" / "b.key").unlink()
    (tmp_path / "ranks").rmdir()
    assert not ring.callback("sideband", b)
