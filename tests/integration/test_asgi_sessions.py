"""Sessions of an application that is mounted in another program, under uvicorn."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

import fencepost
from fencepost.protocol.sessions import SessionLimits
from fencepost.server.auth import token_digest
from fencepost.server.embedding import embedded
from fencepost.server.settings import (
    AuthSettings,
    GrantSettings,
    PrincipalSettings,
    ServerSettings,
)
from tests.integration.test_sessions import Raw

ADMIN = {"Authorization": "Bearer admin"}
LIMITS = SessionLimits(frame_bytes_max=4096, in_flight_max=4)


def principal(name: str, streams: str, *verbs: str) -> PrincipalSettings:
    return PrincipalSettings(
        name=name,
        token_sha256=(token_digest(name),),
        grants=(GrantSettings(streams=(streams,), verbs=verbs),),
    )


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The application below `/below` in Starlette on uvicorn, on a port of its own."""
    principals = (principal("admin", "**", "admin"), principal("none", "other/**", "read"))
    settings = ServerSettings(auth=AuthSettings(principals=principals), sessions=LIMITS)
    folder = tmp_path_factory.mktemp("asgi")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with embedded(Path(folder), settings, watch_signals=False) as streams:
            app.mount("/below", streams)
            yield

    app = Starlette(routes=[Mount("/nothing", app=Starlette())], lifespan=lifespan)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            thread.join(0.005)
            assert thread.is_alive()
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/below"
        with fencepost.connect(f"http://127.0.0.1:{port}/below", token="admin") as client:
            session = client.mesh("shop").session("ann").open()
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive(), "an open session holds up the end of the host"
            session.close()
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def session_url(url: str) -> str:
    with fencepost.connect(url, token="admin") as client:
        mesh = client.mesh("shop")
        mesh.make()
        mesh.make_member("ann")
        mesh.make_topic("news", ["ann"])
    return url.replace("http", "ws", 1) + "/v1/mesh/shop/session"


def test_the_client_has_sessions_there_too(url: str, session_url: str) -> None:
    with (
        fencepost.connect(url, token="admin") as client,
        client.mesh("shop").session("ann") as session,
    ):
        sends = [session.send("topic:news", "x" * 500, id=f"m-{n}") for n in range(100)]
        assert [pending.receipt().duplicate for pending in sends] == [False] * 100
        came: list[str] = []
        for delivery in session:
            came += [entry.data["client_message_id"] for entry in delivery.entries]
            assert delivery.ack()
            if len(came) == 100:
                break
        with (
            client.mesh("shop").session("ann"),
            pytest.raises(fencepost.SessionReplacedError),
        ):
            next(session)

    assert came == [f"m-{n}" for n in range(100)]


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 401, "unauthorized"),
        ({"Authorization": "Bearer none"}, 403, "forbidden"),
        ({**ADMIN, "Origin": "https://evil.example"}, 403, "origin_not_allowed"),
    ],
)
def test_a_request_that_may_not_is_answered_before_the_upgrade(
    session_url: str, headers: dict[str, str], status: int, code: str
) -> None:
    with pytest.raises(InvalidStatus) as refused, connect(session_url, additional_headers=headers):
        pass

    assert refused.value.response.status_code == status
    assert json.loads(refused.value.response.body)["code"] == code


@pytest.mark.parametrize(
    ("data", "close"),
    [("[]", 1007), (b"{}", 1003), (f'{{"id":1,"send":{{"body":"{"x" * 5000}"}}}}', 1009)],
)
def test_a_frame_that_is_none_closes(session_url: str, data: str | bytes, close: int) -> None:
    with connect(session_url, additional_headers=ADMIN, compression=None) as socket:
        raw = Raw(socket)
        raw.hello()
        socket.send(data)
        assert raw.end()[0] == close
