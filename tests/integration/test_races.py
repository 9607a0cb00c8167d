"""Races on a real server: of those who want the same place, one gets it and the others are told.

In each round every request is on its way before the first answer is read, in an order thrown
by dice; who wins is the server's choice, that exactly one does is what is tested.
"""

import itertools
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from tests.engines import engine as engine
from tests.integration.raw import Connection, code_of, request
from tests.serving import ServerProcess
from tests.unit.http.rawhttp import Reply

ROOT = "/v1/stream/"
TEXT = "Content-Type: text/plain"
START = "0000000000000000_0000000000000000"

_names = itertools.count()


class Field:
    """Connections that are used all at once."""

    def __init__(self, port: int, racers: int, seed: int) -> None:
        self._stack = ExitStack()
        self._dice = random.Random(seed)
        self.connections = [self._stack.enter_context(Connection(port)) for _ in range(racers)]

    def race(self, requests: Sequence[bytes]) -> list[Reply]:
        """Send all requests, then read all answers; in the order of the requests."""
        lanes = self.connections[: len(requests)]
        order = list(zip(lanes, requests, strict=True))
        self._dice.shuffle(order)
        for connection, raw in order:
            connection.send(raw)
        return [connection.reply("POST") for connection in lanes]

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def field(server_process: ServerProcess) -> Iterator[Field]:
    made = Field(server_process.port, 50, seed=1)
    yield made
    made.close()


@pytest.fixture
def wire(server_process: ServerProcess) -> Iterator[Connection]:
    with Connection(server_process.port) as connection:
        yield connection


def fresh() -> str:
    return f"races/{next(_names)}"


def post(path: str, body: bytes, *headers: str) -> bytes:
    return request("POST", ROOT + path, TEXT, *headers, body=body)


def by(producer: str, epoch: int, seq: int) -> tuple[str, str, str]:
    return (f"Producer-Id: {producer}", f"Producer-Epoch: {epoch}", f"Producer-Seq: {seq}")


def content(wire: Connection, path: str) -> bytes:
    return wire.ask("GET", f"{ROOT}{path}?offset=-1").body


