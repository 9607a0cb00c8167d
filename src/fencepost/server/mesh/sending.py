"""Sending: one send from the bytes of a client to the answer, however it came.

A request, a batch and a session all end here, so that each gives the same answers. `Sending` reads
the send, checks the grant, has the store decide it and counts what came of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from fencepost.clock import Clock
from fencepost.http.messages import Response
from fencepost.protocol.commits import PartRefusal
from fencepost.protocol.envelopes import Send, in_scope, parse_send, with_staged_body
from fencepost.protocol.fingerprints import Unsendable
from fencepost.protocol.grants import APPEND, Principal
from fencepost.protocol.meshes import destination_path
from fencepost.protocol.sends import (
    IdReused,
    MeshLimits,
    Repeated,
    SendAnswer,
    SendOutcome,
    Sent,
    answer_send,
)
from fencepost.server import access
from fencepost.server.handlers import rendering
from fencepost.server.handlers.staging import part_refused
from fencepost.store.contract import Failed, Failure, Store, StoreAwayError, Unknown
from fencepost.store.mesh_contract import MeshReads, SendRequest, StagedBody

log = logging.getLogger(__name__)

BODIES_READ_MAX = 4
"""Staged bodies that are read at once."""
COUNTED_MESHES_MAX = 1_000
"""Meshes that are counted one by one; those beyond are counted together."""
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

Told = Callable[[SendAnswer], None]


class Counted:
    """What happened in one mesh, for the metrics."""

    __slots__ = ("deliveries", "duplicates", "mismatches", "orphans", "sends")

    def __init__(self) -> None:
        self.sends = self.duplicates = self.mismatches = self.deliveries = 0
        self.orphans: int | None = None


class Sending:
    """Carries sends to the store."""

    def __init__(
        self,
        store: Store,
        reads: MeshReads,
        clock: Clock,
        limits: MeshLimits,
        *,
        takes_senders: bool,
    ) -> None:
        """`takes_senders`: without authorization a send names its sender itself."""
        self._store = store
        self._reads = reads
        self._reading = asyncio.Semaphore(BODIES_READ_MAX)
        self._tasks: set[asyncio.Task[None]] = set()
        self._clock = clock
        self.limits = limits
        self._takes_senders = takes_senders
        self.counted: dict[str, Counted] = {}
        self.orphan_checks = 0
        self.swept = 0

    def send(
        self, mesh: str, data: bytes, header_id: str | None, principal: Principal | None, told: Told
    ) -> None:
        """Have a send stored, and tell the answer once that is durable."""
        read = self.read(mesh, data, header_id, principal)
        if isinstance(read, SendAnswer):
            told(read)
        elif read.body.parts:
            task = asyncio.get_running_loop().create_task(self._send_staged(mesh, read, told))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._decide(mesh, read, told)

    def _decide(self, mesh: str, send: Send, told: Told) -> None:
        self._store.send(
            SendRequest(mesh, send), lambda outcome: told(self.answer(mesh, send, outcome))
        )

    async def _send_staged(self, mesh: str, send: Send, told: Told) -> None:
        """Read the staged body first: the fingerprint is of its bytes."""
        try:
            async with self._reading:
                body = await self._reads.staged_body(send.body.parts, self.limits.blob_bytes_max)
        except StoreAwayError:
            told(_failed(Failed(full=False)))
        except Exception:
            log.exception("the staged body of a send cannot be read")
            told(_failed(Failed(full=False)))
        else:
            if not isinstance(body, StagedBody):
                told(self.answer(mesh, send, body))
                return
            size, found, chunks = body
            self._decide(
                mesh, with_staged_body(send, size=size, body_sha256=found, chunks=chunks), told
            )

    def read(
        self, mesh: str, data: bytes, header_id: str | None, principal: Principal | None
    ) -> Send | SendAnswer:
        """The send, or the answer that refuses it: for what it says, or for want of a grant."""
        if principal is None and not self._takes_senders:
            detail = "without [[principals]] a send is taken on loopback only: any other sender"
            return SendAnswer(403, "forbidden", {"detail": f"{detail} could claim to be another"})
        send = parse_send(
            data,
            header_id=header_id,
            minted_id=ulid(self._clock.wall_ms(), self._clock.token(10)),
            principal=None if principal is None else principal.name,
        )
        if isinstance(send, Unsendable):
            return answer_send(send)
        if send.body.parts:
            send = in_scope(send, access.scope_of(principal))
        path = destination_path(mesh, send.kind, send.ref)
        if principal is not None and not principal.may(APPEND, path):
            return SendAnswer(403, "forbidden", {"detail": f"you lack the verb append on {path}"})
        return send

    def answer(self, mesh: str, send: Send, outcome: SendOutcome | Failure) -> SendAnswer:
        """Turn the outcome of a send into the sender's answer, and count it."""
        if isinstance(outcome, Failed | Unknown):
            return _failed(outcome)
        if isinstance(outcome, PartRefusal):
            return _as_answer(part_refused(outcome))
        if isinstance(outcome, Sent | Repeated | IdReused):
            self._count(mesh, send, outcome)
        return answer_send(outcome)

    def _count(self, mesh: str, send: Send, outcome: Sent | Repeated | IdReused) -> None:
        counted = self.count_of(mesh)
        match outcome:
            case Sent(recipients=recipients):
                counted.sends += 1
                counted.deliveries += len(recipients) or 1
            case Repeated():
                counted.duplicates += 1
            case IdReused(client_message_id, prefix):
                counted.mismatches += 1
                # The id is not a label: there is no end to ids.
                log.warning(
                    "mesh %s: %r sent another message under the id %r, which stands for %s",
                    mesh,
                    send.sender,
                    client_message_id,
                    prefix,
                )

    def count_of(self, mesh: str) -> Counted:
        """The counts of a mesh."""
        if mesh not in self.counted and len(self.counted) >= COUNTED_MESHES_MAX:
            mesh = "others"
        return self.counted.setdefault(mesh, Counted())

    def forget(self, mesh: str) -> None:
        """A mesh is gone: its counts make room for those of another."""
        self.counted.pop(mesh, None)


def _failed(outcome: Failed | Unknown) -> SendAnswer:
    return _as_answer(rendering.failed(outcome))


def _as_answer(response: Response) -> SendAnswer:
    assert isinstance(response.body, bytes)
    problem = msgspec.json.decode(response.body)
    return SendAnswer(response.status, problem["code"], {"detail": problem["detail"]})


def ulid(now_ms: int, randomness: bytes) -> str:
    """An id that sorts by its time: 48 bits of milliseconds, 80 of randomness."""
    number = (now_ms << 80) | int.from_bytes(randomness, "big")
    return "".join(_CROCKFORD[(number >> shift) & 31] for shift in range(125, -1, -5))
