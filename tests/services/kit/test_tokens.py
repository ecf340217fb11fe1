"""Bearer tokens: scopes, several at once, rotated while the service runs, never shown."""

import asyncio
import os
from hmac import compare_digest
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import SecretStr, ValidationError

from services.kit import auth
from services.kit.auth import TokenFileUnusable, Tokens
from tests.services.kit.test_kit import StubSettings, assert_problem, client, stub_app

ADMIN, DATA, NEW = "admin-token-of-tests", "data-token-of-tests!", "new-token-of-tests!!"


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def write(path: Path, *, mode: int = 0o600, **tokens: list[str]) -> Path:
    aside = path.with_suffix(".new")
    aside.write_bytes(msgspec.json.encode(tokens))
    aside.chmod(mode)
    os.replace(aside, path)  # as secrets are mounted: whole, or not
    return path


async def test_a_data_token_opens_what_environments_use_and_nothing_else() -> None:
    settings = StubSettings(admin_tokens=(SecretStr(ADMIN),), data_tokens=(SecretStr(DATA),))
    async with client(stub_app(settings)) as http:
        item = {"size_bytes": 1}
        for token in (ADMIN, DATA):
            done = await http.post("/v1/items", json=item, headers=bearer(token))
            assert done.status_code == 200
        assert (await http.get("/v1/config", headers=bearer(ADMIN))).status_code == 200
        assert_problem(await http.get("/v1/config", headers=bearer(DATA)), 403, "forbidden")
        assert_problem(await http.post("/v1/items", json=item), 401, "unauthorized")
        assert_problem(await http.get("/v1/config", headers=bearer(NEW)), 401, "unauthorized")
        basic = {"authorization": f"Basic {ADMIN}"}
        assert_problem(await http.get("/v1/config", headers=basic), 401, "unauthorized")


def test_every_token_is_compared_in_constant_time_whichever_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Timing is not asserted: each comparison must be the one that does not tell."""
    compared: list[bytes] = []

    def compare(given: bytes, valid: bytes) -> bool:
        compared.append(valid)
        return compare_digest(given, valid)

    monkeypatch.setattr("hmac.compare_digest", compare)
    tokens = Tokens(admin=(SecretStr(ADMIN), SecretStr(NEW)), data=(SecretStr(DATA),))
    for given, scopes in ((ADMIN, {"admin", "data"}), (DATA, {"data"}), ("none-of-them", set())):
        compared.clear()
        assert tokens.scopes(f"Bearer {given}") == scopes
        assert sorted(compared) == sorted(token.encode() for token in (ADMIN, NEW, DATA))


async def test_tokens_are_rotated_while_the_service_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "RELOAD_S", 0.02)
    file = write(tmp_path / "tokens.json", admin=[ADMIN])
    app = stub_app(StubSettings(host="0.0.0.0", tokens_file=file))

    async def until(token: str, status: int) -> None:
        async with asyncio.timeout(10):
            while (await get(token)).status_code != status:  # noqa: ASYNC110 - polled
                await asyncio.sleep(0.01)

    async with app.router.lifespan_context(app), client(app) as http:

        async def get(token: str) -> Any:
            return await http.get("/v1/config", headers=bearer(token))

        assert (await get(ADMIN)).status_code == 200
        write(file, admin=[ADMIN, NEW])
        await until(NEW, 200)
        assert (await get(ADMIN)).status_code == 200
        write(file, admin=[NEW])
        await until(ADMIN, 401)
        file.write_text("{")  # a bad file changes nothing
        await asyncio.sleep(0.1)
        assert (await get(NEW)).status_code == 200
        file.unlink()
        await asyncio.sleep(0.1)
        assert (await get(NEW)).status_code == 200
        write(file, admin=[ADMIN])
        await until(ADMIN, 200)


async def test_a_bad_file_fails_the_start(tmp_path: Path) -> None:
    app = stub_app(StubSettings(tokens_file=tmp_path / "absent"))
    with pytest.raises(TokenFileUnusable, match="No such file"):
        async with app.router.lifespan_context(app):
            pass


BAD_FILES: dict[str, tuple[bytes, int, str]] = {
    "not JSON": (b"secret-that-nobody-may-see", 0o600, "is not JSON"),
    "short token": (b'{"admin": ["secret-that"]}', 0o600, "16 characters"),
    "unknown key": (b'{"admn": ["secret-that-nobody-may-see"]}', 0o600, "is not JSON with"),
    "no admin": (b'{"data": ["secret-that-nobody-may-see"]}', 0o600, "no admin token"),
    "readable by others": (b'{"admin": ["secret-that-nobody-may-see"]}', 0o640, "chmod 600"),
    "huge": (b" " * 70_000, 0o600, "is over"),
}


@pytest.mark.parametrize("case", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_file_is_refused_without_showing_it(
    case: tuple[bytes, int, str], tmp_path: Path
) -> None:
    content, mode, reason = case
    file = tmp_path / "tokens.json"
    file.write_bytes(content)
    file.chmod(mode)
    with pytest.raises(TokenFileUnusable, match=reason) as refused:
        Tokens(file=file).reload()
    assert "secret" not in str(refused.value)


def test_without_tokens_a_service_is_open_and_a_file_alone_closes_it(tmp_path: Path) -> None:
    assert Tokens().allows("", "admin")
    closed = Tokens(file=write(tmp_path / "tokens.json", admin=[ADMIN], data=[DATA]))
    assert not closed.allows(f"Bearer {ADMIN}", "admin")  # not read yet: nobody comes in
    assert closed.reload()
    assert not closed.reload()
    assert closed.scopes(f"Bearer {ADMIN}") == {"admin", "data"}
    assert closed.scopes(f"bearer  {DATA} ") == {"data"}
    assert not closed.allows("", "data")


def test_data_tokens_alone_are_refused() -> None:
    with pytest.raises(ValidationError, match="set both or none"):
        StubSettings(data_tokens=(SecretStr(DATA),))
    with pytest.raises(ValidationError, match="data_tokens has a token under 16"):
        StubSettings(admin_tokens=(SecretStr(ADMIN),), data_tokens=(SecretStr("short"),))
