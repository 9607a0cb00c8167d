"""Meshes in tests of the contract: requests in a line, and what streams hold after them."""

from __future__ import annotations

import json
from typing import Any

from fencepost.protocol.envelopes import Send, parse_send
from fencepost.protocol.fingerprints import Kind
from fencepost.protocol.meshes import MeshSettings
from fencepost.store.mesh_contract import (
    JoinTopic,
    MakeMesh,
    MakeName,
    MeshRequest,
    SendRequest,
)
from tests.contract.subject import Outcome, Subject, answered


async def ask(subject: Subject, request: MeshRequest) -> Outcome:
    return await answered(subject.ask(subject.store.mesh, request))


def a_send(message_id: str = "m-1", **fields: Any) -> Send:
    """A send, with its fields as a client writes them."""
    body = {"kind": "topic", "ref": "alerts", "sender": "bob", **fields}
    if "parts" not in body:
        body.setdefault("body", "hello")
    found = parse_send(
        json.dumps(body).encode(), header_id=message_id, minted_id="minted", principal=None
    )
    assert isinstance(found, Send), found
    return found


async def send(subject: Subject, send: Send, mesh: str = "shop") -> Outcome:
    return await answered(subject.ask(subject.store.send, SendRequest(mesh, send)))


async def named(subject: Subject, kind: Kind, *names: str, mesh: str = "shop") -> None:
    for name in names:
        await ask(subject, MakeName(mesh, kind, name))


async def a_mesh(
    subject: Subject, mesh: str = "shop", settings: MeshSettings | None = None
) -> None:
    """A mesh with the members ann and bea, who listen to the topic alerts, and a queue jobs."""
    await ask(subject, MakeMesh(mesh, settings or MeshSettings()))
    await named(subject, "dm", "ann", "bea", mesh=mesh)
    await named(subject, "topic", "alerts", mesh=mesh)
    await named(subject, "queue", "jobs", mesh=mesh)
    for member in ("ann", "bea"):
        await ask(subject, JoinTopic(mesh, "alerts", member))


async def held(subject: Subject, path: str) -> list[dict[str, Any]]:
    """The messages of a stream."""
    return await subject.messages(path)
