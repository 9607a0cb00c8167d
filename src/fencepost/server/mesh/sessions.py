"""Sessions: the WebSockets of `GET /v1/mesh/{mesh}/session`.

A `Session` receives the frames of one client. Its sends go through `Sending` as those of HTTP do,
and what is in its inbox comes from `inboxes.py`. `Sessions` knows all of them: it bounds how many a
principal has, asks the silent ones whether they are there, has leases renewed, and ends what has
to end. A session that cannot go on is told why in a frame before its connection is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from fencepost.clock import Clock
from fencepost.http.messages import Answer, Request, Socket, UpgradeResponse
from fencepost.http.settings import WebSocketSettings
from fencepost.protocol import features, sessions
from fencepost.protocol.features import FeatureRefused, Supported
from fencepost.protocol.grants import CLAIM, GROUPS, Principal
from fencepost.protocol.meshes import Member, Mesh
from fencepost.protocol.sends import SendAnswer, answer_item
from fencepost.protocol.sessions import (
    NEW,
    Ack,
    AskPing,
    ClientFrame,
    Close,
    Hello,
    Ping,
    Pong,
    SendFrame,
    SessionLimits,
)
from fencepost.server.groups.working import Working
from fencepost.server.handlers.fields import RefusedError
from fencepost.server.handlers.rendering import refused
from fencepost.server.lease_tokens import LeaseTokens
from fencepost.server.mesh.inboxes import Behind, LeasedInbox, SharedInbox
from fencepost.server.mesh.sending import Sending, ulid
from fencepost.server.origins import Origins
from fencepost.store.contract import Published, Store, StoreAwayError
from fencepost.store.group_contract import GroupReads
from fencepost.store.mesh_contract import MeshReads

log = logging.getLogger(__name__)

TICK_S = 0.5
"""How often silence, the ends of tokens and the leases are looked at."""

Offers = Callable[[Mesh], Supported]
Expires = Callable[[Request], int | None]
"""When the token of a request ends (wall clock, in milliseconds); None: it does not."""


class Sessions:
    """All sessions of this server."""

    def __init__(
        self,
        store: Store,
        meshes: MeshReads,
        groups: GroupReads,
        working: Working,
        tokens: LeaseTokens,
        sending: Sending,
        clock: Clock,
        limits: SessionLimits,
        *,
        origins: Origins,
        expires_ms: Expires | None,
    ) -> None:
        """`expires_ms` is None without authorization."""
        self.meshes = meshes
        self.sending = sending
        self.clock = clock
        self.limits = limits
        self.behind = Behind(working, groups, tokens, clock, limits)
        self._origins = origins
        self._expires_ms = expires_ms
        self._settings = WebSocketSettings(message_bytes_max=limits.frame_bytes_max)
        self._open: set[Session] = set()
        self._of: Counter[str] = Counter()
        """Sessions of each principal."""
        self._readers: dict[str, set[Session]] = {}
        """The sessions that read an inbox, by its path."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.opened = 0
        self.closed: Counter[str] = Counter()
        """How many ended, by the reason."""
        self.frames = self.delivered = 0
        store.listen(self._published)

    @property
    def count(self) -> int:
        """Sessions that are open."""
        return len(self._open)

    # Beginning

    def upgrade(self, request: Request, mesh: Mesh, supported: Supported) -> Answer:
        """Turn a request into a session; refuses a page whose origin is not allowed."""
        if self._origins.is_cross(request) and not self._origins.allows(request):
            detail = "pages of this origin may not use this server: [server] allowed_origins"
            raise RefusedError(403, "origin_not_allowed", "Origin not allowed", detail)
        if request.upgrade is None:
            headers = ((b"Upgrade", b"websocket"), (b"Connection", b"Upgrade"))
            detail = "a session is a WebSocket: ask for it with Upgrade: websocket"
            return refused(426, "upgrade_required", "Upgrade required", detail, *headers)
        principal = request.principal
        if self.is_full(principal):
            detail = f"sessions_per_principal_max is {self.limits.sessions_per_principal_max}"
            retry = (b"Retry-After", b"1")
            return refused(429, "too_many_sessions", "Too many sessions", detail, retry)
        expires_ms = None if self._expires_ms is None else self._expires_ms(request)

        def begin(socket: Socket) -> Session:
            return Session(self, socket, mesh, supported, principal, expires_ms)

        return UpgradeResponse(begin, self._settings)

    def is_full(self, principal: Principal | None) -> bool:
        """Whether a principal has all the sessions that it may have."""
        return self._of[_name(principal)] >= self.limits.sessions_per_principal_max

    def joined(self, session: Session) -> None:
        """A session is open."""
        self._open.add(session)
        self._of[_name(session.principal)] += 1
        self.opened += 1

    def left(self, session: Session, close: Close) -> None:
        """A session has ended."""
        self._open.discard(session)
        name = _name(session.principal)
        self._of[name] -= 1
        if not self._of[name]:
            del self._of[name]
        self.closed[close.kind] += 1
        inbox = session.inbox
        if inbox is not None and (readers := self._readers.get(inbox.path)) is not None:
            readers.discard(session)
            if not readers:
                del self._readers[inbox.path]

    def reads(self, session: Session, inbox: SharedInbox) -> None:
        """A session reads an inbox from now on; with the lease of it no other one does."""
        readers = self._readers.setdefault(inbox.path, set())
        replaced = list(readers) if isinstance(inbox, LeasedInbox) else []
        readers.add(session)
        for other in replaced:
            other.end(sessions.REPLACED)

    def spawn(self, session: Session, hello: Hello) -> asyncio.Task[None]:
        """Carry a session from its hello on."""
        task = asyncio.get_running_loop().create_task(session.run(hello))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Going on

    def _published(self, changes: Sequence[Published]) -> None:
        if not self._readers:
            return
        for change in changes:
            for session in self._readers.get(change.info.path, ()):
                session.wake()

    async def run(self) -> None:
        """Look after all sessions until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.tick()
            except Exception:
                log.exception("looking after sessions failed and will be tried again")

    def tick(self) -> None:
        """Look at every session once: its token, its silence, its lease."""
        now_ms, wall_ms = self.clock.monotonic_ms(), self.clock.wall_ms()
        for session in list(self._open):
            session.tick(now_ms, wall_ms)

    # Ending

    def stop(self) -> None:
        """The server is going down: no session begins, and the open ones finish their sends."""
        self._stopping = True
        for session in list(self._open):
            session.draining()

    @property
    def stopping(self) -> bool:
        """Whether the server is going down."""
        return self._stopping

    async def close(self) -> None:
        """End what is left."""
        for session in list(self._open):
            session.end(sessions.GOING_AWAY)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Session:
    """One session: what receives from its WebSocket."""

    def __init__(
        self,
        sessions_: Sessions,
        socket: Socket,
        mesh: Mesh,
        supported: Supported,
        principal: Principal | None,
        expires_ms: int | None,
    ) -> None:
        self._sessions = sessions_
        self._socket = socket
        self._mesh = mesh
        self._supported = supported
        self.principal = principal
        self._expires_ms = expires_ms
        self._limits = sessions_.limits
        self._state = NEW
        self._opened_ms = self._heard_ms = sessions_.clock.monotonic_ms()
        self._pinged_ms: int | None = None
        self._renewed_ms = self._opened_ms
        self._task: asyncio.Task[None] | None = None
        self._is_taking = False
        """Whether the lease of an inbox is on its way: it must arrive to be given back."""
        self._draining = False
        self._ended = False
        self.inbox: SharedInbox | None = None
        is_full = sessions_.is_full(principal)
        sessions_.joined(self)
        if is_full:
            self.end(sessions.TOO_MANY)
        elif sessions_.stopping:
            self.end(sessions.GOING_AWAY)

    # For the WebSocket.

    def received(self, message: bytes) -> None:
        """A frame came."""
        try:
            self._received(message)
        except Exception:
            log.exception("a frame of a session failed")
            self.end(sessions.DEFECT)

    def writable(self) -> None:
        """The client has read: go on with deliveries."""
        self.wake()

    def draining(self) -> None:
        """The server stops: answer the sends under way, then close."""
        if self._draining or self._ended:
            return
        self._draining = True
        self._socket.pause()
        self._cancel()
        self._end_when_drained()

    def closed(self, closed: object) -> None:  # noqa: ARG002 - the receiver's signature
        """The connection is over: nothing can be said any more."""
        self._leave(sessions.NORMAL)

    # Frames.

    def _received(self, message: bytes) -> None:
        if self._ended:
            return
        sessions_ = self._sessions
        sessions_.frames += 1
        self._heard_ms, self._pinged_ms = sessions_.clock.monotonic_ms(), None
        if self._expires_ms is not None and sessions_.clock.wall_ms() >= self._expires_ms:
            self.end(sessions.EXPIRED)
            return
        frame = sessions.parse_client_frame(message, self._limits)
        after = frame if isinstance(frame, Close) else sessions.receive(self._state, frame)
        if isinstance(frame, Close) or isinstance(after, Close):
            assert isinstance(after, Close)
            self.end(after)
            return
        self._state = after
        self._take(frame)

    def _take(self, frame: ClientFrame) -> None:
        match frame:
            case SendFrame(frame_id, send):
                self._pause_when_full()
                self._sessions.sending.send(
                    self._mesh.name,
                    send,
                    None,
                    self.principal,
                    lambda answer: self._sent(frame_id, answer),
                )
            case Ack(frame_id):
                self._pause_when_full()
                if self.inbox is None:
                    detail = "the hello of this session named no member"
                    self._answer(frame_id, 400, {"code": "ack_invalid", "detail": detail})
                    return
                self.inbox.ack(frame, lambda status, body: self._answer(frame_id, status, body))
            case Ping():
                self._socket.send(sessions.pong_frame(frame))
            case Pong():
                pass
            case Hello():
                # The frames behind the hello wait until it is answered.
                self._socket.pause()
                self._task = self._sessions.spawn(self, frame)

    def _pause_when_full(self) -> None:
        if self._state.in_flight >= self._limits.in_flight_max:
            self._socket.pause()

    def _sent(self, frame_id: bytes, answer: SendAnswer) -> None:
        item = answer_item(answer)
        body = item["body"]
        assert isinstance(body, dict)
        self._answer(frame_id, answer.status, body)

    def _answer(self, frame_id: bytes, status: int, body: dict[str, object] | None) -> None:
        was_full = self._state.in_flight >= self._limits.in_flight_max
        self._state = sessions.answered(self._state)
        if self._ended:
            return
        self._socket.send(sessions.answer_frame(frame_id, status, body))
        if self._draining:
            self._end_when_drained()
        elif was_full:
            self._socket.resume()

    # From the hello on.

    async def run(self, hello: Hello) -> None:
        """Negotiate, and deliver what is in the inbox of the member until cancelled."""
        try:
            close = await self._begin(hello)
            if close is not None:
                self.end(close)
            elif self.inbox is not None:
                await self.inbox.run()
        except StoreAwayError:
            self.end(sessions.AWAY)
        except Exception:
            log.exception("a session failed")
            self.end(sessions.DEFECT)

    async def _begin(self, hello: Hello) -> Close | None:
        outcome = features.negotiate(hello.wishes, self._supported)
        if isinstance(outcome, FeatureRefused):
            return sessions.closed_for(outcome)
        if hello.member is not None:
            close = await self._open_inbox(hello, hello.member)
            if close is not None:
                return close
        if not self._ended:
            self._socket.send(sessions.welcome_frame(outcome))
            self._socket.resume()
        return None

    async def _open_inbox(self, hello: Hello, name: str) -> Close | None:
        member = Member(self._mesh.name, name, 0)
        concurrent = self._mesh.settings.default_policy == "allow_concurrent"
        refusal = self._refuse_grants(member, needs_claim=not concurrent)
        if refusal is not None:
            return refusal
        behind = self._sessions.behind
        known = await behind.working.find(member.group)
        if known is None or await self._sessions.meshes.name(self._mesh.name, "dm", name) is None:
            return sessions.member_missing(name)
        if concurrent:
            after = -1 if hello.after is None else hello.after
            self._reads(SharedInbox(behind, member, self._deliver, after))
            return None
        inbox = LeasedInbox(behind, member, self._deliver, known, self.end)
        clock = self._sessions.clock
        worker = hello.worker or f"session:{ulid(clock.wall_ms(), clock.token(10))}"
        self._is_taking = True
        close = await inbox.take(worker)
        self._is_taking = False
        if close is not None:
            return close
        if self._ended:
            inbox.release()
            return None
        self._reads(inbox)
        return None

    def _reads(self, inbox: SharedInbox) -> None:
        if not self._ended:
            self.inbox = inbox
            self._sessions.reads(self, inbox)

    def _refuse_grants(self, member: Member, *, needs_claim: bool) -> Close | None:
        """The grants that a claim of the inbox over HTTP needs too."""
        principal = self.principal
        if principal is None:
            return None
        if not principal.may_read(member.path):
            return sessions.forbidden(f"you lack the verb read on {member.path}")
        if needs_claim and not principal.may(CLAIM, f"{GROUPS}/{member.group}"):
            return sessions.forbidden(f"you lack the verb claim on {GROUPS}/{member.group}")
        return None

    def _deliver(self, frame: bytes, entries: int) -> bool:
        if self._socket.send(frame):
            self._sessions.delivered += entries
        return not self._socket.writing_paused

    def wake(self) -> None:
        """There may be something to deliver."""
        if self.inbox is not None and not self._socket.writing_paused:
            self.inbox.wake()

    def tick(self, now_ms: int, wall_ms: int) -> None:
        """Look at the token, at silence and at the lease."""
        if self._expires_ms is not None and wall_ms >= self._expires_ms:
            self.end(sessions.EXPIRED)
            return
        if self._draining:
            return
        alive = sessions.decide_liveness(
            phase=self._state.phase,
            opened_ms=self._opened_ms,
            heard_ms=self._heard_ms,
            pinged_ms=self._pinged_ms,
            now_ms=now_ms,
            limits=self._limits,
        )
        if isinstance(alive, Close):
            self.end(alive)
            return
        if isinstance(alive, AskPing):
            self._pinged_ms = now_ms
            self._socket.send(sessions.ping_frame())
        if self.inbox is not None and now_ms - self._renewed_ms >= self._limits.lease_ms // 3:
            self._renewed_ms = now_ms
            self.inbox.renew()

    # The end.

    def _end_when_drained(self) -> None:
        if not self._state.in_flight:
            self.end(sessions.GOING_AWAY)

    def end(self, close: Close) -> None:
        """End the session, and tell the client why."""
        if self._ended:
            return
        if close.code not in (sessions.NORMAL.code, sessions.GOING_AWAY.code):
            self._socket.send(sessions.refused_frame(close))
        self._leave(close)
        self._socket.close(close.code, close.reason)

    def _leave(self, close: Close) -> None:
        if self._ended:
            return
        self._ended = True
        if self.inbox is not None:
            self.inbox.release()
        self._sessions.left(self, close)
        self._cancel()

    def _cancel(self) -> None:
        task = self._task
        if task is not None and not self._is_taking and task is not asyncio.current_task():
            task.cancel()


def _name(principal: Principal | None) -> str:
    return "" if principal is None else principal.name
