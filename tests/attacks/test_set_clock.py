"""An expired token stays out, also when the machine's clock is set while the server runs."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fencepost import clock as clock_module
from fencepost.server.settings import (
    AuthSettings,
    GrantSettings,
    PrincipalSettings,
    ServerSettings,
)
from fencepost.store.settings import SqliteSettings
from fencepost.testing import TestServer

HOUR_S = 3600


class SetClock:
    """The module `time` for the server, with a wall clock that was set by so many seconds."""

    def __init__(self) -> None:
        self.set_s = 0

    def time_ns(self) -> int:
        return time.time_ns() + self.set_s * 1_000_000_000

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()


async def test_expired_tokens_stay_out_when_the_clock_is_set_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual machine that was suspended for an hour looks the same to the server."""
    machine = SetClock()
    monkeypatch.setattr(clock_module, "time", machine)
    key = Ed25519PrivateKey.generate()
    settings = ServerSettings(auth=_auth(tmp_path, key))
    sent = {"Authorization": f"Bearer {_token(key, ends_s=int(time.time()) + HOUR_S // 2)}"}

    async with (
        TestServer(SqliteSettings(folder=tmp_path / "data"), settings=settings) as server,
        httpx.AsyncClient(base_url=server.url, headers=sent) as client,
    ):
        before = await client.put("/v1/stream/a")
        asked = {"stream": "a", "ttl_s": HOUR_S // 2}
        read_token = (await client.post("/v1/tokens", json=asked)).json()["token"]
        machine.set_s = HOUR_S
        after = await client.get("/v1/stream/a")
        reader = {"Authorization": f"Bearer {read_token}"}
        read = await client.get("/v1/stream/a", headers=reader)
        machine.set_s = 0
        again = await client.get("/v1/stream/a")

    assert before.status_code == 201
    assert after.status_code == 401
    assert read.status_code == 401
    assert again.status_code == 200


async def test_the_date_is_that_of_the_clock_as_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = SetClock()
    monkeypatch.setattr(clock_module, "time", machine)

    async with (
        TestServer(SqliteSettings(folder=tmp_path)) as server,
        httpx.AsyncClient(base_url=server.url) as client,
    ):
        for set_s in (24 * HOUR_S, -24 * HOUR_S):
            machine.set_s = set_s
            while abs(await _date_s(client) - time.time() - set_s) > HOUR_S:
                pass  # the server looks at its clock once a second


async def _date_s(client: httpx.AsyncClient) -> float:
    answer = await client.get("/healthz")
    return parsedate_to_datetime(answer.headers["Date"]).timestamp()


def _auth(folder: Path, key: Ed25519PrivateKey) -> AuthSettings:
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (folder / "key.pem").write_bytes(public)
    grants = (GrantSettings(streams=("**",), verbs=("read", "create")),)
    return AuthSettings(
        principals=(PrincipalSettings(name="ann", subjects=("ann",), grants=grants),),
        jwt_keys=str(folder / "key.pem"),
        jwt_issuer="https://issuer.test",
        jwt_audience="fencepost",
    )


def _token(key: Ed25519PrivateKey, *, ends_s: int) -> str:
    claims = {"iss": "https://issuer.test", "aud": "fencepost", "sub": "ann", "exp": ends_s}
    return jwt.encode(claims, key, algorithm="EdDSA")
