"""Under which name other servers of the same database reach this one."""

import socket

import pytest

from fencepost.server.running import node_host, url_of
from fencepost.server.settings import ServerSettings


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_server_that_listens_everywhere_is_called_as_its_machine_is(host: str) -> None:
    assert node_host(ServerSettings(), host) == socket.gethostname()


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.7", "::1", "streams-1.internal"])
def test_a_server_that_listens_on_one_address_is_called_by_it(host: str) -> None:
    assert node_host(ServerSettings(), host) == host


def test_a_name_that_was_given_is_the_name() -> None:
    assert node_host(ServerSettings(node_host="streams-1"), "0.0.0.0") == "streams-1"


def test_an_address_with_colons_is_put_in_brackets() -> None:
    assert url_of("::1", 80) == "http://[::1]:80"
    assert url_of("db.example", 80) == "http://db.example:80"
