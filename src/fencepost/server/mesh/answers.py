"""Answers about meshes: rows as JSON, refusals as problems."""

from __future__ import annotations

import msgspec

from fencepost.http.messages import Response
from fencepost.protocol.fingerprints import Kind
from fencepost.protocol.groups import LimitExceeded
from fencepost.protocol.meshes import Member, Mesh, MeshDiffers, Queue, Topic
from fencepost.protocol.sends import DedupeRow, MeshNotFound, SendAnswer
from fencepost.server.groups.answers import json_answer
from fencepost.server.handlers import rendering
from fencepost.server.handlers.fields import rfc3339
from fencepost.server.handlers.rendering import refused, retry_after, with_fields
from fencepost.store.contract import Failed, Failure, Unknown
from fencepost.store.mesh_contract import (
    MeshEnding,
    MeshOutcome,
    MeshRequest,
    NameHeld,
    NameMissing,
)

NOUNS: dict[Kind, str] = {"topic": "topic", "dm": "member", "queue": "queue"}

_TITLES = {
    "idempotency_key_reused": "Id reused",
    "mesh_not_found": "No such mesh",
    "destination_not_found": "No such destination",
    "limit_exceeded": "Limit exceeded",
    "too_fast": "Too fast",
    "forbidden": "Forbidden",
}


def mesh_missing(mesh: str) -> Response:
    """A 404 for a mesh."""
    detail = f"no mesh {mesh!r}: make it with PUT /v1/mesh/{mesh}"
    return refused(404, "mesh_not_found", "No such mesh", detail)


def name_missing(mesh: str, kind: Kind, name: str) -> Response:
    """A 404 for a topic, member or queue."""
    detail = f"the mesh {mesh!r} has no {NOUNS[kind]} {name!r}: make it with PUT"
    match kind:
        case "topic":
            return refused(404, "topic_not_found", "No such topic", detail)
        case "dm":
            return refused(404, "member_not_found", "No such member", detail)
        case "queue":
            return refused(404, "queue_not_found", "No such queue", detail)


def refusal(mesh: str, request: MeshRequest | None, outcome: MeshOutcome | Failure) -> Response:
    """Why a request about a mesh was not done."""
    match outcome:
        case MeshNotFound():
            return mesh_missing(mesh)
        case NameMissing(kind, name):
            return name_missing(mesh, kind, name)
        case MeshDiffers(existing):
            detail = f"the mesh {mesh!r} exists with other settings: delete it, or use its own"
            problem = refused(409, "mesh_exists", "Mesh exists", detail)
            return with_fields(problem, settings=msgspec.to_builtins(existing.settings))
        case MeshEnding():
            detail = f"the mesh {mesh!r} is being deleted: try again when that is done"
            return refused(409, "mesh_exists", "Mesh exists", detail, retry_after(1_000))
        case NameHeld():
            path = getattr(request, "path", "")
            return rendering.soft_deleted(path)
        case LimitExceeded():
            return rendering.limit_exceeded(outcome)
        case Failed() | Unknown():
            return rendering.failed(outcome)
        case _:
            raise AssertionError(f"not a refusal: {outcome}")


def sent(answer: SendAnswer) -> Response:
    """The answer to one send."""
    if answer.code is None:
        return json_answer(answer.fields, answer.status)
    fields = dict(answer.fields)
    detail = str(fields.pop("detail"))
    title = _TITLES.get(answer.code, "Bad request" if answer.status == 400 else "Not stored")
    headers = []
    if answer.status == 429:
        headers.append(retry_after(int(str(fields["retry_after_ms"]))))
    elif answer.status == 503:
        headers.append((b"Retry-After", b"1"))
    return with_fields(refused(answer.status, answer.code, title, detail, *headers), **fields)


def shown_mesh(mesh: Mesh) -> dict[str, object]:
    """A mesh as it is answered."""
    settings: dict[str, object] = msgspec.to_builtins(mesh.settings)
    return {"mesh": mesh.name, **settings, "created_ms": mesh.created_ms}


def shown_name(mesh: str, kind: Kind, name: str, created_ms: int) -> dict[str, object]:
    """A topic, member or queue: its stream, and the group through which it is consumed."""
    match kind:
        case "topic":
            topic = Topic(mesh, name, created_ms)
            return {"topic": name, "stream": topic.path, "created_ms": created_ms}
        case "dm":
            member = Member(mesh, name, created_ms)
            places = {"stream": member.path, "group": member.group}
            return {"member": name, **places, "created_ms": created_ms}
        case "queue":
            queue = Queue(mesh, name, created_ms)
            places = {"stream": queue.path, "group": queue.group}
            return {"queue": name, **places, "created_ms": created_ms}


def shown_row(row: DedupeRow) -> dict[str, object]:
    """A dedupe row as it is listed."""
    return {
        "sender": row.sender,
        "client_message_id": row.client_message_id,
        "broker_message_id": row.broker_message_id,
        "fingerprint": row.fingerprint.hex(),
        "kind": row.kind,
        "ref": row.ref,
        "incarnation": row.stream_id,
        "offset": str(row.offset),
        "first_seen_at": rfc3339(row.first_seen_ms),
        "expires_at": None if row.expires_ms is None else rfc3339(row.expires_ms),
    }
