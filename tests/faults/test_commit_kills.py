"""SIGKILL under commits, staged parts and keyed appends: all of a request or nothing of it, once.

After every restart, before any client retries, streams are read: a commit to several streams must
be in all of them or in none, also one that is carried out in slices, and a writer must have come
exactly as far as its messages say. At the end everything that was answered must be there once, each
key must still give its first answer, and no part may be committed a second time.
FENCEPOST_FAULT_KILLS=200 makes it the long run (`just faults`).
"""

import asyncio
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.killing import JSON, Load, read_all
from tests.faults.wire import HttpRequest, Reply, asked, get, put
from tests.serving import ServerProcess

KILLS_DEFAULT = 6
ANSWERS_BETWEEN_KILLS_MAX = 400
STREAMS = [f"commits/{number}" for number in range(6)]
COMMITTERS = 4
STAGERS = 3
APPENDERS = 3
LARGE = 2
WRITERS = 2
SLICE_APPENDS = 8
LARGE_APPENDS = 40
REPLAYS_MAX = 300


class Beside(HttpRequest):
    """A request to something beside the streams: its path is the whole target."""

    def encode(self) -> bytes:
        lines = [f"{self.method} {self.path} HTTP/1.1", "Host: localhost"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines.append(f"Content-Length: {len(self.body)}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + self.body


def commit(appends: list[dict[str, Any]], key: str | None = None, **more: Any) -> Beside:
    headers = {} if key is None else {"Idempotency-Key": key}
    body = json.dumps({"appends": appends, **more}).encode()
    return Beside("POST", "/v1/commit", headers, body)


def stage(txn: str, part: str, chunk: int, values: list[str]) -> Beside:
    target = f"/v1/staging/{txn}/{part}?chunk={chunk}"
    return Beside("POST", target, {"Content-Type": JSON}, json.dumps(values).encode())


def keyed(path: str, key: str, label: str) -> HttpRequest:
    headers = {"Content-Type": JSON, "Idempotency-Key": key}
    return HttpRequest("POST", path, headers, json.dumps(label).encode())


class Book:
    """What was asked for: each label with the messages it must come to, in each of its streams."""

    def __init__(self) -> None:
        self.wanted: dict[str, dict[str, list[str]]] = {}
        self.forbidden: set[str] = set()
        self.replays: list[tuple[HttpRequest, Reply]] = []
        self.parts: list[tuple[str, str]] = []
        self.made: dict[str, list[str]] = {}  # what streams that commits made were seen to hold
        self.published: dict[str, list[str]] = {}  # what each writer publishes, batch by batch
        self.retried_count = 0

    def check_writer(self, name: str, batch: int | None, found: dict[str, list[str]]) -> None:
        """A writer came to a batch: the messages of that one and of those before are there."""
        labels = self.published[name]
        there = {message for messages in found.values() for message in messages}
        seen = [label in there for label in labels]
        reached = 0 if batch is None else batch + 1
        expected = [number < reached for number in range(len(labels))]
        assert seen == expected, f"{name} came to {batch}, and its messages to {seen}"

    def check(self, found: dict[str, list[str]], *, complete: bool) -> None:
        """Hold the streams to the book; `complete` when everything asked for was answered."""
        counts = {path: Counter(messages) for path, messages in found.items()}
        for label, wanted in self.wanted.items():
            present = {
                path: [counts.get(path, Counter())[message] for message in messages]
                for path, messages in wanted.items()
            }
            seen = {count for each in present.values() for count in each}
            assert seen in ({1}, {0}), f"{label} is there in part or twice: {present}"
            assert seen == {1} or not complete, f"{label} was answered and is lost"
        for path, messages in found.items():
            assert not self.forbidden & set(messages), f"{path} has messages of a refused commit"


class Actor:
    """A client that asks until there is an answer, and writes down what must come of it."""

    def __init__(self, number: int, load: Load, book: Book) -> None:
        self.name = f"{type(self).__name__.lower()}-{number}"
        self.load = load
        self.book = book
        self.dice = random.Random(f"{load.seed}/{self.name}")
        self.number = 0

    async def run(self) -> None:
        while not self.load.done.is_set():
            self.number += 1
            await self.act(f"{self.name}/{self.number}")

    async def act(self, label: str) -> None:
        raise NotImplementedError

    async def ask(self, request: HttpRequest) -> tuple[Reply, bool]:
        reply, retried = await self.load.ask(request)
        self.load.answered()
        self.book.retried_count += retried
        return reply, retried


class Committer(Actor):
    """Appends to several streams at once, some of them new, by key or by producer."""

    async def act(self, label: str) -> None:
        paths = self.dice.sample(STREAMS, self.dice.randint(2, 4))
        if self.dice.random() < 0.1:
            await self.refused(label, paths)
            return
        if self.dice.random() < 0.2:
            paths.append(f"made/{label}")
        by_key = self.dice.random() < 0.5
        appends = []
        for path in paths:
            append: dict[str, Any] = {"stream": path, "content_type": JSON, "data": label}
            if path.startswith("made/"):
                append["auto_create"] = True
            if not by_key:
                # A producer of its own for each commit: the retry is known by it, on all streams.
                append["producer"] = {"id": label, "epoch": 0, "seq": 0}
            appends.append(append)
        self.book.wanted[label] = {path: [label] for path in paths}
        request = commit(appends, key=label if by_key else None)
        reply, retried = await self.ask(request)
        assert reply.status == 200, reply
        assert retried or b'"duplicate":false' in reply.body
        if by_key:
            self.book.replays.append((request, reply))

    async def refused(self, label: str, paths: list[str]) -> None:
        """One of the appends stands on a tail that never was: none may be seen."""
        self.book.forbidden.add(label)
        appends: list[dict[str, Any]] = [
            {"stream": path, "content_type": JSON, "data": label} for path in paths
        ]
        appends[-1]["if_match"] = "0000000099999999_0000000099999999"
        reply, _ = await self.ask(commit(appends, key=label))
        assert reply.status == 412, reply


class Stager(Actor):
    """Uploads parts in chunks and commits them, with a key or without."""

    async def act(self, label: str) -> None:
        txn = label.replace("/", "-")
        paths = self.dice.sample(STREAMS, 2)
        wanted: dict[str, list[str]] = {path: [] for path in paths}
        appends: list[dict[str, Any]] = []
        for number, path in enumerate(paths):
            chunks = self.dice.randint(1, 3)
            for chunk in range(chunks):
                values = [f"{label}/{number}/{chunk}/{index}" for index in range(2)]
                reply, _ = await self.ask(stage(txn, str(number), chunk, values))
                assert reply.status in (200, 201), reply
                wanted[path] += values
            appends.append({"stream": path, "parts": [{"txn": txn, "part": str(number)}]})
        self.book.wanted[label] = wanted
        by_key = self.dice.random() < 0.5
        request = commit(appends, key=label if by_key else None)
        reply, retried = await self.ask(request)
        if by_key:
            assert reply.status == 200, reply
            self.book.replays.append((request, reply))
        else:
            # Without a key a retry finds its parts used, by itself: no other client knows them.
            known = retried and (reply.status, reply.code) == (409, "part_committed")
            assert reply.status == 200 or known, reply
        self.book.parts += [(txn, str(number)) for number in range(2)]


class Appender(Actor):
    """Appends with keys, and repeats itself now and then."""

    async def act(self, label: str) -> None:
        path = self.dice.choice(STREAMS)
        self.book.wanted[label] = {path: [label]}
        request = keyed(path, label, label)
        reply, retried = await self.ask(request)
        assert reply.status == 204 or (retried and reply.status == 200), reply
        self.book.replays.append((request, reply))
        if self.dice.random() < 0.2:
            again, _ = await self.ask(request)
            assert (again.status, again.headers["idempotency-replayed"]) == (200, "true")
            assert again.headers["stream-next-offset"] == reply.headers["stream-next-offset"]


class Large(Actor):
    """Commits so many appends that they are carried out in slices, to old streams and new ones."""

    async def act(self, label: str) -> None:
        paths = [f"made/{label}/{number}" for number in range(LARGE_APPENDS)]
        paths += self.dice.sample(STREAMS, 2)
        self.dice.shuffle(paths)
        appends: list[dict[str, Any]] = [
            {"stream": path, "content_type": JSON, "data": label, "auto_create": True}
            for path in paths
        ]
        if self.dice.random() < 0.2:
            self.book.forbidden.add(label)
            appends[-1]["if_match"] = "0000000099999999_0000000099999999"
            reply, _ = await self.ask(commit(appends, key=label))
            assert reply.status == 412, reply
            return
        self.book.wanted[label] = {path: [label] for path in paths}
        request = commit(appends, key=label)
        reply, retried = await self.ask(request)
        assert reply.status == 200, reply
        assert retried or b'"duplicate":false' in reply.body
        self.book.replays.append((request, reply))


class Publisher(Actor):
    """Publishes numbered batches in the name of a writer, small and large ones."""

    def __init__(self, number: int, load: Load, book: Book) -> None:
        super().__init__(number, load, book)
        self.epoch = 0
        self.labels: list[str] = book.published.setdefault(self.name, [])

    async def act(self, label: str) -> None:
        if self.epoch == 0 or self.dice.random() < 0.1:
            opening = Beside("POST", f"/v1/writers/{self.name}", {}, b'{"query": "q"}')
            reply, _ = await self.ask(opening)
            opened = json.loads(reply.body)
            assert opened["epoch"] > self.epoch
            assert opened["batch"] == (len(self.labels) - 1 if self.labels else None)
            self.epoch = opened["epoch"]
        paths = self.dice.sample(STREAMS, 2)
        if self.dice.random() < 0.5:
            paths += [f"made/{label}/{number}" for number in range(2 * SLICE_APPENDS)]
        appends = [
            {"stream": path, "content_type": JSON, "data": label, "auto_create": True}
            for path in paths
        ]
        batch = len(self.labels)
        self.labels.append(label)
        self.book.wanted[label] = {path: [label] for path in paths}
        writer = {"name": self.name, "query": "q", "epoch": self.epoch, "batch": batch}
        reply, retried = await self.ask(commit(appends, writer={**writer, "digest": label}))
        answer = json.loads(reply.body)
        assert (reply.status, answer["batch"]) == (200, batch), reply
        assert not answer["duplicate"] or (retried and answer["match"]), reply


async def check_writers(port: int, book: Book, found: dict[str, list[str]]) -> None:
    """The record of each writer and its messages came to disk together."""
    for name in book.published:
        reply = await asked(port, Beside("GET", f"/v1/writers/{name}", {}, b""))
        batch = json.loads(reply.body)["batch"] if reply.status == 200 else None
        book.check_writer(name, batch, found)


async def read_streams(port: int, book: Book, *, anew: bool) -> dict[str, list[str]]:
    """All messages of all streams that a label names; a stream that is not there has none.

    A stream made by a commit gets no more messages, so it is read once, and again at the end.
    """
    if anew:
        book.made.clear()
    for path in {path for wanted in book.wanted.values() for path in wanted}:
        if path not in STREAMS and path not in book.made:
            reply = await asked(port, get(path))
            assert reply.status in (200, 404), (path, reply)
            if reply.status == 200:
                book.made[path] = json.loads(reply.body)
    found = dict(book.made)
    for path in STREAMS:
        chunks, _ = await read_all(port, path)
        found[path] = [message for chunk in chunks for message in json.loads(chunk)]
    return found


async def check_replays(load: Load, book: Book) -> None:
    """Keys give their first answers, and used parts stay used."""
    dice = random.Random(load.seed)
    for request, first in dice.sample(book.replays, min(REPLAYS_MAX, len(book.replays))):
        again, _ = await load.ask(request)
        assert again.status == 200, (request, again)
        if first.body:
            assert json.loads(again.body)["appends"] == json.loads(first.body)["appends"]
            assert json.loads(again.body)["duplicate"] is True
        else:
            for name in ("stream-next-offset", "stream-version", "stream-position"):
                assert again.headers[name] == first.headers[name]
    for txn, part in dice.sample(book.parts, min(REPLAYS_MAX, len(book.parts))):
        reused = [{"stream": STREAMS[0], "parts": [{"txn": txn, "part": part}]}]
        again, _ = await load.ask(commit(reused))
        assert (again.status, again.code) == (409, "part_committed"), again


async def test_commits_parts_and_keys_are_whole_and_once_however_often_the_server_is_killed(
    tmp_path: Path,
) -> None:
    kills = int(os.environ.get("FENCEPOST_FAULT_KILLS", KILLS_DEFAULT))
    seed = int(os.environ.get("FENCEPOST_FAULT_SEED", "0"))
    environment = {
        "FENCEPOST_STORE_COMMIT_SLICE_APPENDS": str(SLICE_APPENDS),
        # So that keys are found in their index and beside it, and kills hit its making.
        "FENCEPOST_STORE_KEY_INDEX_KEYS": "8",
        "FENCEPOST_STORE_SWEEP_INTERVAL_MS": "10",
    }
    server = ServerProcess(tmp_path / "data", environment=environment)
    await asyncio.to_thread(server.start)
    load, book = Load(server.port, seed), Book()
    for path in STREAMS:
        await load.ask(put(path, JSON))
    actors: list[Actor] = [
        *(Committer(number, load, book) for number in range(COMMITTERS)),
        *(Stager(number, load, book) for number in range(STAGERS)),
        *(Appender(number, load, book) for number in range(APPENDERS)),
        *(Large(number, load, book) for number in range(LARGE)),
        *(Publisher(number, load, book) for number in range(WRITERS)),
    ]
    try:
        async with asyncio.TaskGroup() as clients:
            for actor in actors:
                clients.create_task(actor.run())
            await kill_often(server, load, book, kills)
            load.done.set()
        await check_replays(load, book)
        book.check(await read_streams(load.port, book, anew=True), complete=True)
    except BaseException as error:
        error.add_note(
            f"after {kills} kills; again: FENCEPOST_FAULT_KILLS={kills} FENCEPOST_FAULT_SEED={seed}"
            " ./test tests/faults/test_commit_kills.py"
        )
        await asyncio.to_thread(server.kill)
        raise
    assert await asyncio.to_thread(server.stop) == 0
    checked = await asyncio.to_thread(check_folder, server.data)
    assert checked.returncode == 0, checked.stdout
    assert book.retried_count >= kills, "no kill hit a request: nothing was in flight"


def check_folder(data: Path) -> subprocess.CompletedProcess[str]:
    """What `fencepost check` says about the folder."""
    command = [sys.executable, "-m", "fencepost", "check", "--data", str(data)]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


async def kill_often(server: ServerProcess, load: Load, book: Book, kills: int) -> None:
    """Kill the server after some answers, start it again, look before any client retries, go on."""
    dice = random.Random(load.seed)
    for _ in range(kills):
        await load.more_answers(dice.randint(1, ANSWERS_BETWEEN_KILLS_MAX))
        load.up.clear()
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.restart)
        found = await read_streams(load.port, book, anew=False)
        book.check(found, complete=False)
        await check_writers(load.port, book, found)
        load.up.set()
    await load.more_answers(1)
