"""Two servers, one database: what one of them has decided binds the other.

Everything here is asked at one server and then at the other, or at both at once. Nothing may be
decided on what a server remembers, and whatever was answered by one is there at the other.
"""

import itertools
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import psycopg
import pytest

from fencepost.testing.postgres import shared_server
from tests.integration.raw import Connection, code_of, events, request
from tests.serving import ServerProcess
from tests.unit.http.rawhttp import Reply

ROOT = "/v1/stream/"
TEXT = "text/plain"
JSON = "application/json"
START = "0000000000000000_0000000000000000"
ROUNDS = 1_000

_names = itertools.count()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    postgres = shared_server()
    made = postgres.new_database()
    yield made
    postgres.drop_database(made)


@pytest.fixture(scope="module")
def nodes(url: str) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    with (
        ServerProcess(store=url, arguments=["--long-poll-ms", "60000"]) as first,
        ServerProcess(store=url, arguments=["--long-poll-ms", "60000"]) as second,
    ):
        yield first, second


@pytest.fixture
def pair(
    nodes: tuple[ServerProcess, ServerProcess],
) -> Iterator[tuple[Connection, Connection]]:
    with Connection(nodes[0].port) as a, Connection(nodes[1].port) as b:
        yield a, b


Pair = tuple[Connection, Connection]


def fresh() -> str:
    """A path that no other test uses."""
    return f"two/{next(_names)}"


def make(at: Connection, path: str, *headers: str, body: bytes = b"", kind: str = TEXT) -> Reply:
    reply = at.ask("PUT", ROOT + path, f"Content-Type: {kind}", *headers, body=body)
    assert reply.status in (200, 201), reply
    return reply


def post(path: str, body: bytes, *headers: str, kind: str = TEXT) -> bytes:
    lines = [f"Content-Type: {kind}"] if body else []
    return request("POST", ROOT + path, *lines, *headers, body=body)


def append(at: Connection, path: str, body: bytes, *headers: str) -> Reply:
    at.send(post(path, body, *headers))
    return at.reply("POST")


def producer(name: str, epoch: int, seq: int) -> tuple[str, str, str]:
    return f"Producer-Id: {name}", f"Producer-Epoch: {epoch}", f"Producer-Seq: {seq}"


def look(at: Connection, path: str) -> Reply:
    return at.ask("HEAD", ROOT + path)


def content(at: Connection, path: str) -> bytes:
    return at.ask("GET", f"{ROOT}{path}?offset=-1").body


# Writes that were answered are there


def test_what_one_server_has_answered_the_other_shows_at_once(pair: Pair) -> None:
    """Read your writes, 200 times each way: stream, tail, content, log and lists."""
    path = fresh()
    make(pair[0], path)
    expected = b""
    for number in range(200):
        writer, reader = pair if number % 2 else pair[::-1]
        body = f"<{number}>".encode()

        accepted = append(writer, path, body)

        expected += body
        tail = accepted.headers["stream-next-offset"]
        assert look(reader, path).headers["stream-next-offset"] == tail
        if number % 20 == 0:
            assert content(reader, path) == expected
            head = reader.ask("HEAD", "/v1/log").headers["log-head"]
            assert int(head) >= int(accepted.headers["stream-position"])
    assert content(pair[0], path) == content(pair[1], path) == expected


def test_a_stream_made_or_deleted_at_one_is_so_at_the_other(pair: Pair) -> None:
    for number in range(20):
        here, there = pair if number % 2 else pair[::-1]
        path = fresh()
        assert look(there, path).status == 404

        assert make(here, path, body=b"x").status == 201
        assert there.ask("PUT", ROOT + path, f"Content-Type: {TEXT}").status == 200
        assert there.ask("PUT", ROOT + path, f"Content-Type: {JSON}").status == 409
        assert content(there, path) == b"x"

        assert there.ask("DELETE", ROOT + path).status == 204
        assert look(here, path).status == 404
        assert append(here, path, b"late").status == 404
        assert make(here, path).status == 201, "the path is free again"
        assert content(there, path) == b"", "an old life shines through"