def test_two_clients_on_one_tail_never_both_win_and_never_both_lose(
    server_process: ServerProcess, wire: Connection
) -> None:
    """A thousand rounds; each client goes on from the tail that the last answer told it."""
    rounds = 1000
    path = fresh()
    wire.ask("PUT", ROOT + path, TEXT)
    outcomes: dict[str, list[int]] = {"a": [], "b": []}
    start = threading.Barrier(2, timeout=60)

    def client(name: str) -> None:
        tail = START
        with Connection(server_process.port) as connection:
            for _ in range(rounds):
                start.wait()
                reply = connection.ask(
                    "POST", ROOT + path, TEXT, f'If-Match: "{tail}"', body=name.encode()
                )
                outcomes[name].append(reply.status)
                tail = reply.headers["stream-next-offset"]

    threads = [threading.Thread(target=client, args=(name,)) for name in outcomes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    won = Counter(zip(outcomes["a"], outcomes["b"], strict=True))
    assert set(won) <= {(204, 412), (412, 204)}
    assert won.total() == rounds
    winners = ["a" if status == 204 else "b" for status in outcomes["a"]]
    assert content(wire, path).decode() == "".join(winners)


def test_of_sixteen_first_writers_exactly_one_wins(field: Field, wire: Connection) -> None:
    for _ in range(20):
        path = fresh()
        replies = field.race([post(path, b"%x" % n, "If-None-Match: *") for n in range(16)])

        won = [n for n, reply in enumerate(replies) if reply.status == 204]
        assert len(won) == 1
        lost = [reply for reply in replies if reply.status != 204]
        assert {(reply.status, code_of(reply)) for reply in lost} == {(412, "tail_moved")}
        assert content(wire, path) == b"%x" % won[0]


def test_of_sixteen_automatic_creations_all_append_to_one_stream(
    field: Field, wire: Connection
) -> None:
    for _ in range(20):
        path = fresh()
        replies = field.race([post(path, b"%x" % n, "Stream-Auto-Create: true") for n in range(16)])

        assert {reply.status for reply in replies} == {204}
        assert sorted(content(wire, path)) == sorted(b"0123456789abcdef")
        versions = sorted(int(reply.headers["stream-version"]) for reply in replies)
        assert versions == list(range(16))


def test_fifty_requests_with_one_key_are_one_message(field: Field, wire: Connection) -> None:
    for number in range(5):
        path = fresh()
        headers: tuple[str, ...] = ("Idempotency-Key: k", "Stream-Auto-Create: true")
        if number % 2:
            headers += by("p", 0, 0)
        replies = field.race([post(path, b"once", *headers)] * 50)

        first = [reply for reply in replies if "idempotency-replayed" not in reply.headers]
        others = [reply for reply in replies if "idempotency-replayed" in reply.headers]
        assert (len(first), len(others)) == (1, 49)
        assert {reply.status for reply in others} == {200}
        told = ("stream-next-offset", "stream-version", "stream-position")
        assert {tuple(reply.headers[name] for name in told) for reply in replies} == {
            tuple(first[0].headers[name] for name in told)
        }
        assert {reply.headers["stream-offset"] for reply in others} == {START}
        assert content(wire, path) == b"once"


def test_of_two_reclaimers_exactly_one_wins(field: Field, wire: Connection) -> None:
    path = fresh()
    wire.ask("PUT", ROOT + path, TEXT)
    wire.ask("POST", ROOT + path, TEXT, *by("task", 0, 0), body=b"claim")
    epoch = 0
    for _ in range(300):
        seen = f"Producer-If: {epoch}.0"
        replies = field.race(
            [
                post(path, b"one", *by("task", epoch + 1, 0), seen),
                post(path, b"two", *by("task", epoch + 2, 0), seen),
            ]
        )

        statuses = [reply.status for reply in replies]
        won = statuses.index(200)
        lost = replies[1 - won]
        # Who asks for a lower epoch than the winner has got is stale, before any condition.
        assert lost.status == (412 if won == 0 else 403)
        epoch += 1 + won
        assert lost.headers["producer-epoch"] == str(epoch)


def test_a_reclaimer_and_a_worker_that_finishes_never_both_win(
    field: Field, wire: Connection
) -> None:
    finished = 0
    for number in range(300):
        path = fresh()
        wire.ask("POST", ROOT + path, TEXT, *by("task", 0, 0), "If-None-Match: *", body=b"claim,")
        done, reclaimed = field.race(
            [
                post(path, b"done", *by("task", 0, 1)),
                post(path, b"mine", *by("task", 1, 0), "Producer-If: 0.0"),
            ]
        )

        if done.status == 200:
            finished += 1
            assert (reclaimed.status, code_of(reclaimed)) == (412, "producer_moved")
            assert reclaimed.headers["producer-seq"] == "1"
        else:
            assert (done.status, code_of(done)) == (403, "producer_epoch_stale")
            assert reclaimed.status == 200
        if number % 50 == 0:
            stored = content(wire, path)
            assert stored == (b"claim,done" if done.status == 200 else b"claim,mine")
    assert 0 < finished < 300, "one of the two always came first: that was no race"


def test_of_commits_over_the_same_part_exactly_one_wins(field: Field, wire: Connection) -> None:
    for number in range(50):
        path, txn = fresh(), f"races-{number}"
        wire.ask("PUT", ROOT + path, TEXT)
        wire.ask("POST", f"/v1/staging/{txn}/p", TEXT, body=b"once")
        append = {"stream": path, "parts": [{"txn": txn, "part": "p"}]}
        raw = request("POST", "/v1/commit", body=json.dumps({"appends": [append]}).encode())

        replies = field.race([raw] * 4)

        lost = [reply for reply in replies if reply.status != 200]
        assert len(lost) == 3
        assert {(reply.status, code_of(reply)) for reply in lost} == {(409, "part_committed")}
        assert content(wire, path) == b"once"


def test_a_commit_and_an_append_that_want_the_same_tail_never_both_win(
    field: Field, wire: Connection
) -> None:
    one, two = fresh(), fresh()
    for path in (one, two):
        wire.ask("PUT", ROOT + path, TEXT)
    tails = {one: START, two: START}
    kept: dict[str, list[bytes]] = {one: [], two: []}
    for _ in range(200):
        item = {"content_type": "text/plain", "data_base64": "Yw=="}  # c
        appends = [{**item, "stream": path, "if_match": tails[path]} for path in (one, two)]
        body = json.dumps({"appends": appends}).encode()
        commit, single = field.race(
            [
                request("POST", "/v1/commit", body=body),
                post(two, b"s", f'If-Match: "{tails[two]}"'),
            ]
        )

        if commit.status == 200:
            assert (single.status, code_of(single)) == (412, "tail_moved")
            for append in json.loads(commit.body)["appends"]:
                tails[append["stream"]] = append["next_offset"]
                kept[append["stream"]].append(b"c")
        else:
            assert single.status == 204
            assert (commit.status, json.loads(commit.body)["item"]) == (412, 1)
            tails[two] = single.headers["stream-next-offset"]
            kept[two].append(b"s")
    assert {path: content(wire, path) for path in tails} == {
        path: b"".join(messages) for path, messages in kept.items()
    }
