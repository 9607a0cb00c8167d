"""One session of a producer: requests made of batches, and callbacks. Sync and async share it.

The state machine (`machine.py`) decides what is sent. Here its batches become requests, settled
ones are reported to `on_ack` and `on_error`, and a producer that was forgotten is closed at exit.
Both producers send on one connection and pipeline: the server answers in order and shares a commit
among the requests it finds.
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
from fencepost.client.errors import (
    ConnectionFailedError,
    FencepostError,
    ProducerFailedError,
    ResponseError,
    UnencodableError,
    require,
)
from fencepost.client.http import Request, path_of, render_head
from fencepost.client.operations import BYTES_REFUSED, is_json, new_key, stream_target
from fencepost.client.producer.batches import PendingBatch
from fencepost.client.producer.machine import Machine
from fencepost.client.results import Receipt
from fencepost.client.retry import REPEATED, Kind, dressed, exchange
from fencepost.client.settings import JSON, ClientSettings, ProducerSettings

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


class Content:
    """The content type of a producer's stream; JSON, as long as it is not known."""

    __slots__ = ("is_known", "json", "type")

    def __init__(self, content_type: str | None) -> None:
        self.is_known = False
        self.type, self.json = JSON, True
        if content_type is not None:
            self.learn(content_type)

    def learn(self, content_type: str) -> None:
        self.is_known = True
        self.type, self.json = content_type, is_json(content_type)


class Session(Generic[B]):
    """One session of a producer: its state machine, and its batches as requests."""

    def __init__(
        self,
        settings: ClientSettings,
        path: str,
        content: Content,
        producer_id: str,
        tuning: ProducerSettings,
        make_batch: Callable[[float], B],
        *,
        epoch: int | None,
        seq: int | None,
        on_ack: OnAck | None,
        on_error: OnError | None,
    ) -> None:
        require(isinstance(producer_id, str), f"producer_id is a text, not {producer_id!r}")
        require(producer_id != "", "the id of a producer is not empty")
        clock = settings.clock
        self.settings = settings
        self.tuning = tuning
        self.content = content
        self._producer_id = producer_id
        self._target = stream_target(path)
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
            path=path_of(settings.address, Request("POST", self._target)),
        )

    def now(self) -> float:
        return self.settings.clock.monotonic_ns() / 1e9

    def _learn_type(self, refusal: FencepostError) -> Operation[None]:
        """Ask what the stream holds; if it is JSON, `refusal` is why the producer ends."""
        try:
            answer = yield from exchange(self.settings, Request("HEAD", self._target), Kind.READ)
            content_type = answer.response.headers.get("content-type", JSON)
        except ResponseError as failure:
            if failure.status in REPEATED:
                raise ConnectionFailedError(str(failure)) from failure
            content_type = JSON  # the caller may append and not ask
        self.content.learn(content_type)
        if self.content.json:
            self.machine.abandon(refusal)
        else:
            self.machine.retype(refusal)

    def dress(self) -> Operation[None]:
        """Ask for what every request carries, once for each connection."""
        if self.machine.mistyped is not None:
            yield from self._learn_type(self.machine.mistyped)
        elif not self.content.is_known and self.machine.holds_bytes:
            yield from self._learn_type(UnencodableError(BYTES_REFUSED))
        headers = (("Content-Type", self.content.type), ("Producer-Id", self._producer_id))
        request = yield from dressed(self.settings, Request("POST", self._target, headers))
        # All but the lines that differ from batch to batch.
        self._template = render_head(self.settings.address, request, 0).partition(
            b"Content-Length:"
        )[0]

    def render(self, batch: PendingBatch) -> tuple[bytes, bytes]:
        """A batch as it goes on the wire: head and body."""
        assert batch.epoch is not None
        assert batch.seq is not None
        body = batch.body
        rare = b"" if batch.key is None else b"Idempotency-Key: %b\r\n" % batch.key.encode()
        if batch.closes:
            rare += b"Stream-Closed: true\r\n"
        head = b"%bProducer-Epoch: %d\r\nProducer-Seq: %d\r\n%bContent-Length: %d\r\n\r\n" % (
            self._template,
            batch.epoch,
            batch.seq,
            rare,
            len(body),
        )
        return head, body

    def close_stream(self) -> Operation[None]:
        """Close the stream, if its last batch did not close it and nothing is lost.

        That is so when no message was sent at all. Asking for it again changes nothing.
        """
        machine = self.machine
        if machine.failure is None and not machine.stream_closed:
            request = Request("POST", self._target, (("Stream-Closed", "true"),))
            yield from exchange(self.settings, request, Kind.WRITE)
            machine.stream_closed = True

    def report(self) -> list[B]:
        """Tell the user what was settled."""
        settled, self.machine.settled = self.machine.settled, []
        if self.machine.last_acked is not None:
            self.content.is_known = True
        self.lost_count += sum(batch.count for batch in settled if batch.error is not None)
        for batch in settled:
            try:
                if batch.receipt is not None:
                    if self._on_ack is not None and batch.count:
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
