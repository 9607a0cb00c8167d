"""What both producers are made of: the state machine, its batches on the wire, its news.

Both send on one connection and pipeline: the server answers in order and shares a commit among the
requests it finds.
"""

from __future__ import annotations

import atexit
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from fencepost.client.effects import Operation
from fencepost.client.errors import ProducerFailedError, require
from fencepost.client.http import Request, render_head, wire_target
from fencepost.client.operations import new_key, stream_target
from fencepost.client.producer.machine import Machine, PendingBatch, ProducerSettings
from fencepost.client.results import Receipt
from fencepost.client.retry import Kind, dressed, exchange
from fencepost.client.settings import ClientSettings

log = logging.getLogger(__name__)

POLL_SECONDS = 0.0005
"""How often a producer that is called all the time looks for acknowledgements."""

EXIT_SECONDS_MAX = 10.0
"""How long the end of a program may wait for messages of a producer that was not closed."""
OPEN: WeakSet[Counts[Any]] = WeakSet()
"""Producers that exist; those that were forgotten are flushed when the program ends."""

OnAck = Callable[[Receipt], None]
OnError = Callable[[Exception, PendingBatch], None]
B = TypeVar("B", bound=PendingBatch)


@atexit.register
def leave_all() -> None:
    """Deliver what forgotten producers hold when the program ends, and say what is lost."""
    for producer in list(OPEN):
        if producer._is_forgotten():
            count, session = producer.pending_count, producer._session
            lost_before = session.lost_count
            producer._leave(EXIT_SECONDS_MAX)
            left = producer.pending_count + session.lost_count - lost_before
            if left:
                log.error(
                    "%d of %d messages of the producer %s may be lost: the program ended before"
                    " they were acknowledged; flush or close the producer: %s",
                    *(left, count, session.name, session.machine.failure),
                )
            else:
                log.warning(
                    "%d messages of the producer %s were stored while the program ended: flush or"
                    " close the producer",
                    *(count, session.name),
                )
        producer._closed = True


class Session(Generic[B]):
    """What both producers are made of: the machine, and how its batches look on the wire."""

    def __init__(
        self,
        settings: ClientSettings,
        path: str,
        content_type: str,
        producer_id: str,
        tuning: ProducerSettings,
        make_batch: Callable[[float], B],
        *,
        epoch: int | None,
        seq: int | None,
        on_ack: OnAck | None,
        on_error: OnError | None,
    ) -> None:
        require(producer_id != "", "the id of a producer is not empty")
        clock = settings.clock
        self.settings = settings
        self.tuning = tuning
        self._request = Request(
            "POST",
            stream_target(path),
            (("Content-Type", content_type), ("Producer-Id", producer_id)),
        )
        self._template = b""
        self._on_ack = on_ack
        self._on_error = on_error
        self._raised = False
        self._acknowledged = False
        self.name = f"{producer_id} on {path}"
        self.lost_count = 0
        """Messages that were not stored, or of which that is not known."""
        self.machine: Machine[B] = Machine(
            tuning,
            make_batch,
            lambda: new_key(settings),
            clock.random,
            epoch=epoch,
            seq=seq,
            path=wire_target(settings.address, self._request).partition("?")[0],
        )

    def now(self) -> float:
        return self.settings.clock.monotonic_ns() / 1e9

    def dress(self) -> Operation[None]:
        """Ask for what every request carries, once for each connection."""
        request = yield from dressed(self.settings, self._request)
        # All but the lines that differ from batch to batch.
        self._template = render_head(self.settings.address, request, 0).partition(
            b"Content-Length:"
        )[0]

    def render(self, batch: PendingBatch) -> tuple[bytes, bytes]:
        """A batch as it goes on the wire: head and body."""
        assert batch.epoch is not None
        assert batch.seq is not None
        body = batch.body
        key = b"" if batch.key is None else b"Idempotency-Key: %b\r\n" % batch.key.encode()
        head = b"%bProducer-Epoch: %d\r\nProducer-Seq: %d\r\n%bContent-Length: %d\r\n\r\n" % (
            self._template,
            batch.epoch,
            batch.seq,
            key,
            len(body),
        )
        return head, body

    def close_stream(self) -> Operation[None]:
        """Close the stream; asking for it again changes nothing."""
        request = Request("POST", self._request.target, (("Stream-Closed", "true"),))
        yield from exchange(self.settings, request, Kind.WRITE)

    def report(self) -> list[B]:
        """Tell the user what was settled."""
        settled, self.machine.settled = self.machine.settled, []
        self.lost_count += sum(batch.count for batch in settled if batch.error is not None)
        for batch in settled:
            try:
                if batch.receipt is not None:
                    if self._on_ack is not None:
                        self._on_ack(batch.receipt)
                elif self._on_error is not None:
                    assert batch.error is not None
                    self._on_error(batch.error, batch)
            except Exception:
                # A callback's failure must not lose the news of the batches after it.
                log.exception("a callback of the producer failed")
        return settled

    def raise_failure(self) -> None:
        """Raise why the session has ended, every time until it was acknowledged."""
        if self.machine.failure is not None and not self._acknowledged:
            self._raised = True
            raise self.machine.failure

    def raise_news(self) -> None:
        """Raise why the session has ended, unless that was raised before."""
        if not self._raised:
            self.raise_failure()

    def acknowledge(self) -> ProducerFailedError | None:
        """Take note of the failure: it is not raised again."""
        self._acknowledged = True
        return self.machine.failure


class Counts(Generic[B]):
    """What a producer shows of its session, and what happens if a program forgets to close it."""

    _session: Session[B]
    _pid: int
    _closed: bool

    def acknowledge(self) -> ProducerFailedError | None:
        """Take note of a failure, and get it: `flush` and `close` do not raise it any more.

        The producer stays stopped. Open another one to go on.
        """
        return self._session.acknowledge()

    def _is_forgotten(self) -> bool:
        """Whether messages wait here although no code of the program will deliver them."""
        return not self._closed and self._pid == os.getpid() and self.pending_count > 0

    def _leave(self, seconds: float) -> None:
        """The program ends: deliver what can be delivered in time."""

    def __del__(self) -> None:
        # The constructor may have failed before there was a session.
        if hasattr(self, "_session") and self._is_forgotten():
            count, name = self.pending_count, self._session.name
            log.error("%d messages of the producer %s are lost: it was not closed", count, name)
            warnings.warn(
                f"the producer {name} was dropped with {count} messages: flush or close it",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )

    @property
    def pending_count(self) -> int:
        """Messages that are not settled yet."""
        return self._session.machine.pending

    @property
    def pending_bytes(self) -> int:
        """Bytes of them."""
        return self._session.machine.pending_bytes

    @property
    def in_flight_count(self) -> int:
        """Batches that were sent and are not settled."""
        return self._session.machine.in_flight

    @property
    def last_acked(self) -> Receipt | None:
        """The newest acknowledged batch: save its `epoch` and `seq` to go on from there."""
        return self._session.machine.last_acked
