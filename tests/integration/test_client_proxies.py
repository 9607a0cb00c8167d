"""The client behind an HTTP proxy: absolute-form requests for http, tunnels for https."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import fencepost
from tests.certificates import certificates
from tests.faults.proxy import Proxy as TlsProxy
from tests.http_proxy import HttpProxy
from tests.serving import ServerProcess
from tests.twins import Connect
from tests.twins import connect as connect

NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
HERE = "http://streams.example:4437"
ONCE = fencepost.Retries(attempts_max=1)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, *map(str.lower, NAMES), "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def proxy(server_process: ServerProcess) -> Iterator[HttpProxy]:
    with HttpProxy(server_process.port) as proxy:
        yield proxy


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
async def test_a_server_is_reached_through_the_proxy_of_the_environment(
    connect: Connect,
    proxy: HttpProxy,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    name: str,
) -> None:
    monkeypatch.setenv(name, f"127.0.0.1:{proxy.port}")  # without a scheme, as many write it
    async with connect(HERE) as client:
        stream = await client.create(path)
        async with stream.producer("p") as producer:
            for number in range(100):
                await producer.append(number)
            await producer.close(stream=True)

        assert await stream.follow().messages() == list(range(100))
        assert (await stream.head()).closed

    assert proxy.asked[0] == (f"PUT {HERE}/v1/stream/{path} HTTP/1.1", None)
    assert all(HERE in first for first, _ in proxy.asked)


async def test_following_goes_through_the_proxy(
    connect: Connect, proxy: HttpProxy, path: str
) -> None:
    async with connect(HERE, proxy=proxy.url) as client:
        stream = await client.create(path, messages=[1])
        async with stream.follow() as reading:
            assert await anext(aiter(reading)) == 1
            await stream.append(2)
            assert await anext(aiter(reading)) == 2


async def test_a_proxy_is_given_its_credentials(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    expected = "Basic dXNlcjpwQHNz"  # user:p@ss
    with HttpProxy(server_process.port, authorization=expected) as proxy:
        url = proxy.url.replace("http://", "http://user:p%40ss@")
        async with connect(HERE, proxy=url) as client:
            await client.create(path)

        async with connect(HERE, proxy=proxy.url, retries=ONCE) as client:
            with pytest.raises(fencepost.ResponseError) as refused:
                await client.stream(path).head()

    assert refused.value.status == 407
    assert proxy.asked[0][1] == expected


async def test_https_goes_through_a_tunnel(
    connect: Connect, server_process: ServerProcess, tmp_path: Path, path: str
) -> None:
    here, there = certificates(tmp_path)
    async with TlsProxy("127.0.0.1", server_process.port, ssl=there) as tls:
        with HttpProxy(tls.port, authorization="Basic dTpw") as proxy:
            through = proxy.url.replace("http://", "http://u:p@")
            url = f"https://127.0.0.1:{tls.port}"
            async with connect(url, ssl=here, proxy=through, token="secret") as client:
                stream = await client.create(path)
                async with stream.producer("p") as producer:
                    for number in range(100):
                        await producer.append(number)

                assert await stream.read().messages() == list(range(100))

            assert {first for first, _ in proxy.asked} == {f"CONNECT 127.0.0.1:{tls.port} HTTP/1.1"}


async def test_a_tunnel_that_is_refused_says_so(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    with HttpProxy(server_process.port, authorization="Basic other") as proxy:
        given = {"proxy": proxy.url, "retries": ONCE}
        async with connect("https://streams.example", **given) as client:
            with pytest.raises(fencepost.ConnectionFailedError, match="407 Who are you") as failed:
                await client.stream(path).head()
            producer = client.stream(path).producer("p", delivery_seconds_max=0.2)
            await producer.append(1)
            with pytest.raises(fencepost.ProducerFailedError, match="407 Who are you"):
                await producer.close()

    assert not failed.value.sent


async def test_a_proxy_that_is_not_there_is_named(connect: Connect, closed_port: int) -> None:
    for url in (HERE, HERE.replace("http:", "https:")):
        async with connect(url, proxy=f"127.0.0.1:{closed_port}", retries=ONCE) as client:
            with pytest.raises(fencepost.ConnectionFailedError, match="through the proxy"):
                await client.stream("s").head()


@pytest.fixture
async def closed_port() -> int:
    """A port that was free a moment ago."""
    server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port


async def test_this_machine_and_no_proxy_are_reached_directly(
    connect: Connect,
    server_process: ServerProcess,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    closed_port: int,
) -> None:
    monkeypatch.setenv("ALL_PROXY", f"http://127.0.0.1:{closed_port}")
    async with connect(server_process.url) as client:
        await client.create(path)

    # Nothing is sent to names that no name server knows: where it would go is enough.
    through = fencepost.connect(HERE)._driver.settings.address
    assert through.reached_at == ("127.0.0.1", closed_port)
    assert fencepost.connect(HERE, proxy=False)._driver.settings.address.proxy is None
    monkeypatch.setenv("NO_PROXY", "streams.example")
    assert fencepost.connect(HERE)._driver.settings.address.proxy is None


@pytest.mark.parametrize(
    "url",
    [
        "ftp://proxy:1",
        "socks5://proxy:1",
        "https://proxy:1",
        "http://",
        "http://proxy:no",
        "http://proxy:0",
        "http://proxy/path",
        "http://[::1",
    ],
)
async def test_a_bad_proxy_is_an_error_before_anything_is_sent(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    with pytest.raises(fencepost.InvalidArgumentError, match="proxy is not a proxy like http://"):
        connect(HERE, proxy=url)
    monkeypatch.setenv("HTTP_PROXY", url)
    with pytest.raises(fencepost.InvalidArgumentError, match="HTTP_PROXY is not a proxy"):
        connect(HERE)
