"""`fencepost serve --store` as a user runs it: workers on one port, a database that goes away."""

import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from fencepost.store.opener import INDEXED_BYTES_MAX
from fencepost.testing.postgres import PostgresServer, shared_server
from tests.acceptance.test_serve_command import metrics, refusal
from tests.integration.raw import Connection, ask, code_of, events, request
from tests.serving import ServerProcess

ROOT = "/v1/stream/"
TEXT = "Content-Type: text/plain"
WAIT_SECONDS = 60.0


class DatabaseServer(ServerProcess):
    """A server on a database; what is on the command line is all that differs."""

    def __init__(self, url: str, **options: object) -> None:
        super().__init__(Path(), **options)  # type: ignore[arg-type]
        self.environment["FENCEPOST_STORE_URL"] = url

    def _command(self) -> list[str]:
        command = super()._command()
        at = command.index("--data")
        return command[:at] + command[at + 2 :]


@pytest.fixture
def url() -> str:
    return shared_server().new_database()


@pytest.fixture
def workers(url: str) -> Iterator[DatabaseServer]:
    arguments = ["--workers", "2", "--long-poll-ms", "600000"]
    with DatabaseServer(url, arguments=arguments) as server:
        yield server


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for a condition, and say which one when it does not come."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"waited too long until {what}"


def worker_of(port: int) -> str:
    """Which worker has answered."""
    [name] = [name for name in metrics(port) if name.startswith("fencepost_worker_info")]
    return name


def both(port: int) -> set[str]:
    """The workers that answer on a port, asked by many connections."""
    return {worker_of(port) for _ in range(32)}


def children(pid: int) -> set[int]:
    """The workers of a parent; multiprocessing keeps a process of its own beside them."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child) for child in found if "spawn_main" in command_of(child)}


def command_of(pid: str) -> str:
    """What a process was started as; nothing when it is gone by now."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def is_there(pid: int) -> bool:
    """Whether a process runs; one that is only waited for does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def two_free_ports() -> int:
    """The first of two ports in a row that nobody has."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            with suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port


# Refusals


def test_workers_are_refused_for_a_folder(tmp_path: Path) -> None:
    said = refusal("--port", "0", "--workers", "2", "--data", str(tmp_path / "data"))

    assert "--workers is for PostgreSQL" in said
    assert not (tmp_path / "data").exists()


def test_own_ports_that_are_in_each_others_way_are_refused() -> None:
    said = refusal(
        *("--port", "4437", "--workers", "3", "--store", "postgresql://127.0.0.1:1/x"),
        FENCEPOST_SERVER_WORKER_PORT="4435",
    )

    assert "worker_port" in said


@pytest.mark.parametrize("limit", ["path_bytes_max", "producer_id_bytes_max", "key_bytes_max"])
def test_limits_beyond_what_postgresql_keeps_in_an_index_are_refused(limit: str) -> None:
    """Such a name would be answered 503 for ever."""
    variable = f"FENCEPOST_LIMITS_{limit}".upper()

    said = refusal("--port", "0", "--store", "postgresql://127.0.0.1:1/x", **{variable: "2001"})

    assert f"[limits] {limit} may be 2000" in said


def test_names_as_long_as_postgresql_allows_are_kept(url: str) -> None:
    limits = ("PATH_BYTES_MAX", "PRODUCER_ID_BYTES_MAX", "KEY_BYTES_MAX")
    longest = {f"FENCEPOST_LIMITS_{limit}": str(INDEXED_BYTES_MAX) for limit in limits}
    # Of dice, so that it cannot be made shorter.
    name = random.Random(0).randbytes(INDEXED_BYTES_MAX).hex()[:INDEXED_BYTES_MAX]

    with DatabaseServer(url, environment=longest) as server:
        made = ask(server.port, "PUT", ROOT + name, TEXT)
        producer = (f"Producer-Id: {name}", "Producer-Epoch: 0", "Producer-Seq: 0")
        sent = ask(server.port, "POST", ROOT + name, TEXT, *producer, body=b"x")
        keyed = ask(server.port, "POST", ROOT + name, TEXT, f"Idempotency-Key: {name}", body=b"y")

    assert [made.status, sent.status, keyed.status] == [201, 200, 204]


