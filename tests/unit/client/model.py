"""A server without a disk and a network without wires, for the producer's state machine.

The server decides with the project's own rule and answers with its own rendering, so that the
machine meets the answers it will meet outside. The network loses connections at any point: what was
on its way arrives up to some request, and the rest may still arrive at any later time, or never.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec

from fencepost.client.errors import ConnectionFailedError
from fencepost.client.http import Response
from fencepost.client.producer.batches import PendingBatch
from fencepost.client.producer.machine import Machine
from fencepost.client.settings import ProducerSettings, Retries
from fencepost.http.messages import Response as ServerResponse
from fencepost.protocol.appends import (
    Append,
    Appended,
    Conditions,
    KeyRecord,
    ProducerTuple,
    decide_append,
)
from fencepost.protocol.batches import Malformed, digest, json_batch
from fencepost.protocol.streams import Producer, Stream
from fencepost.server.handlers import rendering

JSON = "application/json"


class Wired(NamedTuple):
    """A request as it is on its way."""

    epoch: int
    seq: int
    key: str | None
    body: bytes


class ModelServer:
    """One stream, its producers and keys; `stored` is what a reader would see."""

    def __init__(self) -> None:
        self.stream = Stream(1, "orders", JSON, created_ms=0)
        self.producers: dict[str, Producer] = {}
        self.keys: dict[str, KeyRecord] = {}
        self.stored: list[list[int]] = []

    def take(self, wired: Wired, producer_id: str = "p") -> Response:
        """Decide and answer."""
        batch = json_batch(wired.body)
        assert batch is not None
        assert not isinstance(batch, Malformed)
        request = Append(
            "orders",
            batch,
            JSON,
            producer=ProducerTuple(producer_id, wired.epoch, wired.seq),
            digest=digest(JSON, False, batch.data),
            conditions=None if wired.key is None else Conditions(key=wired.key),
        )
        key = None if wired.key is None else self.keys.get(wired.key)
        known = self.producers.get(producer_id)
        position = len(self.stored)
        outcome = decide_append(self.stream, known, request, key=key, position=position, now_ms=0)
        if isinstance(outcome, Appended):
            assert outcome.producer is not None
            self.producers[producer_id] = outcome.producer
            self.stream.tail = outcome.tail
            self.stored += msgspec.json.decode(wired.body, type=list[list[int]])
            if wired.key is not None:
                self.keys[wired.key] = KeyRecord(
                    request.digest, outcome.start, outcome.tail, False, outcome.position, 0
                )
        return as_client_sees(rendering.appended("s", outcome))


def as_client_sees(response: ServerResponse) -> Response:
    """The server's answer after its way over the wire."""
    headers = {name.decode().lower(): value.decode() for name, value in response.headers}
    for line in response.block.decode().splitlines():
        name, _, value = line.partition(": ")
        headers[name.lower()] = value
    assert isinstance(response.body, bytes)
    return Response(response.status, headers, response.body)


def unavailable() -> Response:
    """A 503 that says nothing about what was stored."""
    return Response(503, {"content-type": "text/plain"}, b"try again")


class Session:
    """A producer, its connection, and what became of each message."""

    def __init__(
        self,
        number: int,
        server: ModelServer,
        *,
        epoch: int | None = None,
        seq: int | None = None,
        settings: ProducerSettings | None = None,
    ) -> None:
        keys = iter(range(1_000_000))
        self.number = number
        self.server = server
        self.now = 0.0
        self.machine: Machine[PendingBatch] = Machine(
            settings
            or ProducerSettings(
                batch_bytes_max=24, retries=Retries(delay_seconds_max=1.0), linger=0.0
            ),
            lambda now: PendingBatch(json=True, now=now),
            lambda: f"{number}-{next(keys)}",
            lambda: 0.5,
            epoch=epoch,
            seq=seq,
        )
        self.up = False
        self.to_server: deque[Wired] = deque()
        self.to_client: deque[Response] = deque()
        self.appended = 0
        self.acknowledged: list[list[int]] = []
        self.refused: list[list[int]] = []
        self.unknown: list[list[int]] = []

    def append(self) -> None:
        self.machine.append([self.number, self.appended], self.now)
        self.appended += 1

    def pump(self) -> None:
        """What a driver does between two waits."""
        self.machine.tick(self.now)
        if self.machine.drop:
            self.lose()
        if not self.up and self.machine.wants_connection(self.now):
            self.up = True
            self.machine.connected(self.now)
        while self.up and (batch := self.machine.next_send(self.now)) is not None:
            assert batch.epoch is not None
            assert batch.seq is not None
            self.to_server.append(Wired(batch.epoch, batch.seq, batch.key, batch.body))
        self._collect()

    def deliver_request(self) -> Wired:
        """The oldest request arrives and is decided; its answer is on its way."""
        wired = self.to_server.popleft()
        self.to_client.append(self.server.take(wired))
        return wired

    def deliver_answer(self) -> None:
        self.machine.answered(self.to_client.popleft(), self.now)
        self._collect()

    def lose(self) -> list[Wired]:
        """The connection breaks; what had not arrived is returned."""
        undelivered = list(self.to_server)
        self.to_server.clear()
        self.to_client.clear()
        self.up = False
        self.machine.lost(ConnectionFailedError("cut", sent=True), self.now)
        self._collect()
        return undelivered

    def settle(self) -> None:
        """A calm network, until nothing is open."""
        for _ in range(10_000):
            if not self.machine.busy:
                return
            self.pump()
            while self.to_server:
                self.deliver_request()
            while self.to_client:
                self.deliver_answer()
            wake = self.machine.wake_at()
            self.now = max(self.now, wake) if wake is not None and not self.up else self.now + 0.1
        raise AssertionError("the machine does not come to rest")

    def _collect(self) -> None:
        for batch in self.machine.settled:
            if batch.receipt is not None:
                self.acknowledged += batch.messages
            elif batch.maybe_stored:
                self.unknown += batch.messages
            else:
                self.refused += batch.messages
        self.machine.settled.clear()
