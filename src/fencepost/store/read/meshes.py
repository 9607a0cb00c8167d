"""Reading meshes, their names and dedupe rows, and the orphan check.

The orphan check holds dedupe rows and messages against each other, both ways, a page at a time.
First it goes through the rows: each must have its message, or the message must be gone from its
stream. Then it goes through the streams: each message that was deduplicated must have its row, as
long as a sweep cannot have taken it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec

from fencepost.protocol.commits import (
    Part,
    PartIncomplete,
    PartMismatch,
    PartMissing,
    PartRefusal,
)
from fencepost.protocol.fingerprints import Kind
from fencepost.protocol.meshes import BODIES, Mesh, destination_path, names_root
from fencepost.protocol.offsets import Offset
from fencepost.protocol.sends import (
    BODY_CHUNKS_MAX,
    BODY_TYPE,
    DedupeRow,
    SendTooLarge,
    broker_message_id,
)
from fencepost.store.group_contract import Event
from fencepost.store.mesh_contract import CheckPage, Finding, NameRow, StagedBody
from fencepost.store.read.chunks import Readers
from fencepost.store.read.group_events import stream_events
from fencepost.store.sql import Connection, Row
from fencepost.store.write.sends import mesh_from_row, row_of

FOLDERS: dict[Kind, str] = {"topic": "topic", "dm": "inbox", "queue": "queue"}
"""In which folder of a mesh the streams of each kind are."""
KIND_OF: dict[str, Kind] = {folder: kind for kind, folder in FOLDERS.items()}

PAGE_STEPS_MAX = 200
"""Streams that one page of the check goes through."""

_ROWS, _STREAMS, _BEHIND = "rows", "streams", "behind"
"""Where a page of the check begins: at a row, at a place in a stream, or behind a stream."""
_GAP = "\x1f"
"""What stands between the parts of a place: no name and no id has it."""


class StoredMessage(msgspec.Struct):
    """The fields of a message that the orphan check compares."""

    client_message_id: str = ""
    sender: str = ""
    kind: str = ""
    ref: str = ""
    sent_ms: int = 0
    fingerprint: str = ""
    deduplicated: bool = True


_MESSAGE = msgspec.json.Decoder(StoredMessage)


class SqlMeshReads:
    """The meshes of one store, as committed."""

    def __init__(self, readers: Readers[Any]) -> None:
        self._readers = readers

    async def find(self, name: str) -> Mesh | None:
        rows = await self._fetch("find_mesh", (name,))
        return mesh_from_row(rows[0]) if rows and rows[0][2] == 0 else None

    async def meshes(self, after: str, limit: int) -> list[Mesh]:
        return [mesh_from_row(row) for row in await self._fetch("meshes_after", (after, limit))]

    async def name(self, mesh: str, kind: Kind, name: str) -> NameRow | None:
        path = destination_path(mesh, kind, name)
        rows = await self._fetch("stream_at_path", (path,))
        return _name_row(rows[0]) if rows else None

    async def names(self, mesh: str, kind: Kind, after: str, limit: int) -> list[NameRow]:
        folder = f"{names_root(mesh)}{FOLDERS[kind]}/"
        values = (folder + after, folder[:-1] + "0", limit)
        rows = await self._fetch("streams_between_paths", values)
        return [_name_row(row) for row in rows]

    async def topic_members(
        self, mesh: Mesh, topic: str, after: str, limit: int
    ) -> list[tuple[str, int]]:
        rows = await self._fetch("topic_members_after", (mesh.id, topic, after, limit))
        return [(member, created_ms) for member, created_ms in rows]

    async def joined_ms(self, mesh: Mesh, topic: str, member: str) -> int | None:
        rows = await self._fetch("find_topic_member", (mesh.id, topic, member))
        return rows[0][0] if rows else None

    async def rows(self, mesh: Mesh, after: tuple[str, str], limit: int) -> list[DedupeRow]:
        return await self._readers.run(partial(rows_after, mesh, after, limit))

    async def staged_body(
        self, parts: Sequence[Part], bytes_max: int
    ) -> StagedBody | SendTooLarge | PartRefusal:
        return await self._readers.run(partial(read_body, parts, bytes_max))

    async def check(self, mesh: Mesh, after: str, limit: int, now_ms: int) -> CheckPage | None:
        return await self._readers.run(partial(check_page, mesh, after, limit, now_ms))

    async def paths(self, mesh: str, limit: int) -> list[str]:
        root = names_root(mesh)
        rows = await self._fetch("streams_between_paths", (root, root[:-1] + "0", limit))
        return [row[0] for row in rows]

    async def _fetch(self, query: str, values: tuple[object, ...]) -> list[Row]:
        return await self._readers.run(lambda connection: connection.fetch(query, values))


def _name_row(row: Row) -> NameRow:
    path, stream_id, created_ms, messages, size, first_messages, first_bytes = row
    name = path.rpartition("/")[2]
    first = Offset(first_messages, first_bytes)
    return NameRow(name, created_ms, stream_id, Offset(messages, size), first)


def rows_after(
    mesh: Mesh, after: tuple[str, str], limit: int, connection: Connection
) -> list[DedupeRow]:
    """A page of the dedupe rows of a mesh."""
    values = {"mesh": mesh.id, "sender": after[0], "client_id": after[1], "limit": limit}
    rows = connection.fetch("sends_after", values)
    return [row_of(mesh.name, row[0], row[1], tuple(row[2:])) for row in rows]


# Staged bodies


def read_body(
    parts: Sequence[Part], bytes_max: int, connection: Connection
) -> StagedBody | SendTooLarge | PartRefusal:
    """What lies in these parts, a chunk at a time."""
    rows: list[tuple[Part, Row]] = []
    for part in parts:
        found = connection.fetch("find_part", part)
        if not found:
            return PartMissing(part)
        if found[0][0] != BODY_TYPE:
            return PartMismatch(part, found[0][0], BODY_TYPE)
        for ordinal, row in enumerate(connection.fetch("part_chunks", part)):
            if row[1] != ordinal:
                return PartIncomplete(part, ordinal)
            rows.append((part, row))
    size = sum(row[3] for _, row in rows)
    if size > bytes_max:
        return SendTooLarge("blob_bytes", bytes_max, size)
    if len(rows) > BODY_CHUNKS_MAX:
        return SendTooLarge("body_chunks_max", BODY_CHUNKS_MAX, len(rows))
    hashed = sha256()
    for part, (number, _, _, length, _) in rows:
        values = {"id": number, "txn": part.txn, "part": part.part}
        data = connection.fetch("staged_data", values)
        if not data or len(data[0][0]) != length:
            return PartMissing(part)  # it was sent so long ago that its bytes are purged
        hashed.update(data[0][0])
    return StagedBody(size, hashed.digest(), tuple(bytes(row[4]) for _, row in rows))


# The orphan check


def check_page(
    mesh: Mesh, after: str, limit: int, now_ms: int, connection: Connection
) -> CheckPage | None:
    """A piece of the check that begins behind `after`; None when that is no place.

    There may be thousands of streams with a few messages each, so a page goes on with the next ones
    as long as there is room in it. Each step reads in a transaction of its own.
    """
    page = _step(mesh, after, limit, now_ms, connection)
    for _ in range(PAGE_STEPS_MAX):
        if page is None or page.next is None or page.rows + page.messages >= limit:
            break
        room = limit - page.rows - page.messages
        more = _step(mesh, page.next, room, now_ms, connection)
        assert more is not None, "the place comes from the step before"
        findings = [*page.findings, *more.findings]
        page = CheckPage(page.rows + more.rows, page.messages + more.messages, findings, more.next)
    return page


def _step(
    mesh: Mesh, after: str, limit: int, now_ms: int, connection: Connection
) -> CheckPage | None:
    phase, *place = (after or f"{_ROWS}{_GAP}{_GAP}").split(_GAP)
    with connection:
        match phase, place:
            case "rows", [sender, client_id]:
                return _check_rows(mesh, (sender, client_id), limit, connection)
            case "streams", [path, at] if _is_place(mesh, path, at):
                streams = connection.fetch("stream_at_path", (path,))
                if streams:
                    return _check_stream(mesh, streams[0], int(at), limit, now_ms, connection)
                return CheckPage(0, 0, (), f"{_BEHIND}{_GAP}{path}")
            case "behind", [path]:
                root = names_root(mesh.name)
                # The streams of bodies come first by name, and hold nothing but bytes of senders.
                values = (max(path, f"{root}{BODIES}0"), root[:-1] + "0", 1)
                streams = connection.fetch("streams_between_paths", values)
                if not streams:
                    return CheckPage(0, 0, (), None)
                return _check_stream(mesh, streams[0], 0, limit, now_ms, connection)
            case _:
                return None


def _is_place(mesh: Mesh, path: str, at: str) -> bool:
    is_of_mesh = path > f"{names_root(mesh.name)}{BODIES}0" and path.startswith(
        names_root(mesh.name)
    )
    return is_of_mesh and at.isdecimal() and len(at) < 17


def _check_rows(
    mesh: Mesh, after: tuple[str, str], limit: int, connection: Connection
) -> CheckPage:
    findings: list[Finding] = []
    rows = rows_after(mesh, after, limit, connection)
    seen: dict[tuple[int, int], DedupeRow] = {}
    for row in rows:
        found = _check_row(row, connection)
        if found is None and (row.stream_id, row.offset.bytes) in seen:
            other = seen[row.stream_id, row.offset.bytes]
            found = Finding(
                "send_repeated",
                f"the ids {other.client_message_id!r} and {row.client_message_id!r} both stand for"
                f" message {row.broker_message_id}",
            )
        seen[row.stream_id, row.offset.bytes] = row
        if found is not None:
            findings.append(found)
    if len(rows) == limit:
        following = _GAP.join((_ROWS, rows[-1].sender, rows[-1].client_message_id))
    else:
        following = _BEHIND + _GAP
    return CheckPage(len(rows), 0, findings, following)


def _check_row(row: DedupeRow, connection: Connection) -> Finding | None:
    """What is wrong with a row, as far as its message can still be read."""
    path = destination_path(row.mesh, row.kind, row.ref)
    streams = connection.fetch("stream_at_path", (path,))
    if not streams or streams[0][1] != row.stream_id or streams[0][6] > row.offset.bytes:
        return None  # history is not available
    what = f"the row of id {row.client_message_id!r} of {row.sender!r}"
    for event in stream_events(connection, path, row.stream_id, row.offset.bytes, 1):
        if event.start_bytes != row.offset.bytes or event.version != row.offset.messages:
            break
        message = _read(event)
        if message is None or message.client_message_id != row.client_message_id:
            break
        if message.sender != row.sender:
            break
        if message.fingerprint == row.fingerprint.hex():
            return None
        detail = f"{what} has another fingerprint than message {row.broker_message_id}"
        return Finding("send_without_message", detail)
    detail = f"{what} names message {row.broker_message_id}, which is not in {path!r}"
    return Finding("send_without_message", detail)


def _check_stream(
    mesh: Mesh, stream: Row, at: int, limit: int, now_ms: int, connection: Connection
) -> CheckPage:
    """Go through the messages of a stream from a byte on."""
    path, stream_id, _, _, tail_bytes, _, first_bytes = stream
    looked = 0
    findings: list[Finding] = []
    at = max(at, first_bytes)
    for event in stream_events(connection, path, stream_id, at, limit):
        looked += 1
        at = event.start_bytes + len(event.data)
        found = _check_message(mesh, event, now_ms, connection)
        if found is not None:
            findings.append(found)
        if looked == limit:
            break
    if looked == limit and at < tail_bytes:
        following = _GAP.join((_STREAMS, path, str(at)))
    else:
        following = _BEHIND + _GAP + path
    return CheckPage(0, looked, findings, following)


def _check_message(mesh: Mesh, event: Event, now_ms: int, connection: Connection) -> Finding | None:
    message = _read(event)
    # Deliveries have no fingerprint: their row is that of the message in the topic.
    if message is None or not message.fingerprint or not message.deduplicated:
        return None
    expires_ms = mesh.expires_ms(message.sent_ms)
    if expires_ms is not None and expires_ms <= now_ms:
        return None  # a sweep may have taken its row
    values = (mesh.id, message.sender, message.client_message_id)
    rows = connection.fetch("find_any_send", values)
    offset = Offset(event.version, event.start_bytes)
    what = f"message {broker_message_id(event.stream, offset)} in {event.path!r}"
    if not rows:
        row = _row_of_message(mesh, message, event.stream, offset, expires_ms)
        return Finding("send_missing", f"{what} has no dedupe row", row)
    known = row_of(mesh.name, message.sender, message.client_message_id, rows[0])
    if (known.stream_id, known.offset) != (event.stream, offset):
        detail = f"{what} has the id of message {known.broker_message_id}"
        return Finding("send_repeated", detail)
    return None


def _row_of_message(
    mesh: Mesh, message: StoredMessage, stream: int, offset: Offset, expires_ms: int | None
) -> DedupeRow | None:
    if message.kind not in FOLDERS or len(message.fingerprint) != 64:
        return None
    return DedupeRow(
        mesh.name,
        message.sender,
        message.client_message_id,
        broker_message_id(stream, offset),
        bytes.fromhex(message.fingerprint),
        message.kind,
        message.ref,
        stream,
        offset,
        message.sent_ms,
        expires_ms,
    )


def _read(event: Event) -> StoredMessage | None:
    try:
        return _MESSAGE.decode(event.data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
