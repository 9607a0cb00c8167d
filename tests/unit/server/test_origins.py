"""Which pages an open server takes requests from, as rules of plain values."""

import pytest

from fencepost.server.origins import is_allowed, is_local, may_cross

LOCALHOST = frozenset(("localhost",))


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost",
        "http://localhost:5173",
        "https://app.localhost:3000",
        "http://127.0.0.1:8000",
        "http://127.9.9.9",
        "http://[::1]:8000",
    ],
)
def test_pages_on_the_machine_of_the_browser_are_local(origin: str) -> None:
    assert is_allowed(origin, LOCALHOST)


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "null",
        "file://",
        "http://evil.example",
        "http://localhost.evil.example",
        "http://evillocalhost",
        "http://192.168.0.2",
        "http://localhost@evil.example",
        "http://[::1",
        "chrome-extension://localhost",
    ],
)
def test_other_origins_are_not(origin: str) -> None:
    assert not is_allowed(origin, LOCALHOST)
    assert is_allowed(origin, frozenset(("*",)))


def test_an_origin_that_is_named_is_allowed_and_its_neighbours_are_not() -> None:
    named = frozenset(("https://app.example",))

    assert is_allowed("https://app.example", named)
    assert not is_allowed("http://app.example", named)
    assert not is_allowed("https://app.example:444", named)
    assert not is_allowed("http://localhost", named)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("localhost.:80", True),
        ("10.0.0.7:4437", True),
        ("[fe80::1]", True),
        ("streams.example", True),
        ("streams.example:8443", True),
        ("", False),
        ("evil.example", False),
        ("streams.example.evil", False),
        ("1.2.3.4.evil", False),
    ],
)
def test_only_names_that_a_stranger_cannot_rebind_are_ours(host: str, expected: bool) -> None:
    assert is_local(host, frozenset(("streams.example",))) == expected


@pytest.mark.parametrize(
    ("method", "path", "query", "expected"),
    [
        ("GET", b"/v1/streams", b"", True),
        ("HEAD", b"/v1/stream/a", b"", True),
        ("POST", b"/v1/stream/a", b"", True),
        ("POST", b"/v1/commit", b"", True),
        ("POST", b"/v1/staging/t/p", b"", True),
        ("POST", b"/v1/stream/a", b"truncate&before=now", False),
        ("POST", b"/v1/stream/a", b"%74runcate=", False),
        ("POST", b"/v1/stream/__ds/subscriptions/s/claim", b"", False),
        ("POST", b"/v1/writers/w", b"", False),
        ("PUT", b"/v1/stream/a", b"", False),
        ("DELETE", b"/v1/stream/a", b"", False),
        ("PATCH", b"/v1/stream/a", b"", False),
    ],
)
def test_pages_of_other_origins_read_and_append(
    method: str, path: bytes, query: bytes, expected: bool
) -> None:
    assert may_cross(method, path, query) == expected