# Producers


def test_a_producer_may_change_servers_between_any_two_requests(pair: Pair) -> None:
    path = fresh()
    make(pair[0], path)
    for seq in range(100):
        at, other = pair if seq % 2 else pair[::-1]
        body = f"{seq};".encode()

        assert append(at, path, body, *producer("p", 0, seq)).status == 200
        again = append(other, path, body, *producer("p", 0, seq))

        assert again.status == 204, "a repeated request is recognized by the other server"
    gap = append(pair[0], path, b"gap", *producer("p", 0, 105))
    assert (gap.status, code_of(gap)) == (409, "producer_sequence_gap")
    assert append(pair[1], path, b"new", *producer("p", 1, 0)).status == 200
    fenced = append(pair[0], path, b"old", *producer("p", 0, 100))
    assert (fenced.status, code_of(fenced)) == (403, "producer_epoch_stale")
    assert content(pair[0], path) == b"".join(b"%d;" % seq for seq in range(100)) + b"new"


def test_of_two_sessions_of_one_producer_the_servers_let_one_through(pair: Pair) -> None:
    """The same epoch and sequence, other content, at both at once: one is stored."""
    path = fresh()
    make(pair[0], path)
    dice = random.Random(3)
    for seq in range(200):
        replies = race(
            pair,
            post(path, b"a", *producer("p", 0, seq)),
            post(path, b"b", *producer("p", 0, seq)),
            dice,
        )
        assert Counter(reply.status for reply in replies)[200] == 1, replies
    assert len(content(pair[1], path)) == 200


# Conditions


def race(pair: Pair, first: bytes, second: bytes, dice: random.Random) -> list[Reply]:
    """Both requests are on their way before either is answered."""
    lanes = [(pair[0], first), (pair[1], second)]
    for connection, raw in dice.sample(lanes, 2):
        connection.send(raw)
    return [connection.reply("POST") for connection in pair]


def test_of_two_writers_at_two_servers_exactly_one_wins_each_of_1000_rounds(pair: Pair) -> None:
    path = fresh()
    make(pair[0], path)
    dice = random.Random(1)
    tail, won = START, []
    for number in range(ROUNDS):
        condition = f'If-Match: "{tail}"'
        bodies = [f"<{number} by {who}>".encode() for who in ("first", "second")]
        raw = [post(path, body, condition) for body in bodies]

        replies = race(pair, raw[0], raw[1], dice)

        assert sorted(reply.status for reply in replies) == [204, 412], (number, replies)
        winner = 0 if replies[0].status == 204 else 1
        assert code_of(replies[1 - winner]) == "tail_moved"
        tail = replies[winner].headers["stream-next-offset"]
        assert replies[1 - winner].headers["stream-next-offset"] == tail, "the loser is told"
        won.append(bodies[winner])
    assert content(pair[0], path) == content(pair[1], path) == b"".join(won)


def test_stream_seq_only_grows_whichever_server_is_asked(pair: Pair) -> None:
    path = fresh()
    make(pair[0], path)
    dice = random.Random(2)
    for number in range(100):
        mine, same = f"Stream-Seq: {number:04d}", f"Stream-Seq: {number:04d}"

        replies = race(pair, post(path, b"x", mine), post(path, b"x", same), dice)

        assert sorted(reply.status for reply in replies) == [204, 409], replies
    older = append(pair[1], path, b"x", "Stream-Seq: 0000")
    assert older.status == 409
    assert len(content(pair[0], path)) == 100


