"""Which proxy a server is reached through, as the environment says."""

from __future__ import annotations

import pytest

from fencepost.client.proxies import Proxy, parse_proxy, proxy_of

PROXY = {"HTTP_PROXY": "http://proxy:3128", "HTTPS_PROXY": "http://secure:3128"}


def found(host: str, environment: dict[str, str], *, port: int = 80, secure: bool = False) -> str:
    proxy = proxy_of(host, port, secure=secure, environment=environment)
    return "" if proxy is None else proxy.host


def test_each_scheme_has_its_proxy_and_all_proxy_is_for_both() -> None:
    assert found("streams.example", PROXY) == "proxy"
    assert found("streams.example", PROXY, secure=True) == "secure"
    for secure in (False, True):
        assert found("x.example", {"ALL_PROXY": "http://any"}, secure=secure) == "any"
    assert found("x.example", {"HTTPS_PROXY": "http://secure"}) == ""
    assert found("x.example", {"http_proxy": "http://small", **PROXY}) == "small"
    assert found("x.example", {"http_proxy": "", **PROXY}) == ""


def test_a_request_to_a_web_server_cannot_name_the_proxy() -> None:
    assert found("x.example", {**PROXY, "REQUEST_METHOD": "GET"}) == ""


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.8.8.8", "::1"])
def test_this_machine_has_no_proxy(host: str) -> None:
    assert found(host, PROXY) == ""


@pytest.mark.parametrize(
    ("host", "listed", "excluded"),
    [
        ("streams.example", "streams.example", True),
        ("streams.example", "STREAMS.example ", True),
        ("a.streams.example", "streams.example", True),
        ("a.streams.example", ".streams.example", True),
        ("a.streams.example", "*.streams.example", True),
        ("otherstreams.example", "streams.example", False),
        ("streams.example", "a.example, streams.example", True),
        ("streams.example", "streams.example:4437", True),
        ("streams.example", "streams.example:80", False),
        ("streams.example", "*", True),
        ("streams.example", "", False),
        ("streams.example", ",", False),
        ("10.1.2.3", "10.0.0.0/8", True),
        ("11.1.2.3", "10.0.0.0/8", False),
        ("10.1.2.3", "10.1.2.3", True),
        ("10.1.2.3", "10.1.2.3:4437", True),
        ("10.1.2.3", "2.3", False),
        ("fd00::1", "fd00::/8", True),
        ("fd00::1", "[fd00::1]", True),
        ("fd00::1", "[fd00::1]:4437", True),
    ],
)
def test_no_proxy_lists_names_parents_ports_and_networks(
    host: str, listed: str, excluded: bool
) -> None:
    environment = {**PROXY, "NO_PROXY": listed}

    assert (found(host, environment, port=4437) == "") is excluded


def test_the_parts_of_a_proxy_url() -> None:
    assert parse_proxy("http://proxy") == Proxy("proxy", 80)
    assert parse_proxy("proxy:3128") == Proxy("proxy", 3128)
    assert parse_proxy("http://[fd00::1]:3128/") == Proxy("fd00::1", 3128)
    assert parse_proxy("http://u:p@proxy:1").authorization == "Basic dTpw"
