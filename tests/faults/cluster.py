"""Several servers on one database under load: where each client sits, and who follows the log.

A client sits at one server and moves to the next when that one dies or tells it to come back. A
reader of the log stays with its server for good, through all its lives, and keeps every row in the
order in which it came.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.faults.killing import JSON, LOST, Load
from tests.faults.wire import HttpRequest, Reply, Wire, asked, get, head
from tests.serving import ServerProcess

RACED = ("race/0", "race/1")
COME_BACK_S = 0.05
ASKED_S_MAX = 90.0
"""How long a request may take, whatever happens to its server: nothing hangs for ever."""


class Cluster(Load):
    """Servers on one database, and what all their clients have come to."""

    def __init__(self, servers: Sequence[ServerProcess], seed: int) -> None:
        super().__init__(servers[0].port, seed)
        self.servers = servers
        self.settled = asyncio.Event()
        """Set when no client writes any more."""

    def seat(self, number: int) -> Seat:
        """A place at one of the servers."""
        return Seat(self, number % len(self.servers))


class Seat(Load):
    """A client's place: it asks there, and moves on when it gets no answer."""

    def __init__(self, cluster: Cluster, at: int) -> None:
        super().__init__(cluster.servers[at].port, cluster.seed)
        self._cluster = cluster
        self._at = at
        self.done = cluster.done
        self.moves_count = 0
        self._moved = asyncio.Event()

    def answered(self) -> None:
        self._cluster.answered()

    async def ask(self, request: HttpRequest) -> tuple[Reply, bool]:
        async with asyncio.timeout(ASKED_S_MAX):
            return await super().ask(request)

    def settles(self, reply: Reply) -> bool:
        if reply.status != 503:
            return True
        assert reply.headers["retry-after"], reply
        return False

    async def lost(self) -> None:
        servers = self._cluster.servers
        self._at = (self._at + 1) % len(servers)
        self.port = servers[self._at].port
        self.moves_count += 1
        self._moved.set()
        await asyncio.sleep(COME_BACK_S)

    async def next_move(self) -> None:
        """Wait until this client has to move on the next time."""
        self._moved.clear()
        await self._moved.wait()


class Row(NamedTuple):
    """A row of the log: where it stands, and what it says."""

    position: int
    line_hash: int
    marker: str | None

    @classmethod
    def of(cls, line: bytes) -> Row:
        parsed = json.loads(line)
        return cls(parsed["position"], hash(line), parsed.get("marker"))


class LogReader:
    """Follows the log on one server by long-poll, from before the first row to the last."""

    def __init__(self, port: int, cluster: Cluster) -> None:
        self._port = port
        self._cluster = cluster
        self.rows: list[Row] = []
        self.lost_count = 0

    async def run(self) -> None:
        at_head = False
        settled = self._cluster.settled
        while not (settled.is_set() and at_head):
            live = "" if settled.is_set() else "&live=long-poll"
            after = self.rows[-1].position if self.rows else -1
            try:
                async with asyncio.timeout(ASKED_S_MAX):
                    reply = await asked(self._port, _log(f"after={after}&limit=2000{live}"))
            except LOST:
                self.lost_count += 1
                await asyncio.sleep(COME_BACK_S)
                continue
            if reply.status == 503:
                await asyncio.sleep(COME_BACK_S)
                continue
            assert reply.status in (200, 204), reply
            self._take(reply)
            at_head = not live and "log-up-to-date" in reply.headers

    def _take(self, reply: Reply) -> None:
        for line in reply.body.splitlines():
            row = Row.of(line)
            assert not self.rows or row.position > self.rows[-1].position, "a row came late"
            self.rows.append(row)


async def whole_log(port: int) -> list[Row]:
    """Every row that there is now."""
    rows: list[Row] = []
    async with await Wire.connect(port) as wire:
        while True:
            after = rows[-1].position if rows else -1
            reply = await wire.ask(_log(f"after={after}&limit=10000"))
            assert reply.status == 200, reply
            rows += map(Row.of, reply.body.splitlines())
            if "log-up-to-date" in reply.headers:
                return rows


def check_log(readers: Sequence[LogReader], log: Sequence[Row]) -> None:
    """No follower of the log was passed by a row, or saw one that is not there."""
    for reader in readers:
        seen = {row.position for row in reader.rows}
        # A stream may expire after all clients have stopped; everything else came before that.
        missed = [row for row in log if row.position not in seen and row.marker != "expired"]
        assert not missed, f"a reader was passed by {len(missed)} rows: {missed[:10]}"
        assert reader.rows == log[: len(seen)], "a reader saw other rows than there are"


def _log(query: str) -> HttpRequest:
    return HttpRequest("GET", "log", query=query, root="/v1/")


class Racer:
    """Appends to a stream on the condition that it still ends where it was seen to end."""

    def __init__(self, number: int, load: Load) -> None:
        self.name = f"racer-{number}"
        self._load = load
        self._dice = random.Random(f"{load.seed}/{self.name}")
        self.won: set[str] = set()
        self.lost: set[str] = set()

    async def run(self) -> None:
        number = 0
        while not self._load.done.is_set():
            number += 1
            await self._race(f"{self.name}/{number}", self._dice.choice(RACED))

    async def _race(self, label: str, path: str) -> None:
        seen, _ = await self._load.ask(head(path))
        tail = seen.headers["stream-next-offset"]
        headers = {"Content-Type": JSON, "If-Match": f'"{tail}"'}
        body = json.dumps({"label": label, "tail": tail}).encode()
        reply, retried = await self._load.ask(HttpRequest("POST", path, headers, body))
        assert reply.status in (204, 412), reply
        if reply.status == 204:
            self.won.add(label)
        elif not retried:
            # After a retry one may have lost against oneself: then either is right.
            self.lost.add(label)


async def check_races(port: int, racers: Sequence[Racer]) -> None:
    """Each message stands where its condition wanted it; who won is there, who lost is not."""
    found: list[str] = []
    for path in RACED:
        for line in await _lines(port, path):
            assert line["data"]["tail"] == line["offset"], line
            found.append(line["data"]["label"])
    assert len(found) == len(set(found))
    for racer in racers:
        assert racer.won <= set(found), "an accepted append is lost"
        assert not racer.lost & set(found), "a refused append is there"
    assert all(racer.won for racer in racers), "a racer never won"


async def _lines(port: int, path: str) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    after = -1
    async with await Wire.connect(port) as wire:
        while True:
            reply = await wire.ask(_log(f"after={after}&stream={path}"))
            assert reply.status == 200, reply
            lines += map(json.loads, reply.body.splitlines())
            after = int(reply.headers["log-next"])
            if "log-up-to-date" in reply.headers:
                return lines


async def check_agreement(ports: Sequence[int], paths: Sequence[str]) -> None:
    """Every server shows the same."""
    for path in paths:
        shown = {await _shown(port, path) for port in ports}
        assert len(shown) == 1, f"servers disagree about {path}"


async def _shown(port: int, path: str) -> tuple[int, str, bytes]:
    reply = await asked(port, get(path))
    return reply.status, reply.headers.get("stream-next-offset", ""), reply.body