def test_after_a_close_at_one_nothing_is_appended_at_the_other(pair: Pair) -> None:
    dice = random.Random(4)
    for _ in range(50):
        path = fresh()
        make(pair[0], path)
        close = request("POST", ROOT + path, "Stream-Closed: true")

        closed, appended = race(pair, close, post(path, b"x"), dice)

        assert closed.status == 204
        late = append(pair[1], path, b"late")
        assert (late.status, code_of(late)) == (409, "stream_closed")
        expected = b"x" if appended.status == 204 else b""
        assert content(pair[0], path) == content(pair[1], path) == expected
        assert look(pair[1], path).headers["stream-closed"] == "true"


def test_a_key_is_used_once_whichever_server_gets_it(pair: Pair) -> None:
    path = fresh()
    make(pair[0], path)
    dice = random.Random(5)
    for number in range(100):
        raw = post(path, b"x", f"Idempotency-Key: k{number}")

        replies = race(pair, raw, raw, dice)

        assert sorted(reply.status for reply in replies) == [200, 204], replies
        assert len({reply.headers["stream-next-offset"] for reply in replies}) == 1
    other = append(pair[1], path, b"y", "Idempotency-Key: k0")
    assert (other.status, code_of(other)) == (409, "idempotency_key_reused")
    assert len(content(pair[0], path)) == 100


def test_a_commit_over_streams_is_whole_at_both_servers(pair: Pair) -> None:
    left, right = fresh(), fresh()
    for path in (left, right):
        make(pair[0], path, kind=JSON)
    dice = random.Random(6)
    for number in range(50):
        body = json.dumps(
            {
                "appends": [
                    {"stream": path, "content_type": JSON, "data": number} for path in (left, right)
                ]
            }
        ).encode()
        # The streams in another order at the other server: a lock for each would meet a deadlock.
        turned = json.dumps({"appends": json.loads(body)["appends"][::-1]}).encode()
        raw = [
            request("POST", "/v1/commit", "Content-Type: application/json", body=b)
            for b in (body, turned)
        ]

        replies = race(pair, raw[0], raw[1], dice)

        assert [reply.status for reply in replies] == [200, 200], replies
    assert content(pair[0], left) == content(pair[1], right)
    assert len(json.loads(content(pair[1], left))) == 100


def test_forks_stand_on_what_the_other_server_has(pair: Pair) -> None:
    for number in range(20):
        here, there = pair if number % 2 else pair[::-1]
        source, fork = fresh(), fresh()
        make(here, source, body=b"one")

        assert make(there, fork, f"Stream-Forked-From: {ROOT}{source}").status == 201
        assert append(here, source, b" two").status == 204
        assert append(here, fork, b" too").status == 204

        assert content(here, fork) == content(there, fork) == b"one too"
        assert there.ask("DELETE", ROOT + source).status == 204
        assert look(here, source).status == 410, "its fork keeps it"
        assert content(here, fork) == b"one too"
        assert here.ask("DELETE", ROOT + fork).status == 204
        assert look(there, source).status == 404, "with its last fork it is gone"


# Tails


@pytest.mark.parametrize("target", ["{path}?offset=-1&live=long-poll", "/v1/log"])
def test_a_long_poll_at_one_server_wakes_on_a_commit_at_the_other(pair: Pair, target: str) -> None:
    path = fresh()
    made = make(pair[0], path)
    if target == "/v1/log":
        head = pair[0].ask("HEAD", "/v1/log").headers["log-head"]
        target = f"/v1/log?stream={path}&after={head}&live=long-poll"
    else:
        target = ROOT + target.format(path=path)
    assert made.status == 201
    pair[1].send(request("GET", target))

    append(pair[0], path, b"woken")

    assert pair[1].reply().status == 200


