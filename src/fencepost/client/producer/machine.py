"""The idempotent producer as a state machine: events in, transmissions out, no I/O and no clock.

Messages are put into batches; a batch gets a sequence number when it is first sent and keeps it,
with its bytes, until it is settled. The machine hands out transmissions in the order of their
numbers (`next_send`), and is told of every answer in the order of the requests, of lost
connections and of the time. Two rules carry everything:

- A batch that may have been stored is never given another number. It is sent again as it was, and
  the server knows it again.
- Nothing is stored behind a message that could not be stored. A refusal that a retry cannot heal
  ends the producer; every batch that is not stored is settled with an error and its data.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from fencepost.client.errors import (
    ConnectionFailedError,
    EpochContestedError,
    FencepostError,
    OutcomeUnknownError,
    ProducerClosedError,
    ProducerFailedError,
    ProtocolError,
    ResponseError,
    SequenceUsedError,
    require,
)
from fencepost.client.errors.answers import error_of
from fencepost.client.http import Response
from fencepost.client.operations import is_about_type
from fencepost.client.producer.batches import PendingBatch
from fencepost.client.results import Receipt
from fencepost.client.retry import REPEATED, retry_after
from fencepost.client.settings import WARNED_ATTEMPT, ProducerSettings

log = logging.getLogger(__name__)

BATCH_MESSAGES_MAX = 50_000
"""Messages in one batch: half of what our server takes."""
OURS = frozenset(("stream-next-offset", "producer-epoch", "producer-seq"))
"""Headers of an acknowledgement: every server of the protocol gives one of them."""
EPOCH_RACES_MAX = 8
"""How often opening an epoch may be overtaken by another producer before it is an error."""
SEQ_MAX = 2**53 - 1

B = TypeVar("B", bound=PendingBatch)


class Machine(Generic[B]):
    """One session of one producer on one stream."""

    def __init__(
        self,
        settings: ProducerSettings,
        make_batch: Callable[[float], B],
        new_key: Callable[[], str],
        dice: Callable[[], float],
        *,
        epoch: int | None = None,
        seq: int | None = None,
        path: str = "",
    ) -> None:
        self._path = path
        require(seq is None or epoch is not None, "seq goes with the epoch it was used in")
        require(0 <= (epoch or 0) <= SEQ_MAX, "epoch is from 0 to 2**53 - 1")
        require(-1 <= (-1 if seq is None else seq) < SEQ_MAX, "seq is from 0 to 2**53 - 2")
        self._settings = settings
        self._make_batch = make_batch
        self._new_key = new_key
        self._dice = dice
        self._probing = epoch is None
        self._epoch = epoch or 0
        self._next_seq = 0 if seq is None else seq + 1
        # Only a session whose epoch is known to be its own may have several requests under way.
        self._opened = seq is not None
        self._races = 0
        self._batch: B | None = None
        self._sealed: deque[B] = deque()
        self._unsettled: deque[B] = deque()
        self._wire: deque[B] = deque()
        self._connected = False
        self._healing = False
        self._not_before = 0.0
        self._failures = 0
        self._progress = 0.0
        self._acked_at = 0.0
        self._closed = False
        self._last_failure: Exception | None = None
        self.pending_bytes = 0
        """Bytes that are not acknowledged yet."""
        self.failure: ProducerFailedError | None = None
        self.last_acked: Receipt | None = None
        self.settled: list[B] = []
        """Batches that were settled and not reported yet; `Session.report` empties it."""
        self.drop = False
        """Set when the connection is of no more use; closing it, by `lost`, clears it."""
        self.stream_closed = False
        """Whether the server said that the stream is closed with the last batch."""
        self.mistyped: ResponseError | None = None
        """Set when the stream turns out not to be JSON; `retype` clears it."""

    # What the user does.

    def append(self, data: Any, now: float) -> B:
        """Queue a message; the batch it is in is its handle."""
        batch = self._batch
        if batch is None:
            if self.failure is not None:
                raise self.failure
            if self._closed:
                raise ProducerClosedError("the producer was closed")
            batch = self._make_batch(now)
        self.pending_bytes += batch.add(data)
        # Only now: a message that cannot be encoded leaves nothing behind.
        self._batch = batch
        if batch.size >= self._settings.batch_bytes_max or batch.count >= BATCH_MESSAGES_MAX:
            self._seal()
        return batch

    def flush(self) -> list[B]:
        """Let nothing linger; these are the batches to wait for."""
        self._seal()
        return [*self._unsettled, *self._sealed]

    def close(self, now: float, *, stream: bool = False) -> None:
        """Take no more messages; what was appended is still delivered.

        With `stream`, the last batch that was not sent closes the stream. If all were sent, an
        empty one behind them does: it has a number as well, so that a predecessor which was fenced
        closes nothing.
        """
        self._seal()
        self._closed = True
        if not stream or self.failure is not None:
            return
        if not self._sealed and (self._opened or self._unsettled):
            self._sealed.append(self._make_batch(now))
        if self._sealed:
            self._sealed[-1].closes = True

    def abandon(self, reason: Exception) -> None:
        """Give up now: everything is settled with what is known about it."""
        self._doom(reason)
        self._lose_wire()

    @property
    def _waiting(self) -> list[B]:
        """Every batch that is not settled."""
        last = [] if self._batch is None else [self._batch]
        return [*self._unsettled, *self._sealed, *last]

    @property
    def holds_bytes(self) -> bool:
        """Whether what waits was taken for JSON although bytes are in it."""
        return any(batch.holds_bytes for batch in self._waiting)

    def retype(self, refusal: FencepostError) -> None:
        """The stream is not JSON: encode what was appended as texts and bytes."""
        self.mistyped = None
        waiting = self._waiting
        self.pending_bytes -= sum(batch.weight for batch in waiting)
        fits = all(batch.retype() for batch in waiting)
        self.pending_bytes += sum(batch.weight for batch in waiting)
        if not fits:
            self.abandon(refusal)

    # What the world does.

    def connected(self, now: float) -> None:
        """A fresh connection is there."""
        assert not self._connected
        self._connected = True
        self._progress = now

    def lost(self, failure: Exception, now: float) -> None:
        """The connection broke, or could not be made. What was on it is sent again."""
        idle = self._connected and not self._wire and not self.drop
        self._connected = False
        self.drop = False
        self._healing = False
        self._wire.clear()
        if self.failure is not None:
            self._lose_wire()
            return
        self._last_failure = failure
        if not idle:
            self._back_off(failure, now)

    def answered(self, response: Response, now: float) -> None:
        """The oldest request on the connection was answered."""
        if not self._wire:
            # Some proxies send 408 on an idle connection before they close it.
            self.drop = self._connected
            return
        batch = self._wire.popleft()
        self._progress = now
        if self.failure is not None:
            self._answered_late(batch, response)
        elif response.status in (200, 204) and not OURS & response.headers.keys():
            # A page of a proxy, for example: it must not pass for an acknowledgement.
            strange = ProtocolError("the answer is not that of a durable-streams server")
            strange.locate("POST", self._path, response.status, response.headers)
            self._doom(strange, batch, maybe_stored=True)
        elif batch.closes and not batch.count and self._is_closed(response):
            self._settle(batch, response, duplicate=batch.transmissions > 1)
        elif response.status == 200:
            self._accepted(batch, response)
        elif response.status == 204:
            self._repeated(batch, response)
        elif response.status in REPEATED:
            error = self._error(response)
            self._last_failure = error
            self._healing = True
            self._back_off(error, now)
        else:
            self._refused(batch, response)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self._wire and now - self._progress >= self._settings.answer_seconds_max:
            self.drop = True
        gives_up = self.gives_up_at()
        if gives_up is not None and now >= gives_up:
            last = self._last_failure or ConnectionFailedError("the server did not answer in time")
            self._doom(last)
            self._lose_wire()
            self.drop = self._connected

    # What is to be done.

    def next_send(self, now: float) -> B | None:
        """The batch to put on the connection now, if any; it counts as sent."""
        if not self.can_send(now):
            return None
        position = len(self._wire)
        if position == len(self._unsettled):
            self._number(self._take_new())
        batch = self._unsettled[position]
        batch.transmissions += 1
        if not self._wire:
            self._progress = now
        self._wire.append(batch)
        return batch

    def can_send(self, now: float) -> bool:
        """Whether `next_send` has something."""
        in_flight = len(self._wire)
        if (
            not self._connected
            or self.drop
            or in_flight >= self._window
            or now < self._not_before
            or self.failure is not None
        ):
            return False
        if self._healing:
            # Answers of the old round must be in before the next round begins in order.
            if in_flight:
                return False
            self._healing = False
        return in_flight < len(self._unsettled) or self._has_new(now)

    def wants_connection(self, now: float) -> bool:
        """Whether there is something to send and nothing to send it on."""
        return (
            not self._connected
            and self.failure is None
            and now >= self._not_before
            and (bool(self._unsettled) or self._has_new(now))
        )

    def wake_at(self) -> float | None:
        """When time itself will change something; None when only events can."""
        times: list[float] = []
        if self._wire:
            times.append(self._progress + self._settings.answer_seconds_max)
        gives_up = self.gives_up_at()
        if gives_up is not None:
            times.append(gives_up)
            if not self._wire and (self._unsettled or self._sealed):
                times.append(self._not_before)
            elif self._batch is not None and len(self._wire) < self._window and not self._healing:
                times.append(max(self._batch.begun + self._settings.linger, self._not_before))
        return min(times) if times else None

    @property
    def _window(self) -> int:
        return self._settings.max_in_flight if self._opened else 1

    @property
    def in_flight(self) -> int:
        """Batches that were sent and are not settled."""
        return len(self._unsettled)

    @property
    def pending(self) -> int:
        """Messages that are not settled."""
        open_count = self._batch.count if self._batch is not None else 0
        waiting = sum(batch.count for batch in self._sealed)
        return open_count + waiting + sum(batch.count for batch in self._unsettled)

    @property
    def busy(self) -> bool:
        """Whether anything is not settled yet."""
        return bool(self._unsettled or self._sealed or self._batch is not None)

    # How answers are judged.

    def _error(self, response: Response) -> ResponseError:
        error = error_of(response.status, response.headers, response.body)
        error.locate("POST", self._path, response.status, response.headers)
        return error

    @staticmethod
    def _is_closed(response: Response) -> bool:
        """Whether the stream is closed, by this request or by one before it."""
        return response.status in (200, 204, 409) and response.is_true("stream-closed")

    def _accepted(self, batch: B, response: Response) -> None:
        self._opened = True
        self._settle(batch, response, duplicate=response.is_true("idempotency-replayed"))

    def _repeated(self, batch: B, response: Response) -> None:
        """204: the server has a request under this number. Is it this one?"""
        if not self._opened:
            self._opening_taken(batch, response)
            return
        if batch.transmissions == 1 or response.headers.get("producer-match") == "false":
            self._doom(self._used(batch, response), batch, maybe_stored=False)
            return
        self._settle(batch, response, duplicate=True)

    def _opening_taken(self, batch: B, response: Response) -> None:
        """The first request of an epoch carries a key, which tells our own from another's."""
        knows_keys = response.status == 409 or "stream-version" in response.headers
        if batch.transmissions > 1 and not knows_keys:
            self._doom(
                OutcomeUnknownError(
                    "the answer to the first request of the session was lost, and this server"
                    " cannot say whose request it holds"
                ),
                batch,
                maybe_stored=True,
            )
        elif self._probing:
            current = response.integer("producer-epoch")
            self._next_epoch(batch, self._epoch if current is None else current)
        else:
            self._doom(self._used(batch, response), batch, maybe_stored=False)

    def _answered_late(self, batch: B, response: Response) -> None:
        """The session has ended; what was still on its way is settled by its answer."""
        is_ours = bool(OURS & response.headers.keys())
        repeated = response.status == 204 and batch.transmissions > 1
        matches = response.headers.get("producer-match") != "false"
        if is_ours and (response.status == 200 or (repeated and matches)):
            self._settle(batch, response, duplicate=repeated)
        else:
            assert self.failure is not None
            unclear = response.status in REPEATED or (response.status < 300 and not is_ours)
            maybe_stored = unclear or self._ambiguous(batch, response)
            self._unsettled.remove(batch)
            self._give_up(batch, self.failure, maybe_stored=maybe_stored)
        self._bury()

    def _refused(self, batch: B, response: Response) -> None:
        error = self._error(response)
        if error.code == "producer_sequence_gap" and self._heals(batch, response):
            self._healing = True
            return
        if error.code == "idempotency_key_conflict" and not self._opened:
            # The number is taken by other bytes than ours, so it cannot be ours.
            self._opening_taken(batch, response)
            return
        if error.code == "producer_epoch_stale" and self._probing and not self._opened:
            current = response.integer("producer-epoch")
            if current is not None:
                self._next_epoch(batch, current)
                return
        if self.last_acked is None and batch.retypable and is_about_type(error):
            # Nothing can have been stored as JSON: it is sent again as what the stream holds.
            for waiting in self._unsettled:
                waiting.transmissions = 0
            self.mistyped = error
            self.drop = True
            return
        if response.status == 401 and self._settings.renewable and not batch.renewals:
            batch.renewals += 1
            self.drop = True
            return
        self._last_failure = error
        self._doom(error, batch, maybe_stored=self._ambiguous(batch, response))

    @staticmethod
    def _ambiguous(batch: B, response: Response) -> bool:
        """Whether an earlier transmission may have been stored although this one was refused.

        A server that refuses for the sake of a newer epoch does not say what the older one did; one
        that waits for an earlier number does.
        """
        return batch.transmissions > 1 and "producer-expected-seq" not in response.headers

    def _heals(self, batch: B, response: Response) -> bool:
        """Whether the server only waits for a batch that is going to be sent again."""
        expected = response.integer("producer-expected-seq")
        assert batch.seq is not None
        return (
            expected is not None
            and expected < batch.seq
            and any(other.seq == expected for other in self._unsettled)
        )

    def _next_epoch(self, batch: B, current: int) -> None:
        self._races += 1
        if self._races > EPOCH_RACES_MAX:
            self._doom(
                EpochContestedError(f"{EPOCH_RACES_MAX} epochs were opened by others meanwhile"),
                batch,
                maybe_stored=False,
            )
            return
        # Never backwards, and never the epoch that was just refused.
        self._epoch = max(current, self._epoch) + 1
        batch.epoch = self._epoch
        batch.transmissions = 0

    def _used(self, batch: B, response: Response) -> SequenceUsedError:
        assert batch.epoch is not None
        assert batch.seq is not None
        last = response.integer("producer-seq")
        return SequenceUsedError(epoch=batch.epoch, seq=batch.seq, last_seq=last)

    # How batches move.

    def _seal(self) -> None:
        if self._batch is not None:
            self._sealed.append(self._batch)
            self._batch = None

    def _has_new(self, now: float) -> bool:
        if self._sealed:
            return True
        batch = self._batch
        return batch is not None and now - batch.begun >= self._settings.linger

    def _take_new(self) -> B:
        if not self._sealed:
            self._seal()
        return self._sealed.popleft()

    def _number(self, batch: B) -> None:
        assert self._next_seq <= SEQ_MAX
        batch.epoch, batch.seq = self._epoch, self._next_seq
        if not self._opened:
            batch.key = self._new_key()
        self._next_seq += 1
        self._unsettled.append(batch)

    def _settle(self, batch: B, response: Response, *, duplicate: bool) -> None:
        assert batch.epoch is not None
        assert batch.seq is not None
        self._failures = 0
        self._not_before = 0.0
        self._acked_at = self._progress
        if batch.closes:
            self.stream_closed = response.is_true("stream-closed")
        batch.receipt = Receipt(
            epoch=batch.epoch,
            seq=batch.seq,
            messages=batch.count,
            next_offset=response.headers.get("stream-next-offset", ""),
            duplicate=duplicate,
        )
        if self.last_acked is None or batch.seq > self.last_acked.seq:
            self.last_acked = batch.receipt
        self._unsettled.remove(batch)
        self._done(batch)

    def _doom(
        self, error: Exception, culprit: B | None = None, *, maybe_stored: bool = False
    ) -> None:
        """End the session. What is on the wire is still waited for, then the rest is settled."""
        if culprit is not None:
            self._unsettled.remove(culprit)
            self._give_up(culprit, error, maybe_stored=maybe_stored)
        if self.failure is not None:
            return
        if isinstance(error, FencepostError):
            error.locate("POST", self._path, None, {})
        self.failure = ProducerFailedError(f"the producer has stopped: {error}", cause=error)
        self.failure.__cause__ = error
        self._seal()
        self._unsettled.extend(self._sealed)
        self._sealed.clear()
        self._bury()

    def _bury(self) -> None:
        """Settle what will never be sent, in order: behind what is still waited for."""
        if not self._wire:
            self._lose_wire()

    def _lose_wire(self) -> None:
        """No answer will come any more: settle every batch with what is known about it."""
        self._wire.clear()
        assert self.failure is not None
        while self._unsettled:
            batch = self._unsettled.popleft()
            if not batch.transmissions:
                self._give_up(batch, self.failure, maybe_stored=False)
                continue
            unknown = OutcomeUnknownError(
                "the batch was sent and its answer lost: it may or may not be stored",
                cause=self.failure.cause,
            )
            unknown.__cause__ = self.failure.cause
            self._give_up(batch, unknown, maybe_stored=True)

    def _give_up(self, batch: B, error: Exception, *, maybe_stored: bool) -> None:
        batch.error = error
        batch.maybe_stored = maybe_stored
        self._done(batch)

    def _done(self, batch: B) -> None:
        self.pending_bytes -= batch.weight
        self.settled.append(batch)

    def _back_off(self, failure: Exception, now: float) -> None:
        delay = self._settings.retries.delay(self._failures, self._dice(), retry_after(failure))
        self._failures += 1
        log.log(
            logging.WARNING if self._failures == WARNED_ATTEMPT else logging.DEBUG,
            "the producer on %s cannot store its messages yet, and tries again: %s",
            *(self._path, failure),
        )
        self._not_before = max(self._not_before, now + delay)

    def gives_up_at(self) -> float | None:
        """When the producer gives up unless something is acknowledged before; None: nothing waits.

        A long queue is no reason to give up while it is getting shorter.
        """
        if self._unsettled:
            oldest = self._unsettled[0]
        elif self._sealed:
            oldest = self._sealed[0]
        elif self._batch is not None:
            oldest = self._batch
        else:
            return None
        if self.failure is not None:
            return None
        return max(oldest.begun, self._acked_at) + self._settings.delivery_seconds_max
