"""What conditions cost: appends with If-Match, with a key, and many of them in one commit.

Requests are pipelined over one connection by this process, which can foretell every offset, so the
server is never kept waiting and its processor time is what differs. `per_core` is appends for each
second of it: the number to compare, whatever else the machine was doing. Only we have these, so
the peer is our own plain append, in the row above.
"""

import json
import socket
import time
from collections.abc import Callable, Iterator

import httptools

from benchmarks import machine
from benchmarks.cases import BYTES, Measurement, Outcome, Site, create
from benchmarks.scale import Scale
from benchmarks.subjects import OURS, running

SIZE = 100
IN_FLIGHT = 48
COMMIT_APPENDS = 100
BODY = b"x" * SIZE

Requests = Callable[[int], Iterator[bytes]]


def condition_measurements(scale: Scale) -> list[Measurement]:
    """The rows of case `conditions`."""
    count = scale.conditional_appends
    kinds: tuple[tuple[str, Requests, int], ...] = (
        ("plain appends", _plain, 1),
        ("with If-Match", _if_match, 1),
        ("with Idempotency-Key", _keyed, 1),
        (f"{COMMIT_APPENDS} in one commit", _commits, COMMIT_APPENDS),
    )
    return [
        Measurement("conditions", label, "per_core", _measure(count, requests, each), (OURS,))
        for label, requests, each in kinds
    ]


def _measure(count: int, requests: Requests, each: int) -> Callable[[Site], Outcome]:
    def measure(site: Site) -> Outcome:
        with running(site.subject, site.folder / "data") as server:
            create(site, server, streams=1, content_type=BYTES)
            cpu, began = machine.cpu_seconds(server.pid), time.perf_counter()
            answers = pipeline(server.port, requests(count // each))
            seconds = time.perf_counter() - began
            cpu = machine.cpu_seconds(server.pid) - cpu
        done = sum(answers.get(status, 0) for status in (200, 204)) * each
        metrics = {
            "rate": done / seconds,
            "per_core": done / cpu if cpu else 0.0,
            "server_cpu": round(cpu / seconds, 3),
        }
        wrong = {status: n for status, n in answers.items() if status not in (200, 204)}
        return Outcome(metrics, [f"answers by status: {wrong}"] if wrong else [])

    return measure


def _plain(count: int) -> Iterator[bytes]:
    return (post(b"") for _ in range(count))


def _if_match(count: int) -> Iterator[bytes]:
    return (post(b'If-Match: "%016d_%016d"\r\n' % (n, n * SIZE)) for n in range(count))


def _keyed(count: int) -> Iterator[bytes]:
    return (post(b"Idempotency-Key: key-%08d\r\n" % n) for n in range(count))


def _commits(count: int) -> Iterator[bytes]:
    item = {"stream": "bench", "content_type": BYTES, "data_base64": "eHh4" * 33 + "eA=="}
    body = json.dumps({"appends": [item] * COMMIT_APPENDS}).encode()
    head = b"POST /v1/commit HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    return (head + body for _ in range(count))


def post(condition: bytes) -> bytes:
    """An append with the header lines `condition`."""
    head = (
        b"POST /v1/stream/bench HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: %b\r\n"
        % BYTES.encode()
    )
    return b"%b%bContent-Length: %d\r\n\r\n%b" % (head, condition, SIZE, BODY)


class _Answers:
    """Counts the answers of one connection by their status."""

    def __init__(self) -> None:
        self.count = 0
        self.statuses: dict[int, int] = {}
        self.parser = httptools.HttpResponseParser(self)

    def on_message_complete(self) -> None:
        status = self.parser.get_status_code()
        self.statuses[status] = self.statuses.get(status, 0) + 1
        self.count += 1


def pipeline(port: int, requests: Iterator[bytes]) -> dict[int, int]:
    """Send all requests over one connection, never more than a few ahead of their answers."""
    answers, sent = _Answers(), 0
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        exhausted = False
        while not exhausted or answers.count < sent:
            batch = []
            while not exhausted and sent - answers.count < IN_FLIGHT:
                request = next(requests, None)
                if request is None:
                    exhausted = True
                    break
                batch.append(request)
                sent += 1
            if batch:
                connection.sendall(b"".join(batch))
            if answers.count < sent:
                received = connection.recv(1 << 16)
                if not received:
                    break
                answers.parser.feed_data(received)
    return answers.statuses
