"""The request that turns a connection into a WebSocket."""

import pytest

from fencepost.http.upgrade import Upgrade, UpgradeRefused, read_upgrade

HEADERS = {
    b"host": b"localhost",
    b"upgrade": b"websocket",
    b"connection": b"keep-alive, Upgrade",
    b"sec-websocket-version": b"13",
    b"sec-websocket-key": b"dGhlIHNhbXBsZSBub25jZQ==",
}


def upgraded(
    changed: dict[bytes, bytes | None] | None = None,
    *,
    method: str = "GET",
    version: str = "1.1",
    repeated: frozenset[bytes] = frozenset(),
) -> Upgrade | UpgradeRefused:
    headers = {**HEADERS, **(changed or {})}
    given = {name: value for name, value in headers.items() if value is not None}
    return read_upgrade(method, version, given, repeated)


def test_the_key_of_the_rfc_is_answered_as_the_rfc_says() -> None:
    upgrade = upgraded()

    assert upgrade == Upgrade(b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")
    assert upgrade.head(b"Date: now\r\n") == (
        b"HTTP/1.1 101 Switching Protocols\r\nDate: now\r\nUpgrade: websocket\r\n"
        b"Connection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
    )


def test_words_of_headers_are_compared_without_case() -> None:
    assert isinstance(upgraded({b"upgrade": b"WebSocket", b"connection": b"UPGRADE"}), Upgrade)


@pytest.mark.parametrize(
    "changed",
    [
        {b"upgrade": b"h2c"},
        {b"upgrade": b"websocket, h2c"},
        {b"connection": b"keep-alive"},
        {b"connection": None},
        {b"content-length": b"5"},
        {b"transfer-encoding": b"chunked"},
        {b"sec-websocket-key": None},
        {b"sec-websocket-key": b"c2hvcnQ="},
        {b"sec-websocket-key": b"?" * 24},
        {b"sec-websocket-key": b"dGhlIHNhbXBsZSBub25jZQ==\xff"},
    ],
)
def test_a_request_for_something_else_is_refused(changed: dict[bytes, bytes | None]) -> None:
    refused = upgraded(changed)

    assert isinstance(refused, UpgradeRefused)
    assert refused.status == 400


def test_another_method_or_version_of_http_is_refused() -> None:
    assert isinstance(upgraded(method="POST"), UpgradeRefused)
    assert isinstance(upgraded(version="1.0"), UpgradeRefused)


@pytest.mark.parametrize("name", [b"upgrade", b"sec-websocket-key", b"origin"])
def test_a_header_that_came_twice_is_refused(name: bytes) -> None:
    assert isinstance(upgraded(repeated=frozenset({name})), UpgradeRefused)


@pytest.mark.parametrize("other", [b"8", b"14", None])
def test_another_version_of_websockets_is_told_the_known_one(other: bytes | None) -> None:
    refused = upgraded({b"sec-websocket-version": other})

    assert isinstance(refused, UpgradeRefused)
    assert refused.status == 426
    assert refused.headers == ((b"Sec-WebSocket-Version", b"13"),)
