"""What both producers are made of: the state machine, its batches on the wire, its news.

Both send on one connection and pipeline: the server answers in order and shares a commit among the
requests it finds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from fencepost.client.effects import Operation
from fencepost.client.http import Request, render_head
from fencepost.client.operations import new_key, stream_target
from fencepost.client.producer.machine import Machine, PendingBatch, ProducerSettings
from fencepost.client.results import Receipt
from fencepost.client.retry import dressed
from fencepost.client.settings import ClientSettings

log = logging.getLogger(__name__)

POLL_SECONDS = 0.0005
"""How often a producer that is called all the time looks for acknowledgements."""

OnAck = Callable[[Receipt], None]
OnError = Callable[[Exception, PendingBatch], None]
B = TypeVar("B", bound=PendingBatch)


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
        self.machine: Machine[B] = Machine(
            tuning,
            make_batch,
            lambda: new_key(settings),
            clock.random,
            epoch=epoch,
            seq=seq,
            path=settings.address.prefix + stream_target(path),
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

    def report(self) -> list[B]:
        """Tell the user what was settled."""
        settled, self.machine.settled = self.machine.settled, []
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
        """Say once that the session has ended."""
        if self.machine.failure is not None and not self._raised:
            self._raised = True
            raise self.machine.failure


class Counts(Generic[B]):
    """What a producer shows of its session."""

    _session: Session[B]

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
