"""The handlers of `/v1/mesh`: read a request, check its grants, ask the store, render the answer.

Grants on a mesh are grants on the path `__mesh/NAME`, and those on its topics, inboxes and queues
are grants on their streams: `append` to send there, `read`, `create`, `delete`; `admin` on the mesh
to look at dedupe rows, to check and to sweep.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from fencepost.clock import Clock
from fencepost.http.messages import Answer, Request, Response
from fencepost.protocol import features
from fencepost.protocol.features import BadWishes, FeatureRefused, Supported
from fencepost.protocol.fingerprints import ID_BYTES_MAX, Kind, Unsendable
from fencepost.protocol.grants import ADMIN, CREATE, DELETE, READ
from fencepost.protocol.logs import parse_instant_ms
from fencepost.protocol.meshes import (
    ROOT,
    BadMesh,
    Mesh,
    MeshCreated,
    MeshSame,
    destination_path,
    inbox_path,
    parse_settings,
    refuse_name,
)
from fencepost.protocol.sends import SendAnswer, batch_body, split_batch
from fencepost.server import access
from fencepost.server.groups.answers import json_answer, raw_answer
from fencepost.server.handlers import parsing
from fencepost.server.handlers.fields import bad
from fencepost.server.handlers.querying import Parameters, list_limit
from fencepost.server.handlers.rendering import BROWSER_BLOCK, refused, with_fields
from fencepost.server.mesh import answers
from fencepost.server.mesh.answers import NOUNS, refusal
from fencepost.server.mesh.checking import OrphanChecks
from fencepost.server.mesh.sending import Sending
from fencepost.server.mesh.sessions import Sessions
from fencepost.server.settings import ServerSettings
from fencepost.store.contract import Failure, Store
from fencepost.store.mesh_contract import (
    CheckPage,
    Done,
    DropMesh,
    DropName,
    EndMesh,
    Finding,
    JoinTopic,
    KeepRow,
    MakeMesh,
    MakeName,
    MeshOutcome,
    MeshReads,
    MeshRequest,
    NameMade,
)

Respond = Callable[[Answer], None]

PIECE_STREAMS = 500
"""Streams of a mesh that are deleted in one commit."""
SCAN_ROWS = 500
"""Rows of a list that are read at once."""


class Meshes:
    """The handlers of meshes."""

    def __init__(
        self,
        store: Store,
        reads: MeshReads,
        clock: Clock,
        settings: ServerSettings,
        sending: Sending,
        sessions: Sessions,
        checks: OrphanChecks,
        sweep: Callable[[], Awaitable[int]],
    ) -> None:
        self._store = store
        self._reads = reads
        self._clock = clock
        self._limits = settings.limits
        self._mesh_limits = settings.mesh
        self.sending = sending
        self.sessions = sessions
        self._checks = checks
        self._sweep = sweep

    # Meshes themselves

    async def list(self, request: Request) -> Answer:
        parameters = Parameters(request, once=("after", "limit"), repeatable=())
        limit = list_limit(parameters, self._limits)
        shown, following = await _readable(
            self._reads.meshes,
            lambda mesh: _may_read(request, f"{ROOT}/{mesh.name}"),
            _after(parameters),
            limit,
        )
        return json_answer({"meshes": [answers.shown_mesh(m) for m in shown], "next": following})

    async def put(self, request: Request, raw: bytes) -> Answer:
        name = self._mesh(request, raw, CREATE)
        settings = parse_settings(request.body)
        if isinstance(settings, BadMesh):
            raise bad("mesh_invalid", settings.detail)
        outcome = await self._ask(MakeMesh(name, settings, access.name_of(request.principal)))
        if isinstance(outcome, MeshCreated | MeshSame):
            status = 201 if isinstance(outcome, MeshCreated) else 200
            return json_answer(answers.shown_mesh(outcome.mesh), status)
        return refusal(name, None, outcome)

    async def show(self, request: Request, raw: bytes) -> Answer:
        name = self._mesh(request, raw, READ)
        Parameters(request, once=(), repeatable=())
        mesh = await self._reads.find(name)
        return answers.mesh_missing(name) if mesh is None else json_answer(answers.shown_mesh(mesh))

    async def delete(self, request: Request, raw: bytes) -> Answer:
        name = self._mesh(request, raw, DELETE)
        outcome = await self._ask(EndMesh(name))
        while isinstance(outcome, Done):
            # A crash in between leaves the rest to the upkeep, which goes on with it.
            paths = await self._reads.paths(name, PIECE_STREAMS)
            is_last = len(paths) < PIECE_STREAMS
            outcome = await self._ask(DropMesh(name, paths, is_last))
            if is_last:
                self.sending.forget(name)
                return _gone()
        return refusal(name, None, outcome)

    # Topics, members, queues

    async def names(self, request: Request, raw: bytes, *, kind: Kind) -> Answer:
        mesh = self._name("mesh", request, raw)
        parameters = Parameters(request, once=("after", "limit"), repeatable=())
        limit = list_limit(parameters, self._limits)
        is_there = await self._reads.find(mesh) is not None
        if not is_there and _may_read(request, f"{ROOT}/{mesh}"):
            return answers.mesh_missing(mesh)
        # Others are shown what they would be if it were there and held nothing for them.
        shown, following = await _readable(
            partial(self._reads.names, mesh, kind),
            lambda row: _may_read(request, destination_path(mesh, kind, row.name)),
            _after(parameters),
            limit,
        )
        listed = [answers.shown_name(mesh, kind, row.name, row.created_ms) for row in shown]
        return json_answer({f"{NOUNS[kind]}s": listed, "next": following})

    async def put_name(
        self, request: Request, raw_mesh: bytes, raw_name: bytes, *, kind: Kind
    ) -> Answer:
        mesh, name = self._place(request, raw_mesh, kind, raw_name, CREATE)
        _without_body(request)
        asked = MakeName(mesh, kind, name, access.name_of(request.principal))
        outcome = await self._ask(asked)
        if not isinstance(outcome, NameMade):
            return refusal(mesh, asked, outcome)
        shown = answers.shown_name(mesh, kind, name, outcome.created_ms)
        return json_answer(shown, 201 if outcome.fresh else 200)

    async def show_name(
        self, request: Request, raw_mesh: bytes, raw_name: bytes, *, kind: Kind
    ) -> Answer:
        mesh, name = self._place(request, raw_mesh, kind, raw_name, READ)
        Parameters(request, once=(), repeatable=())
        if await self._reads.find(mesh) is None:
            return answers.mesh_missing(mesh)
        row = await self._reads.name(mesh, kind, name)
        if row is None:
            return answers.name_missing(mesh, kind, name)
        return json_answer(answers.shown_name(mesh, kind, name, row.created_ms))

    async def delete_name(
        self, request: Request, raw_mesh: bytes, raw_name: bytes, *, kind: Kind
    ) -> Answer:
        mesh, name = self._place(request, raw_mesh, kind, raw_name, DELETE)
        outcome = await self._ask(DropName(mesh, kind, name))
        return _gone() if isinstance(outcome, Done) else refusal(mesh, None, outcome)

    # Members of a topic

    async def topic_members(self, request: Request, raw_mesh: bytes, raw_topic: bytes) -> Answer:
        name, topic = self._place(request, raw_mesh, "topic", raw_topic, READ)
        parameters = Parameters(request, once=("after", "limit"), repeatable=())
        limit = list_limit(parameters, self._limits)
        mesh = await self._reads.find(name)
        if mesh is None:
            return answers.mesh_missing(name)
        if await self._reads.name(name, "topic", topic) is None:
            return answers.name_missing(name, "topic", topic)
        page = await self._reads.topic_members(mesh, topic, _after(parameters), limit)
        following = page[-1][0] if len(page) == limit else None
        shown = [{"member": member, "joined_ms": joined_ms} for member, joined_ms in page]
        return json_answer({"members": shown, "next": following})

    async def join(
        self, request: Request, raw_mesh: bytes, raw_topic: bytes, raw_member: bytes
    ) -> Answer:
        mesh, topic = self._place(request, raw_mesh, "topic", raw_topic, CREATE)
        member = self._name("member", request, raw_member)
        access.joining_allowed(request, inbox_path(mesh, member))
        _without_body(request)
        outcome = await self._ask(JoinTopic(mesh, topic, member))
        if not isinstance(outcome, Done):
            return refusal(mesh, None, outcome)
        shown = {"topic": topic, "member": member}
        return json_answer(shown, 201 if outcome.changed else 200)

    async def show_member(
        self, request: Request, raw_mesh: bytes, raw_topic: bytes, raw_member: bytes
    ) -> Answer:
        name, topic = self._place(request, raw_mesh, "topic", raw_topic, READ)
        member = self._name("member", request, raw_member)
        Parameters(request, once=(), repeatable=())
        mesh = await self._reads.find(name)
        if mesh is None:
            return answers.mesh_missing(name)
        joined_ms = await self._reads.joined_ms(mesh, topic, member)
        if joined_ms is None:
            return answers.name_missing(name, "dm", member)
        return json_answer({"topic": topic, "member": member, "joined_ms": joined_ms})

    async def leave(
        self, request: Request, raw_mesh: bytes, raw_topic: bytes, raw_member: bytes
    ) -> Answer:
        mesh, topic = self._place(request, raw_mesh, "topic", raw_topic, DELETE)
        member = self._name("member", request, raw_member)
        outcome = await self._ask(JoinTopic(mesh, topic, member, leaves=True))
        return _gone() if isinstance(outcome, Done) else refusal(mesh, None, outcome)

    # Sends

    def send(self, request: Request, answer: Respond, raw: bytes) -> None:
        mesh = self._name("mesh", request, raw)
        header_id = _header_id(request)
        self.sending.send(
            mesh,
            request.body,
            header_id,
            request.principal,
            lambda sent: answer(answers.sent(sent)),
        )

    async def send_all(self, request: Request, raw: bytes) -> Answer:
        mesh = self._name("mesh", request, raw)
        if b"idempotency-key" in request.headers:
            raise bad("send_invalid", "in a batch each send has an id of its own: no header")
        sends = split_batch(request.body, self._mesh_limits)
        if isinstance(sends, Unsendable):
            raise bad(sends.code, sends.detail)
        loop = asyncio.get_running_loop()
        waiting: list[asyncio.Future[SendAnswer]] = []
        for data in sends:
            told: asyncio.Future[SendAnswer] = loop.create_future()
            waiting.append(told)
            self.sending.send(mesh, data, None, request.principal, partial(_tell, told))
        return raw_answer(batch_body([await told for told in waiting]))

    # Negotiation

    async def features(self, request: Request, raw: bytes) -> Answer:
        name = self._mesh(request, raw, READ)
        Parameters(request, once=(), repeatable=())
        mesh = await self._reads.find(name)
        if mesh is None:
            return answers.mesh_missing(name)
        return json_answer(features.supported_body(self.offered(mesh)))

    async def negotiate(self, request: Request, raw: bytes) -> Answer:
        name = self._mesh(request, raw, READ)
        wishes = features.parse_wishes(request.body)
        if isinstance(wishes, BadWishes):
            raise bad("negotiation_invalid", wishes.detail)
        mesh = await self._reads.find(name)
        if mesh is None:
            return answers.mesh_missing(name)
        outcome = features.negotiate(wishes, self.offered(mesh))
        if isinstance(outcome, FeatureRefused):
            problem = refused(409, "feature_refused", "Feature refused", outcome.detail)
            return with_fields(problem, **features.refused_body(outcome))
        return json_answer(features.negotiated_body(outcome))

    def offered(self, mesh: Mesh) -> Supported:
        """What a mesh offers on this server."""
        limits = self._mesh_limits
        return features.offered(mesh.settings, limits, dedupes=limits.dedupe)

    async def session(self, request: Request, raw: bytes) -> Answer:
        """Turn the connection into a session."""
        name = self._mesh(request, raw, READ)
        Parameters(request, once=(), repeatable=())
        mesh = await self._reads.find(name)
        if mesh is None:
            return answers.mesh_missing(name)
        return self.sessions.upgrade(request, mesh, self.offered(mesh))

    # For administrators

    async def dedupe(self, request: Request, raw: bytes) -> Answer:
        name = self._mesh(request, raw, ADMIN)
        parameters = Parameters(request, once=("after", "as_of", "limit"), repeatable=())
        limit = list_limit(parameters, self._limits)
        as_of = parameters.get("as_of")
        as_of_ms = None if as_of is None else parse_instant_ms(as_of)
        if as_of is not None and as_of_ms is None:
            raise bad("as_of_invalid", "as_of is a time: RFC 3339, or milliseconds since 1970")
        sender, _, client_id = _opened(parameters).partition("\x1f")
        mesh = await self._reads.find(name)
        if mesh is None:
            return answers.mesh_missing(name)
        page = await self._reads.rows(mesh, (sender, client_id), limit)
        following = None
        if len(page) == limit:
            following = _token(f"{page[-1].sender}\x1f{page[-1].client_message_id}")
        shown = [
            answers.shown_row(row)
            for row in page
            if as_of_ms is None or row.first_seen_ms <= as_of_ms
        ]
        return json_answer({"rows": shown, "next": following})

    async def check(self, request: Request, raw: bytes) -> Answer:
        name = self._mesh(request, raw, ADMIN)
        found = await self._page(request, name, ("after", "limit"))
        if isinstance(found, Response):
            return found
        page, so_far = found
        total = so_far + len(page.findings)
        if page.next is None:
            self._checks.note(name, total)
        shown = [_shown_finding(finding) for finding in page.findings]
        following = None if page.next is None else _token(f"{total}\x1f{page.next}")
        looked = {"rows": page.rows, "messages": page.messages}
        return json_answer({**looked, "findings": shown, "next": following})

    async def rebuild(self, request: Request, raw: bytes) -> Answer:
        name = self._mesh(request, raw, ADMIN)
        found = await self._page(request, name, ("after", "limit", "dry_run"))
        if isinstance(found, Response):
            return found
        page, so_far = found
        known = ("after", "limit", "dry_run")
        dry_run = Parameters(request, once=known, repeatable=()).get("dry_run")
        if dry_run not in (None, "", "true"):
            raise bad("dry_run_invalid", "dry_run takes no value: say ?dry_run")
        rows = [finding.row for finding in page.findings if finding.row is not None]
        written = 0
        for row in rows if dry_run is None else ():
            outcome = await self._ask(KeepRow(row))
            if not isinstance(outcome, Done):
                return refusal(name, None, outcome)
            written += outcome.changed
        following = None if page.next is None else _token(f"{so_far}\x1f{page.next}")
        shown = [answers.shown_row(row) for row in rows]
        counts = {"messages": page.messages, "missing": len(rows), "written": written}
        return json_answer({**counts, "rows": shown, "next": following})

    async def sweep(self, request: Request, raw: bytes) -> Answer:
        name = self._mesh(request, raw, ADMIN)
        Parameters(request, once=(), repeatable=())
        if await self._reads.find(name) is None:
            return answers.mesh_missing(name)
        swept = await self._sweep()
        self.sending.swept += swept
        return json_answer({"swept": swept})

    async def _page(
        self, request: Request, name: str, known: tuple[str, ...]
    ) -> tuple[CheckPage, int] | Response:
        """A page of the orphan check, and how much the pages before it found."""
        parameters = Parameters(request, once=known, repeatable=())
        limit = list_limit(parameters, self._limits)
        count, _, place = _opened(parameters).partition("\x1f")
        if not (count or "0").isdecimal() or len(count) > 12:
            raise _bad_after()
        mesh = await self._reads.find(name)
        if mesh is None:
            return answers.mesh_missing(name)
        page = await self._reads.check(mesh, place, limit, self._clock.now_ms())
        if page is None:
            raise _bad_after()
        return page, int(count or 0)

    # Parsing

    def _mesh(self, request: Request, raw: bytes, verb: int) -> str:
        """The mesh that the URL names, if the principal may do this to it."""
        name = self._name("mesh", request, raw)
        if request.principal is not None:
            access.require(request.principal, verb, f"{ROOT}/{name}")
        return name

    def _place(
        self, request: Request, raw_mesh: bytes, kind: Kind, raw_name: bytes, verb: int
    ) -> tuple[str, str]:
        """The mesh and the name in it, if the principal may do this to its stream."""
        mesh = self._name("mesh", request, raw_mesh)
        name = self._name(NOUNS[kind], request, raw_name)
        if request.principal is not None:
            access.require(request.principal, verb, destination_path(mesh, kind, name))
        return mesh, name

    def _name(self, what: str, request: Request, raw: bytes) -> str:
        if request.repeated:
            parsing.refuse_repeated(request)
        name = raw.decode("latin-1")
        refused_name = refuse_name(what, name)
        if refused_name is not None:
            raise bad("mesh_name_invalid", refused_name.detail)
        return name

    async def _ask(self, request: MeshRequest) -> MeshOutcome | Failure:
        told: asyncio.Future[MeshOutcome | Failure] = asyncio.get_running_loop().create_future()
        self._store.mesh(request, partial(_tell, told))
        return await told


def _tell(told: asyncio.Future[Any], outcome: object) -> None:
    # The client may be gone by the time that the commit is done.
    if not told.done():
        told.set_result(outcome)


def _gone() -> Response:
    return Response(204, [], b"", BROWSER_BLOCK)


def _may_read(request: Request, path: str) -> bool:
    return request.principal is None or request.principal.may_read(path)


def _without_body(request: Request) -> None:
    if request.body:
        raise bad("body_unexpected", "this request has no body")


def _header_id(request: Request) -> str | None:
    value = request.headers.get(b"idempotency-key")
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        detail = f"Idempotency-Key is 1 to {ID_BYTES_MAX} bytes of UTF-8"
        raise bad("message_id_invalid", detail) from None


def _shown_finding(finding: Finding) -> dict[str, object]:
    return {"code": finding.code, "detail": finding.detail}


class _Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=_Named)


async def _readable(
    read: Callable[[str, int], Awaitable[Sequence[T]]],
    may_read: Callable[[T], bool],
    after: str,
    limit: int,
) -> tuple[list[T], str | None]:
    """A page of what may be read, and behind which name of it the next one begins.

    No page tells of rows that may not be read, neither by its size nor by where it ends.
    """
    shown: list[T] = []
    while len(shown) <= limit:
        rows_max = max(limit + 1, SCAN_ROWS)
        page = await read(after, rows_max)
        shown += filter(may_read, page)
        if len(page) < rows_max:
            break
        after = page[-1].name
    more = len(shown) > limit
    shown = shown[:limit]
    return shown, shown[-1].name if more else None


def _after(parameters: Parameters) -> str:
    after = parameters.get("after") or ""
    if "\0" in after:
        raise _bad_after()
    return after


def _bad_after() -> Exception:
    return bad("after_invalid", "after is the next of the page before")


def _token(place: str) -> str:
    """A place as a token that a client hands back."""
    return base64.urlsafe_b64encode(place.encode()).rstrip(b"=").decode()


def _opened(parameters: Parameters) -> str:
    """The place that a token stands for; empty at the beginning."""
    token = parameters.get("after")
    if token is None:
        return ""
    try:
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        place = raw.decode()
    except (binascii.Error, ValueError):
        raise _bad_after() from None
    if "\0" in place:
        raise _bad_after()
    return place
