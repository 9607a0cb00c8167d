"""Messages that are valid and still hard to read: none of them stands in the way of the others."""

from decimal import Decimal

import httpx
import pytest

import fencepost
from tests.serving import ServerProcess

JSON = "application/json"


def post(server: ServerProcess, path: str, body: bytes, content_type: str = JSON) -> None:
    """Store bytes as they are: the client would not make such messages."""
    url = f"{server.url}/v1/stream/{path}"
    httpx.post(url, content=body, headers={"content-type": content_type}).raise_for_status()


@pytest.fixture
def client(server_process: ServerProcess) -> fencepost.Client:
    return fencepost.connect(server_process.url)


def test_numbers_beyond_a_float_are_read_and_do_not_hide_what_follows(
    client: fencepost.Client, server_process: ServerProcess
) -> None:
    digits = "9" * 5000
    with client:
        odd = client.create("odd-numbers")
        post(
            server_process, "odd-numbers", b'[1e999, {"n": -1e400}, %s, "after"]' % digits.encode()
        )

        read = list(odd.read())
        logged = [entry.data for entry in client.log(streams=["odd-numbers"])]

    assert read == [float("inf"), {"n": float("-inf")}, Decimal(digits), "after"]
    assert logged == read


def test_text_that_is_not_utf_8_is_an_error_of_ours_and_readable_as_bytes(
    client: fencepost.Client, server_process: ServerProcess
) -> None:
    with client:
        odd = client.create("odd-text", content_type="text/plain")
        post(server_process, "odd-text", b"\xff\xfe", "text/plain")

        with pytest.raises(fencepost.UnreadableError, match="not UTF-8"):
            list(odd.read())
        assert odd.read().bytes() == b"\xff\xfe"


def test_a_message_too_deep_for_this_stack_is_an_error_of_ours(
    client: fencepost.Client, server_process: ServerProcess
) -> None:
    def deep(frames: int) -> list[object]:
        return list(odd.read()) if frames == 0 else deep(frames - 1)

    with client:
        odd = client.create("odd-depth")
        post(server_process, "odd-depth", b"[" * 500 + b"]" * 500)

        with pytest.raises(fencepost.UnreadableError, match="too deeply"):
            deep(600)