def test_workers_that_cannot_start_end_the_parent_with_their_reason() -> None:
    said = refusal("--port", "0", "--workers", "2", "--store", "postgresql://me:hush@127.0.0.1:1/x")

    assert "postgresql://me@127.0.0.1:1/x cannot be reached" in said
    assert "hush" not in said


def test_a_port_in_use_is_said_before_any_worker_is_started(url: str) -> None:
    with DatabaseServer(url) as other:
        said = refusal("--port", str(other.port), "--workers", "2", "--store", url)

    assert str(other.port) in said


def test_an_own_port_in_use_is_said_to_be_the_workers(url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refusal(
            *("--port", "0", "--workers", "2", "--store", url),
            FENCEPOST_SERVER_WORKER_PORT=port,
        )

    assert f"port {port} of its own" in said


# Workers


def test_all_workers_serve_one_port_and_one_store(workers: DatabaseServer) -> None:
    made = ask(workers.port, "PUT", ROOT + "s", TEXT, body=b"one")
    seen = [ask(workers.port, "GET", ROOT + "s").body for _ in range(16)]

    assert made.status == 201
    assert set(seen) == {b"one"}
    assert both(workers.port) == {
        'fencepost_worker_info{worker="1"}',
        'fencepost_worker_info{worker="2"}',
    }
    assert workers.output.count("listening on") == 1


def test_each_worker_has_a_port_of_its_own_for_its_metrics(url: str) -> None:
    first = two_free_ports()
    with DatabaseServer(
        url,
        arguments=["--workers", "2"],
        environment={"FENCEPOST_SERVER_WORKER_PORT": str(first)},
    ) as server:
        names = [worker_of(first), worker_of(first + 1)]
        ask(first + 1, "PUT", ROOT + "s", TEXT)
        ask(first, "POST", ROOT + "s", TEXT, body=b"by the first")
        counted = [metrics(port)["fencepost_appends_total"] for port in (first, first + 1)]
        seen = ask(server.port, "GET", ROOT + "s").body

    assert names == ['fencepost_worker_info{worker="1"}', 'fencepost_worker_info{worker="2"}']
    assert counted == [1, 0]
    assert seen == b"by the first"


def test_a_subscription_made_at_one_worker_is_there_at_the_other(url: str) -> None:
    """One of them leads; the other one knows where it is."""
    first = two_free_ports()
    path = "/v1/stream/__ds/subscriptions/mine"
    body = b'{"type": "pull-wake", "pattern": "**", "wake_stream": "wakes"}'
    with DatabaseServer(
        url,
        arguments=["--workers", "2"],
        environment={"FENCEPOST_SERVER_WORKER_PORT": str(first)},
    ):
        made = [
            ask(port, "PUT", path, "Content-Type: application/json", body=body).status
            for port in (first, first + 1)
        ]
        seen = [ask(port, "GET", path).status for port in (first, first + 1)]

    assert made == [201, 200]
    assert seen == [200, 200]


def test_a_worker_that_was_killed_is_started_again(workers: DatabaseServer) -> None:
    ask(workers.port, "PUT", ROOT + "s", TEXT, body=b"kept")
    before = children(workers.pid)
    assert len(before) == 2
    [victim, other] = sorted(before)

    os.kill(victim, signal.SIGKILL)

    until(lambda: len(children(workers.pid) - {victim}) == 2, "there are two workers again")
    until(lambda: len(both(workers.port)) == 2, "both answer")
    assert other in children(workers.pid)
    assert "killed by signal 9" in workers.output
    assert ask(workers.port, "GET", ROOT + "s").body == b"kept"


def test_the_end_lets_every_worker_finish_and_leaves_none_behind(workers: DatabaseServer) -> None:
    """A long-poll is answered and an event stream ended, whichever worker has them."""
    ask(workers.port, "PUT", ROOT + "s", TEXT, body=b"x")
    with ExitStack() as opened:
        polls = [opened.enter_context(Connection(workers.port)) for _ in range(4)]
        for poll in polls:
            poll.send(request("GET", ROOT + "s?offset=now&live=long-poll"))
        follow = opened.enter_context(Connection(workers.port))
        follow.send(request("GET", ROOT + "s?offset=-1&live=sse"))
        follow.head()
        stream = events(follow.chunks())
        assert [next(stream).kind, next(stream).kind] == ["data", "control"]
        left = children(workers.pid)

        code = workers.stop()

        assert code == 0
        assert [poll.reply().status for poll in polls] == [204] * 4
        assert list(stream) == []
        assert not any(is_there(pid) for pid in left)
    workers.restart()


def test_workers_whose_parent_was_killed_leave_too(url: str) -> None:
    server = DatabaseServer(url, arguments=["--workers", "2"]).start()
    orphans = children(server.pid)
    assert len(orphans) == 2

    parent = server.pid
    os.kill(parent, signal.SIGKILL)

    until(lambda: not any(is_there(pid) for pid in orphans), "the workers have left")
    assert server.kill() == -signal.SIGKILL


# A database that goes away


@pytest.fixture
def database() -> Iterator[PostgresServer]:
    """A server of this test's own, to be stopped and started."""
    with PostgresServer() as server:
        yield server


def test_while_the_database_is_away_reads_are_503_and_the_server_recovers(
    database: PostgresServer,
) -> None:
    with DatabaseServer(database.new_database(), arguments=["--long-poll-ms", "600000"]) as server:
        ask(server.port, "PUT", ROOT + "s", TEXT, body=b"kept")

        database.stop()
        refused = {
            target: ask(server.port, "GET", target)
            for target in (
                ROOT + "s",
                ROOT + "s?offset=now&live=long-poll",
                ROOT + "s?offset=-1&live=sse",
                "/v1/log",
                "/v1/log?live=sse",
                "/v1/log/plan",
                "/v1/streams",
                "/v1/producers",
            )
        }
        ready, healthy = ask(server.port, "GET", "/readyz"), ask(server.port, "GET", "/healthz")
        write = ask(server.port, "POST", ROOT + "s", TEXT, body=b" and not lost")
        shown = ask(server.port, "GET", "/metrics")
        database.start()
        until(lambda: ask(server.port, "GET", "/readyz").status == 200, "the server is ready")

        for target, reply in refused.items():
            assert (reply.status, code_of(reply)) == (503, "store_unavailable"), target
            assert int(reply.headers["retry-after"]) >= 1, target
        assert (ready.status, healthy.status, shown.status) == (503, 200, 200)
        assert ready.headers["retry-after"]
        assert (write.status, code_of(write)) == (503, "storage_unavailable")
        assert ask(server.port, "POST", ROOT + "s", TEXT, body=b"!").status == 204
        assert ask(server.port, "GET", ROOT + "s").body == b"kept!"


def test_an_event_stream_ends_when_the_store_goes_away_under_it(database: PostgresServer) -> None:
    """It ends as one whose time is up, so its reader comes back with the last offset it has."""
    with DatabaseServer(database.new_database()) as server:
        ask(server.port, "PUT", ROOT + "s", TEXT)
        pieces = [bytes([letter]) * (1 << 20) for letter in b"abcdefghijklmnop"]
        for piece in pieces:
            assert ask(server.port, "POST", ROOT + "s", TEXT, body=piece).status == 204
        with Connection(server.port) as reading:
            # The reader takes nothing yet, so the server stops reading for it after a few pieces.
            reading.send(request("GET", ROOT + "s?offset=-1&live=sse"))
            reading.head()
            database.stop()
            before = list(events(reading.chunks()))
        database.start()
        until(lambda: ask(server.port, "GET", "/readyz").status == 200, "the server is ready")
        last = json.loads([event.data for event in before if event.kind == "control"][-1])
        rest = b""
        offset = last["streamNextOffset"]
        while offset is not None:
            reply = ask(server.port, "GET", f"{ROOT}s?offset={offset}")
            rest += reply.body
            at_end = reply.headers.get("stream-up-to-date") == "true"
            offset = None if at_end else reply.headers["stream-next-offset"]

        seen = "".join(event.data for event in before if event.kind == "data")
        assert 0 < len(seen) < 16 << 20, "the stream was to be cut in the middle"
        assert seen.encode() + rest == b"".join(pieces)
        assert "a stream ended with an error" not in server.output
