# Generated from src/fencepost/client/aio/meshes.py by `just twins`: change that file.
"""Meshes through the sync client: make one, name its members, send, read what it remembers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from fencepost.client import meshes
from fencepost.client.errors import ProtocolError
from fencepost.client.meshes import (
    DedupeInfo,
    MeshInfo,
    MeshName,
    OrphanReport,
    Rebuilt,
    SendOutcome,
    SendReceipt,
    TopicMember,
)
from fencepost.client.operations import new_key, query_of
from fencepost.client.reading import Pages, Reader
from fencepost.client.sync.connections import Driver
from fencepost.client.sync.groups import Group
from fencepost.client.sync.readings import Listing, Reading

if TYPE_CHECKING:
    from fencepost.client.sync.sessions import MeshSession

T = TypeVar("T")


class Mesh:
    """A mesh by its name. `client.mesh(name)` makes this object, and asks nothing."""

    def __init__(self, driver: Driver, name: str) -> None:
        self._driver = driver
        self.name = name

    def make(
        self,
        *,
        dedupe_mode: str | None = None,
        dedupe_retention_days: int | None = None,
        default_policy: str | None = None,
    ) -> MeshInfo:
        """Make the mesh; fine if it exists with these settings."""
        values = {
            "dedupe_mode": dedupe_mode,
            "dedupe_retention_days": dedupe_retention_days,
            "default_policy": default_policy,
        }
        made = meshes.put(self._driver.settings, self.name, "", values)
        return msgspec.convert(self._driver.run(made), MeshInfo)

    def info(self) -> MeshInfo:
        """The mesh and its settings."""
        found = meshes.get(self._driver.settings, self.name)
        return msgspec.convert(self._driver.run(found), MeshInfo)

    def delete(self) -> None:
        """Delete the mesh with its topics, inboxes and queues."""
        self._driver.run(meshes.delete(self._driver.settings, self.name))

    # Members, topics, queues

    def make_member(self, name: str) -> MeshName:
        """Make a member with an inbox; fine if it is there."""
        return self._make(f"members/{name}")

    def make_topic(self, name: str, members: Sequence[str] = ()) -> MeshName:
        """Make a topic, and let these members listen to it."""
        made = self._make(f"topics/{name}")
        for member in members:
            self.join(name, member)
        return made

    def make_queue(self, name: str) -> MeshName:
        """Make a queue; fine if it is there."""
        return self._make(f"queues/{name}")

    def join(self, topic: str, member: str) -> None:
        """Let a member get what is sent to a topic from now on."""
        self._put(f"topics/{topic}/members/{member}")

    def leave(self, topic: str, member: str) -> None:
        """Stop giving a member what is sent to a topic."""
        self._delete(f"topics/{topic}/members/{member}")

    def delete_member(self, name: str) -> None:
        """Delete a member and its inbox."""
        self._delete(f"members/{name}")

    def delete_topic(self, name: str) -> None:
        """Delete a topic and its messages."""
        self._delete(f"topics/{name}")

    def delete_queue(self, name: str) -> None:
        """Delete a queue and its messages."""
        self._delete(f"queues/{name}")

    def members(self) -> Listing[MeshName]:
        """The members of the mesh, in the order of their names."""
        return self._pages("members", "members", MeshName)

    def topics(self) -> Listing[MeshName]:
        """The topics of the mesh."""
        return self._pages("topics", "topics", MeshName)

    def queues(self) -> Listing[MeshName]:
        """The queues of the mesh."""
        return self._pages("queues", "queues", MeshName)

    def topic_members(self, topic: str) -> Listing[TopicMember]:
        """Who listens to a topic."""
        return self._pages(f"topics/{topic}/members", "members", TopicMember)

    def inbox(self, member: str) -> Group:
        """The group through which the inbox of a member is consumed."""
        return Group(self._driver, f"mesh:{self.name}:inbox:{member}")

    def queue(self, name: str) -> Group:
        """The group through which workers share the messages of a queue."""
        return Group(self._driver, f"mesh:{self.name}:queue:{name}")

    # Sending

    def send(
        self,
        to: str,
        body: Any,
        *,
        id: str | None = None,
        sender: str | None = None,
        priority: str | None = None,
        reply_to: str | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> SendReceipt:
        """Store a message for `topic:NAME`, `dm:MEMBER` or `queue:NAME`, once for each id.

        Without an id one is made, and the retries of this call use it. The same id with another
        message raises `KeyReusedError`. Text and bytes of more than a mebibyte are staged first.
        """
        more = {"sender": sender, "priority": priority, "reply_to": reply_to, "meta": meta}
        sending = meshes.send(self._driver.settings, self.name, to, body, id, **more)
        return self._driver.run(sending)

    def body(self, message: Mapping[str, Any]) -> Any:
        """The body of a message or of an entry of an inbox, read from where it lies if need be.

        Text, bytes or a JSON value, as it was sent; one that was staged is bytes.
        """
        place = meshes.place_of(message)
        if place is None:
            return meshes.body_inside(message)
        reader: Reader[Any] = Reader(self._driver.settings, place.stream, place.offset, None)
        with Reading(self._driver, reader) as reading:
            data = bytearray()
            for piece in reading:
                if not place.is_staged:
                    return meshes.body_inside(piece)
                data += piece
                if len(data) >= place.bytes:
                    return bytes(data[: place.bytes])
        raise ProtocolError(f"the body of the message is not in {place.stream!r} any more")

    def send_encoded(self, data: bytes) -> SendReceipt:
        """Store a message that is the JSON of a send already, with its id in it."""
        return self._driver.run(meshes.send_encoded(self._driver.settings, self.name, data))

    def send_all(self, sends: Sequence[Mapping[str, Any]]) -> list[SendOutcome]:
        """Several sends, each as the fields of a send with an id; what came of each."""
        given = [dict(fields) for fields in sends]
        return self._driver.run(meshes.send_all(self._driver.settings, self.name, given))

    def session(
        self,
        member: str | None = None,
        *,
        require: Mapping[str, Any] | None = None,
        optional: Mapping[str, Any] | None = None,
        worker: str | None = None,
        after: int | None = None,
        in_flight_max: int = 256,
        reconnect: bool = True,
    ) -> MeshSession:
        """A session, to be used as a context manager: sends pipelined, and deliveries.

        Args:
            member: Whose inbox is delivered; None: the session only sends.
            require: Features that the mesh must offer, as in `negotiate`.
            optional: Features that it may offer.
            worker: A name for this client, if it is to get back an inbox that it has had under
                `prefer_oldest`; made here by default.
            after: With `allow_concurrent`, the position behind which the inbox is delivered.
            in_flight_max: Sends that may wait for their outcome; `send` waits beyond it.
            reconnect: False: the session ends with its connection, and what has no outcome then
                raises; for programs that repeat sends by themselves.
        """
        # Most programs have no session, and its frames take a while to load.
        from fencepost.client.sessions import hello_of
        from fencepost.client.sync.sessions import MeshSession

        name = worker or f"session:{new_key(self._driver.settings)}"
        hello = hello_of(member, name, require, optional, after)
        return MeshSession(
            self._driver, self.name, hello, in_flight_max=in_flight_max, reconnect=reconnect
        )

    def features(self) -> dict[str, Any]:
        """What the mesh offers."""
        found = self._driver.run(meshes.get(self._driver.settings, self.name, "features"))
        supported: dict[str, Any] = found["supported"]
        return supported

    def negotiate(
        self,
        require: Mapping[str, Any] | None = None,
        optional: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Whether the mesh offers what is required; raises `FeatureRefusedError` if not."""
        body = {"require": require or {}, "optional": optional or {}}
        settings = self._driver.settings
        return self._driver.run(meshes.post(settings, self.name, "negotiate", body=body))

    # For administrators

    def dedupe(self, *, as_of: str | None = None) -> Listing[DedupeInfo]:
        """What the server remembers of each send."""
        return self._pages("dedupe", "rows", DedupeInfo, {"as_of": as_of})

    def check(self) -> OrphanReport:
        """Hold dedupe rows and messages against each other, both ways."""
        return self._driver.run(meshes.check(self._driver.settings, self.name))

    def rebuild(self, *, dry_run: bool = True) -> Rebuilt:
        """Write missing dedupe rows from messages; with `dry_run` only count them."""
        rebuilt = meshes.rebuild(self._driver.settings, self.name, dry_run=dry_run)
        return self._driver.run(rebuilt)

    def sweep(self) -> int:
        """Forget the sends whose time is over; how many there were."""
        return self._driver.run(meshes.sweep(self._driver.settings, self.name))

    def _make(self, what: str) -> MeshName:
        return msgspec.convert(self._put(what), MeshName)

    def _put(self, what: str) -> dict[str, Any]:
        return self._driver.run(meshes.put(self._driver.settings, self.name, what))

    def _delete(self, what: str) -> None:
        self._driver.run(meshes.delete(self._driver.settings, self.name, what))

    def _pages(
        self, what: str, field: str, kind: type[T], query: dict[str, Any] | None = None
    ) -> Listing[T]:
        settings = self._driver.settings
        path = f"/v1/mesh/{self.name}/{what}"
        return Listing(self._driver, Pages(settings, path, field, kind, query_of(query or {})))
