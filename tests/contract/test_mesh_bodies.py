"""Sends with staged bodies: their bytes are in the fingerprint, and are stored with the message."""

from __future__ import annotations

import hashlib
from typing import Any, cast

import pytest

from fencepost.protocol.batches import bytes_batch, digest
from fencepost.protocol.commits import (
    Part,
    PartDropped,
    PartIncomplete,
    PartMismatch,
    PartMissing,
    PartTwice,
    PartUsed,
)
from fencepost.protocol.envelopes import Send, with_staged_body
from fencepost.protocol.meshes import bodies_path, inbox_path, topic_path
from fencepost.protocol.sends import (
    DestinationNotFound,
    IdReused,
    Repeated,
    SendTooLarge,
    Sent,
)
from fencepost.store.contract import Missing, Upload
from fencepost.store.mesh_contract import (
    Done,
    DropName,
    MakeName,
    MeshReads,
    NameMade,
    StagedBody,
)
from fencepost.store.read.meshes import SqlMeshReads
from tests.contract.grouping import a
from tests.contract.meshing import a_mesh, a_send, ask, held, named, send
from tests.contract.subject import Outcome, Subject, answered

BYTES = "application/octet-stream"
TOPIC, BODIES = topic_path("shop", "alerts"), bodies_path("shop", "topic", "alerts")


async def stage(
    subject: Subject, part: str, data: bytes, ordinal: int = 0, media_type: str = BYTES
) -> Outcome:
    mark = digest(media_type, False, data)
    upload = Upload(Part("t", part), ordinal, media_type, bytes_batch(data), mark)
    return await answered(subject.ask(subject.store.stage, upload))


def reads(subject: Subject) -> MeshReads:
    return SqlMeshReads(cast(Any, subject.store).readers)


def naming(*parts: str, message_id: str = "m-1", **fields: Any) -> Send:
    """A send with a body in these parts, which nothing has read yet."""
    named_parts = [{"txn": "t", "part": part} for part in parts]
    return a_send(message_id, parts=named_parts, **fields)


async def read(subject: Subject, asked: Send) -> Send:
    body = await reads(subject).staged_body(asked.body.parts, 1 << 20)
    assert isinstance(body, StagedBody), body
    return with_staged_body(asked, size=body.size, body_sha256=body.sha256, chunks=body.chunks)


async def bytes_at(subject: Subject, message: dict[str, Any]) -> bytes:
    """The body of a message or of an entry."""
    place = message["body_at"]
    begin = int(place["offset"].partition("_")[2])
    data = await subject.content(place["stream"])
    return data[begin : begin + place["bytes"]]


async def test_a_staged_body_is_stored_once_and_named_in_every_inbox(subject: Subject) -> None:
    await a_mesh(subject)
    for part, ordinal, data in (("p", 0, b"ab"), ("p", 1, b"cd"), ("q", 0, b"ef")):
        await stage(subject, part, data, ordinal)

    sent = a(Sent, await send(subject, await read(subject, naming("p", "q"))))
    again = await send(subject, await read(subject, naming("p", "q")))

    assert again == Repeated(sent.row, history_available=True)  # type: ignore[arg-type]
    [message] = await held(subject, TOPIC)
    [entry] = await held(subject, inbox_path("shop", "ann"))
    for one in (message, entry):
        assert one["body_at"]["stream"] == BODIES
        assert await bytes_at(subject, one) == b"abcdef"
    assert "parts" not in message
    await subject.reopen()
    assert await bytes_at(subject, message) == b"abcdef"


async def test_the_fingerprint_is_that_of_the_bytes_however_they_were_cut(subject: Subject) -> None:
    await a_mesh(subject)
    await stage(subject, "p", b"ab")
    await stage(subject, "q", b"a")
    await stage(subject, "q", b"b", 1)
    await stage(subject, "r", b"ac")

    sent = a(Sent, await send(subject, await read(subject, naming("p"))))

    assert a(Repeated, await send(subject, await read(subject, naming("q")))).row == sent.row
    assert a(Repeated, await send(subject, a_send(body="ab"))).row == sent.row
    assert isinstance(await send(subject, await read(subject, naming("r"))), IdReused)
    assert len(await held(subject, TOPIC)) == 1


async def test_bodies_lie_behind_each_other(subject: Subject) -> None:
    await a_mesh(subject)
    for number in range(3):
        await stage(subject, f"p{number}", b"body %d" % number)
        asked = naming(f"p{number}", message_id=f"m-{number}", kind="queue", ref="jobs")
        a(Sent, await send(subject, await read(subject, asked)))

    messages = await held(subject, "__mesh/shop/queue/jobs")

    found = [await bytes_at(subject, message) for message in messages]
    assert found == [b"body 0", b"body 1", b"body 2"]


