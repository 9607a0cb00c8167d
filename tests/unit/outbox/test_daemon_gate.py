"""Who may ask the daemon, and how much at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fencepost.http.messages import Request, Response
from fencepost.outbox.daemon.gate import Gate, TokenFile, TokenRefusedError
from fencepost.outbox.daemon.settings import OutboxSettings
from fencepost.testing import SimClock


def a_request(path: bytes = b"/v1/send", query: bytes = b"", **headers: str) -> Request:
    named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return Request("POST", path, query, {b"host": b"localhost", **named}, b"")


def code(response: Response | None) -> tuple[int, str] | None:
    if response is None:
        return None
    assert isinstance(response.body, bytes)
    return response.status, msgspec.json.decode(response.body)["code"]


def a_gate(folder: Path, token: TokenFile | None = None, **fields: Any) -> Gate:
    return Gate(OutboxSettings(folder=folder, **fields), SimClock(), token)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:8080", "[::1]", "[::1]:80"]
)
def test_local_names_are_taken(tmp_path: Path, host: str) -> None:
    assert a_gate(tmp_path).refuse(a_request(host=host)) is None


@pytest.mark.parametrize(
    "host", ["", "evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "[::2]", "0.0.0.0"]
)
def test_other_names_are_refused(tmp_path: Path, host: str) -> None:
    assert code(a_gate(tmp_path).refuse(a_request(host=host))) == (403, "host_not_allowed")


def test_a_missing_host_and_any_origin_are_refused(tmp_path: Path) -> None:
    gate = a_gate(tmp_path)

    assert code(gate.refuse(Request("GET", b"/v1/health", b"", {}, b""))) == (
        403,
        "host_not_allowed",
    )
    for origin in ("null", "http://localhost", "https://evil.example"):
        assert code(gate.refuse(a_request(origin=origin))) == (403, "origin_not_allowed")


@pytest.mark.parametrize("query", [b"token=x", b"a=b&ACCESS_TOKEN=x", b"t%6Fken=x"])
def test_a_token_in_the_url_is_refused(tmp_path: Path, query: bytes) -> None:
    assert code(a_gate(tmp_path).refuse(a_request(query=query))) == (400, "token_in_url")


def test_the_65th_request_in_flight_is_refused(tmp_path: Path) -> None:
    gate = a_gate(tmp_path)
    for _ in range(64):
        assert gate.enter() is None

    assert code(gate.enter()) == (429, "too_many_requests")
    gate.leave()
    assert gate.enter() is None


def a_token_file(folder: Path, clock: SimClock) -> TokenFile:
    return TokenFile(folder / "token", clock, grace_ms=60_000)


def test_a_token_has_so_many_requests_a_second(tmp_path: Path) -> None:
    clock = SimClock()
    token = a_token_file(tmp_path, clock)
    gate = Gate(OutboxSettings(folder=tmp_path, requests_per_s=5), clock, token)
    asked = a_request(authorization=f"Bearer {(tmp_path / 'token').read_text().strip()}")

    found = [code(gate.refuse(asked)) for _ in range(6)]

    assert found == [None] * 5 + [(429, "too_many_requests")]
    clock.advance(200)
    assert gate.refuse(asked) is None


def test_the_port_wants_a_token_on_health_too_unless_that_is_public(tmp_path: Path) -> None:
    token = a_token_file(tmp_path, SimClock())

    health = a_request(b"/v1/health")
    assert code(a_gate(tmp_path, token).refuse(health)) == (401, "unauthorized")
    public = a_gate(tmp_path, token, public_health=True)
    assert public.refuse(health) is None
    assert code(public.refuse(a_request())) == (401, "unauthorized")


def test_a_replaced_token_is_taken_for_a_minute(tmp_path: Path) -> None:
    clock = SimClock()
    token = a_token_file(tmp_path, clock)
    file = tmp_path / "token"
    old, new = file.read_text().strip().encode(), b"n" * 32
    assert token.knows(old)

    file.write_bytes(new + b"\n")
    clock.advance(1000)

    assert token.knows(new)
    assert token.knows(old)
    clock.advance(59_999)
    assert token.knows(old)
    clock.advance(1)
    assert not token.knows(old)
    assert token.knows(new)


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("x" * 32)
    (tmp_path / "token").chmod(0o644)

    with pytest.raises(TokenRefusedError, match="chmod 600"):
        a_token_file(tmp_path, SimClock())


def test_a_token_that_is_too_short_is_refused_and_never_taken_up(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("short")
    file.chmod(0o600)
    with pytest.raises(TokenRefusedError, match="16 bytes"):
        a_token_file(tmp_path, SimClock())

    file.unlink()
    clock = SimClock()
    token = a_token_file(tmp_path, clock)
    assert os.stat(file).st_mode & 0o777 == 0o600
    file.write_text("")
    clock.advance(1000)

    assert not token.knows(b"")


def test_a_new_token_in_a_file_that_others_can_read_is_not_taken(tmp_path: Path) -> None:
    clock = SimClock()
    token = a_token_file(tmp_path, clock)
    file = tmp_path / "token"
    old = file.read_text().strip().encode()

    file.write_text("n" * 32)
    file.chmod(0o644)
    clock.advance(1000)
    assert not token.knows(b"n" * 32)
    assert token.knows(old)

    file.chmod(0o600)
    clock.advance(1000)
    assert token.knows(b"n" * 32)