@pytest.mark.parametrize("at", ["the same server", "the other server"])
@pytest.mark.parametrize("live", ["long-poll", "sse"])
def test_a_commit_that_comes_while_a_reader_looks_is_not_missed(
    nodes: tuple[ServerProcess, ServerProcess], pair: Pair, live: str, at: str
) -> None:
    """The reader and the append are on their way at once, 100 times over."""
    path = fresh()
    tail = make(pair[0], path).headers["stream-next-offset"]
    port = nodes[0 if at == "the same server" else 1].port
    for number in range(100):
        with Connection(port) as reader:
            reader.send(request("GET", f"{ROOT}{path}?offset={tail}&live={live}"))
            pair[0].send(post(path, b"%04d" % number))

            if live == "sse":
                reader.head()
                stream = events(reader.chunks())
                seen = next(event.data for event in stream if event.kind == "data")
            else:
                seen = reader.reply().body.decode()
            tail = pair[0].reply("POST").headers["stream-next-offset"]
            assert seen == f"{number:04d}"


def test_events_at_one_server_follow_commits_at_the_other(pair: Pair) -> None:
    path = fresh()
    make(pair[0], path)
    pair[1].send(request("GET", f"{ROOT}{path}?offset=-1&live=sse"))
    assert pair[1].head().status == 200
    stream = events(pair[1].chunks())
    seen = ""
    for number in range(50):
        append(pair[0], path, f"<{number}>".encode())
        while not seen.endswith(f"<{number}>"):
            event = next(stream)
            seen += event.data if event.kind == "data" else ""
    assert seen == "".join(f"<{number}>" for number in range(50))

    append(pair[0], path, b"", "Stream-Closed: true")

    assert list(stream)[-1].control["streamClosed"] is True


def test_a_lost_notification_delays_and_never_loses(url: str, pair: Pair) -> None:
    """The sessions that listen and notify are ended under the servers, again and again."""
    path = fresh()
    make(pair[0], path)
    ended = threading.Event()
    cut = 0

    def cut_sessions() -> None:
        nonlocal cut
        with psycopg.connect(url, autocommit=True) as connection:
            while not ended.wait(0.05):
                # Neither says anything but this in its life.
                cut += connection.execute(
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                    " AND (query LIKE '%LISTEN%' OR query LIKE '%turns_after%'"
                    " OR query LIKE '%pg_notify%' OR query LIKE '%FROM turns WHERE turn >%')"
                ).fetchone()[0]  # type: ignore[index]

    cutting = threading.Thread(target=cut_sessions)
    cutting.start()
    try:
        seen, offset, number = b"", "-1", 0
        while number < 10 or (cut < 3 and number < 20_000):
            pair[1].send(request("GET", f"{ROOT}{path}?offset={offset}&live=long-poll"))
            assert append(pair[0], path, b"%d;" % number).status == 204
            reply = pair[1].reply()
            assert reply.status == 200
            seen += reply.body
            offset = reply.headers["stream-next-offset"]
            number += 1
    finally:
        ended.set()
        cutting.join()
    assert seen == b"".join(b"%d;" % each for each in range(number))
    assert cut >= 3, "hardly a session was cut"


def test_many_writers_at_both_servers_make_one_order(
    nodes: tuple[ServerProcess, ServerProcess], pair: Pair
) -> None:
    """Producers at both, pipelined: the stream has all of them once, each in its order."""
    path = fresh()
    make(pair[0], path, kind=JSON)
    lanes, each = 8, 100
    with ExitStack() as stack:
        connections = [
            stack.enter_context(Connection(nodes[lane % 2].port)) for lane in range(lanes)
        ]
        for lane, connection in enumerate(connections):
            for seq in range(each):
                body = json.dumps([lane, seq]).encode()
                wrapped = b"[" + body + b"]"
                connection.send(post(path, wrapped, *producer(f"w{lane}", 0, seq), kind=JSON))
        for connection in connections:
            assert {connection.reply("POST").status for _ in range(each)} == {200}
    messages = json.loads(content(pair[0], path))
    assert messages == json.loads(content(pair[1], path))
    for lane in range(lanes):
        assert [seq for number, seq in messages if number == lane] == list(range(each))
    assert len(messages) == lanes * each
