"""The clients of the kill test: producers on shared streams, makers and enders of streams, readers.

Each keeps what it was told and holds the server to it. None of them treats a lost connection as an
answer: the same request goes out again until there is one.
"""

import asyncio
import json
import random
from collections import deque
from typing import Protocol

from tests.faults.wire import HttpRequest, Reply, Wire, asked, get, head, post, put, remove

JSON = "application/json"
BYTES = "application/octet-stream"
SHARED = {"json/shared": JSON, "bytes/shared": BYTES, "json/other": JSON, "bytes/other": BYTES}
WINDOW = 4
BATCH_MAX = 5
SHORT = "short/second"
ANSWERS_S_MAX = 60
LOST = (ConnectionError, asyncio.IncompleteReadError, OSError)
NOTHING_DONE = ("storage_unavailable", "store_unavailable")
"""Refusals that promise that nothing was changed."""


class Client(Protocol):
    """A client that keeps a server busy until the load is done."""

    async def run(self) -> None: ...


class Load:
    """What all clients share: where the server is, whether it is up, and how far they have come."""

    def __init__(self, port: int, seed: int) -> None:
        self.port = port
        self.seed = seed
        self.up = asyncio.Event()
        self.up.set()
        self.done = asyncio.Event()
        self.answered_count = 0
        self._wanted_count = 0
        self._reached = asyncio.Event()

    def answered(self) -> None:
        """A producer had an answer."""
        self.answered_count += 1
        if self.answered_count >= self._wanted_count:
            self._reached.set()

    async def more_answers(self, count: int) -> None:
        """Return after so many answers from now."""
        self._wanted_count = self.answered_count + count
        self._reached.clear()
        async with asyncio.timeout(ANSWERS_S_MAX):
            await self._reached.wait()

    async def ask(self, request: HttpRequest) -> tuple[Reply, bool]:
        """The answer to a request, and whether an earlier one of it may have had an effect."""
        retried = False
        while True:
            await self.up.wait()
            try:
                reply = await asked(self.port, request)
            except LOST:
                retried = True
            else:
                if self.settles(reply):
                    return reply, retried
                retried = retried or reply.code not in NOTHING_DONE
            await self.lost()

    def settles(self, reply: Reply) -> bool:
        """Whether a request need not be sent again after this reply: one server always knows."""
        return True

    async def lost(self) -> None:
        """A client has lost its connection, or was told to come back."""


async def create_shared(load: Load) -> None:
    for path, content_type in SHARED.items():
        assert (await asked(load.port, put(path, content_type))).status == 201
    assert (await asked(load.port, put(SHORT, stream_ttl="1"))).status == 201


class SharedProducer:
    """Appends batches to all shared streams, a few requests in flight, one sequence per stream."""

    def __init__(self, number: int, load: Load) -> None:
        self.name = f"producer-{number}"
        self._load = load
        self._dice = random.Random(f"{load.seed}/{number}")
        self._next = dict.fromkeys(SHARED, 0)
        self._flying: deque[tuple[str, int, HttpRequest]] = deque()
        self.sent: dict[str, list[bytes | list[str]]] = {path: [] for path in SHARED}
        self.retried_count = 0

    async def run(self) -> None:
        while not (self._load.done.is_set() and not self._flying):
            await self._load.up.wait()
            try:
                async with await Wire.connect(self._load.port) as wire:
                    await self._talk(wire)
            except LOST:
                self.retried_count += len(self._flying)
                await self._load.lost()

    async def _talk(self, wire: Wire) -> None:
        for _, _, request in self._flying:
            wire.send(request)
        while True:
            while len(self._flying) < WINDOW and not self._load.done.is_set():
                wire.send(self._make())
            if not self._flying:
                return
            reply = await wire.receive()
            if not self._load.settles(reply):
                # All of the window goes out again, in its order: what came after may be out of it.
                raise ConnectionResetError
            path, seq, _ = self._flying.popleft()
            # 200: stored now. 204: it was stored before we lost the connection.
            assert reply.status in (200, 204), (path, seq, reply)
            assert int(reply.headers["producer-seq"]) >= seq
            self._load.answered()

    def _make(self) -> HttpRequest:
        path = self._dice.choice(list(SHARED))
        seq = self._next[path]
        self._next[path] += 1
        if SHARED[path] == JSON:
            count = self._dice.randint(1, BATCH_MAX)
            labels = [f"{self.name}/{seq}/{i}/{count}" for i in range(count)]
            self.sent[path].append(labels)
            body = json.dumps(labels).encode()
        else:
            body = f"<{self.name}/{seq}/{'x' * self._dice.choice((0, 50, 5_000))}>".encode()
            self.sent[path].append(body)
        request = post(path, body, producer=self.name, seq=seq, content_type=SHARED[path])
        self._flying.append((path, seq, request))
        return request


class Reader:
    """Follows a stream by long-poll through all the kills; what it saw must never be taken back."""

    def __init__(self, path: str, load: Load) -> None:
        self._load = load
        self.path = path
        self.parts: list[bytes] = []

    async def run(self) -> None:
        offset = "-1"
        while not self._load.done.is_set():
            query = f"offset={offset}&live=long-poll"
            reply, _ = await self._load.ask(get(self.path, query))
            assert reply.status in (200, 204), reply
            if reply.status == 200:
                self.parts.append(reply.body)
            offset = reply.headers["stream-next-offset"]