async def test_parts_are_used_once(subject: Subject) -> None:
    await a_mesh(subject)
    await stage(subject, "p", b"ab")
    first = await read(subject, naming("p"))
    other = await read(subject, naming("p", message_id="m-2"))
    a(Sent, await send(subject, first))

    refused = await send(subject, other)

    assert isinstance(refused, PartUsed)
    assert await send(subject, await read(subject, naming("p", "p", message_id="m-3"))) == (
        PartTwice(Part("t", "p"))
    )
    assert len(await held(subject, TOPIC)) == 1
    assert a(Sent, await send(subject, a_send("m-2"))), "the refused send has not used its id"


async def test_parts_that_are_not_there_whole_are_refused(subject: Subject) -> None:
    await a_mesh(subject)
    await stage(subject, "gap", b"x", 1)
    await stage(subject, "text", b"x", media_type="text/plain")
    await stage(subject, "large", b"x" * 11)
    body = reads(subject).staged_body

    assert await body([Part("t", "none")], 10) == PartMissing(Part("t", "none"))
    assert await body([Part("t", "gap")], 10) == PartIncomplete(Part("t", "gap"), 0)
    assert isinstance(await body([Part("t", "text")], 10), PartMismatch)
    assert await body([Part("t", "large")], 10) == SendTooLarge("blob_bytes", 10, 11)


@pytest.mark.parametrize("moment", ["added", "changed", "dropped"])
async def test_what_was_uploaded_after_the_reading_is_not_stored(
    subject: Subject, moment: str
) -> None:
    """The message must be what the fingerprint says, or a retry of it would be a conflict."""
    await a_mesh(subject)
    await stage(subject, "p", b"ab")
    asked = await read(subject, naming("p"))
    if moment != "added":
        part = Part("t", "p")
        assert isinstance(await answered(subject.ask(subject.store.unstage, part)), PartDropped)
    if moment != "dropped":
        await stage(subject, "p", b"other", 1 if moment == "added" else 0)

    refused = await send(subject, asked)

    assert isinstance(refused, PartMissing if moment == "dropped" else PartIncomplete)
    assert await held(subject, TOPIC) == []
    assert isinstance(await subject.look(BODIES), Missing)


async def test_a_refused_send_leaves_its_parts(subject: Subject) -> None:
    await a_mesh(subject)
    await stage(subject, "p", b"ab")

    refused = await send(subject, await read(subject, naming("p", ref="none")))

    assert isinstance(refused, DestinationNotFound)
    await named(subject, "topic", "none")
    assert isinstance(await send(subject, await read(subject, naming("p", ref="none"))), Sent)


async def test_bodies_go_with_their_destination(subject: Subject) -> None:
    await a_mesh(subject)
    await stage(subject, "p", b"ab")
    a(Sent, await send(subject, await read(subject, naming("p"))))

    assert await ask(subject, DropName("shop", "topic", "alerts")) == Done()

    assert isinstance(await subject.look(BODIES), Missing)
    assert [row.name for row in await reads(subject).names("shop", "topic", "", 10)] == []


async def test_bodies_are_no_names_and_no_messages_for_the_orphan_check(subject: Subject) -> None:
    """A sender chooses the bytes of its body: they may look like a message of another one."""
    await a_mesh(subject)
    forged = (
        b'{"client_message_id":"x","sender":"eve","kind":"topic","ref":"alerts","sent_ms":9999999999999,'
        b'"fingerprint":"' + hashlib.sha256(b"").hexdigest().encode() + b'"}'
    )
    await stage(subject, "p", forged)
    a(Sent, await send(subject, await read(subject, naming("p"))))
    store = reads(subject)
    mesh = await store.find("shop")
    assert mesh is not None

    place: str | None = ""
    while place is not None:
        page = await store.check(mesh, place, 1, subject.clock.now_ms())
        assert page is not None
        assert list(page.findings) == []
        place = page.next
    assert await store.check(mesh, f"streams\x1f{BODIES}\x1f0", 9, 0) is None
    assert await store.check(mesh, "streams\x1felsewhere\x1f0", 9, 0) is None
    assert isinstance(await ask(subject, MakeName("shop", "topic", "bodies")), NameMade)


async def test_a_page_of_the_orphan_check_goes_through_many_streams(subject: Subject) -> None:
    """One stream a page made the check of 10,000 inboxes take minutes."""
    await a_mesh(subject)
    await named(subject, "dm", *(f"m{number}" for number in range(30)))
    for number in range(3):
        a(Sent, await send(subject, a_send(f"m-{number}", kind="dm", ref=f"m{number}")))
    store = reads(subject)
    mesh = await store.find("shop")
    assert mesh is not None

    page = await store.check(mesh, "", 1_000, subject.clock.now_ms())

    assert page is not None
    assert (page.rows, page.messages, list(page.findings), page.next) == (3, 3, [], None)