class Lives:
    """Makes streams, fills, closes, deletes and makes them again, one step after the other."""

    def __init__(self, number: int, load: Load) -> None:
        self._name = f"lives-{number}"
        self._load = load
        self._dice = random.Random(f"{load.seed}/lives/{number}")
        self._epoch = 0
        self.expected: dict[str, tuple[bytes, bool] | None] = {}
        self.ttls: dict[str, int] = {}

    async def run(self) -> None:
        number = 0
        while not self._load.done.is_set():
            path = f"life/{self._name}/{number % 7}"
            number += 1
            await self._live(path)

    async def _live(self, path: str) -> None:
        if self.expected.get(path) is not None:
            await self._end(path)
        await self._begin(path)
        data = b""
        for seq in range(self._dice.randint(0, 4)):
            body = f"<{self._epoch}/{seq}>".encode()
            await self._append(post(path, body, producer=self._name, epoch=self._epoch, seq=seq))
            data += body
            self.expected[path] = (data, False)
        roll = self._dice.random()
        if roll < 0.3:
            await self._close(path, data)
        elif roll < 0.6:
            await self._end(path)

    async def _begin(self, path: str) -> None:
        """Make the stream. Its path must be free, and it must begin empty."""
        self._epoch += 1
        ttl_s = self._dice.choice((None, None, 3600))
        request = put(path) if ttl_s is None else put(path, stream_ttl=str(ttl_s))
        reply, retried = await self._load.ask(request)
        assert reply.status == 201 or (retried and reply.status == 200), (path, reply)
        assert reply.headers["stream-next-offset"].strip("0_") == "", "an old life shines through"
        self.expected[path] = (b"", False)
        self.ttls.pop(path, None)
        if ttl_s is not None:
            self.ttls[path] = ttl_s

    async def _append(self, request: HttpRequest) -> Reply:
        reply, retried = await self._load.ask(request)
        assert reply.status == 200 or (retried and reply.status == 204), (request, reply)
        return reply

    async def _close(self, path: str, data: bytes) -> None:
        reply, _ = await self._load.ask(post(path, b"<end>", closes=True))
        # Without a producer a retry of a close with data cannot be told from another: 409 closed.
        assert reply.status in (204, 409), reply
        self.expected[path] = (data + b"<end>", True)
        late, _ = await self._load.ask(post(path, b"late"))
        assert (late.status, late.code) == (409, "stream_closed")

    async def _end(self, path: str) -> None:
        reply, retried = await self._load.ask(remove(path))
        assert reply.status == 204 or (retried and reply.status == 404), (path, reply)
        self.expected[path] = None
        gone, _ = await self._load.ask(head(path))
        assert gone.status == 404


async def read_all(port: int, path: str) -> tuple[list[bytes], bool]:
    """Every chunk of a stream from its beginning, and whether it is closed."""
    chunks: list[bytes] = []
    offset = "-1"
    async with await Wire.connect(port) as wire:
        while True:
            reply = await wire.ask(get(path, f"offset={offset}"))
            assert reply.status == 200, (path, reply)
            chunks.append(reply.body)
            offset = reply.headers["stream-next-offset"]
            if "stream-up-to-date" in reply.headers:
                return chunks, "stream-closed" in reply.headers


def joined(content_type: str, chunks: list[bytes]) -> list[str]:
    """All messages of a stream; of a byte stream, everything up to each `>`."""
    if content_type == JSON:
        return [label for chunk in chunks for label in json.loads(chunk)]
    text = b"".join(chunks).decode()
    return [part + ">" for part in text.split(">")[:-1]]


async def check_shared(port: int, producers: list[SharedProducer], readers: list[Reader]) -> None:
    """Each producer's batches are there once, whole, and in its order; readers saw the same."""
    found = {}
    for path, content_type in SHARED.items():
        chunks, _ = await read_all(port, path)
        messages = found[path] = joined(content_type, chunks)
        for producer in producers:
            mine = [label for label in messages if f"{producer.name}/" in label]
            assert mine == _sent(producer, path), f"{producer.name} on {path}"
        if content_type == JSON:
            _check_batches_whole(messages)
        total = sum(len(_sent(producer, path)) for producer in producers)
        assert len(messages) == total, f"{path} has messages that no client sent"
    for reader in readers:
        seen = joined(SHARED[reader.path], reader.parts)
        assert seen == found[reader.path][: len(seen)], "a reader saw what was taken back"


def _sent(producer: SharedProducer, path: str) -> list[str]:
    sent: list[str] = []
    for batch in producer.sent[path]:
        sent += batch if isinstance(batch, list) else [batch.decode()]
    return sent


def _check_batches_whole(messages: list[str]) -> None:
    """The messages of one request lie together: `i` counts up to `count` without interruption."""
    at = 0
    while at < len(messages):
        name, seq, first, count = messages[at].split("/")
        assert first == "0", messages[at]
        batch = [f"{name}/{seq}/{i}/{count}" for i in range(int(count))]
        assert messages[at : at + int(count)] == batch, "a batch was torn"
        at += int(count)


async def check_lives(port: int, lives: list[Lives]) -> None:
    """Closed stays closed, deleted stays deleted, and every other stream is as it was left."""
    assert (await asked(port, head(SHORT))).status == 404, "a second has passed many times over"
    for life in lives:
        assert life.expected, "no stream was ever made"
        for path, expected in life.expected.items():
            if expected is None:
                assert (await asked(port, head(path))).status == 404, f"{path} came back"
                continue
            chunks, closed = await read_all(port, path)
            assert (b"".join(chunks), closed) == expected, path
            ttl = (await asked(port, head(path))).headers.get("stream-ttl")
            assert ttl == (str(life.ttls[path]) if path in life.ttls else None)
