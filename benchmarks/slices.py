"""Large commits: how long another append waits while thousands of streams are committed.

Staged parts, one for each stream, become messages by one commit. Meanwhile another connection
appends to a stream of its own, one request after the other, and its longest wait is the number that
counts. The same connection before the commit is what it is compared with: on a busy machine that is
not calm either. Only we have commits, so there is no peer.
"""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator

from benchmarks import machine
from benchmarks.cases import JSON, Measurement, Outcome, Site
from benchmarks.conditions import pipeline
from benchmarks.scale import Scale
from benchmarks.subjects import OURS, running

BODY = b'{"n": 1}'
CALM_SECONDS = 2.0
COMMIT_SECONDS_MAX = 900


def slice_measurements(scale: Scale) -> list[Measurement]:
    """The rows of case `commit-stalls`."""
    return [
        Measurement(
            "commit-stalls",
            f"{streams:,} streams in one commit",
            "longest_wait_ms",
            _measure(streams),
            (OURS,),
        )
        for streams in scale.committed_streams
    ]


def _measure(streams: int) -> Callable[[Site], Outcome]:
    def measure(site: Site) -> Outcome:
        with running(site.subject, site.folder / "data") as server:
            site.progress("staging parts", 0, streams)
            staged = pipeline(server.port, parts(streams))
            body = commit_body(streams)
            other = Other(server.port)
            other.start()
            time.sleep(min(CALM_SECONDS, site.scale.seconds))
            calm = other.cut()
            cpu, began = machine.cpu_seconds(server.pid), time.perf_counter()
            status, answer = commit(server.port, body)
            seconds = time.perf_counter() - began
            waits = other.cut()
            cpu = machine.cpu_seconds(server.pid) - cpu
            other.stop()
            metrics = {
                "longest_wait_ms": 1e3 * max(waits),
                "p50_ms": 1e3 * quantile(waits, 0.5),
                "p99_ms": 1e3 * quantile(waits, 0.99),
                "calm_longest_wait_ms": 1e3 * max(calm),
                "calm_p50_ms": 1e3 * quantile(calm, 0.5),
                "calm_p99_ms": 1e3 * quantile(calm, 0.99),
                "appends_meanwhile": len(waits),
                "commit_seconds": seconds,
                "cpu_us_per_stream": 1e6 * cpu / streams,
                "peak_mb": machine.peak_resident_mb(server.pid),
            }
        answered = appends_in(answer)
        problems = [] if staged == {201: streams} else [f"staging answered {staged}"]
        if (status, answered) != (200, streams):
            problems.append(f"the commit answered {status}, with {answered} appends")
        return Outcome(metrics, problems + other.problems)

    return measure


def parts(streams: int) -> Iterator[bytes]:
    """Requests that stage a part for each stream."""
    about = f"Content-Type: {JSON}\r\nContent-Length: {len(BODY)}\r\n\r\n"
    head = f"HTTP/1.1\r\nHost: 127.0.0.1\r\n{about}"
    for number in range(streams):
        yield b"POST /v1/staging/t/%06d %b%b" % (number, head.encode(), BODY)


def commit_body(streams: int) -> bytes:
    """A commit of all parts. Made beforehand: making it takes long, and others would wait here."""
    appends = [
        {
            "stream": f"committed/{number:06}",
            "content_type": JSON,
            "auto_create": True,
            "parts": [{"txn": "t", "part": f"{number:06}"}],
        }
        for number in range(streams)
    ]
    return json.dumps({"appends": appends}).encode()


def commit(port: int, body: bytes) -> tuple[int, bytes]:
    """Send a commit: the status and the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=COMMIT_SECONDS_MAX)
    try:
        connection.request("POST", "/v1/commit", body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def appends_in(answer: bytes) -> int:
    """How many appends an answer tells of."""
    return len(json.loads(answer).get("appends", ()))


class Other:
    """A client that appends to another stream, one request after the other."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._waits: list[float] = []
        self.problems: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def cut(self) -> list[float]:
        """How long each request since the last cut took, in seconds."""
        waits, self._waits = self._waits, []
        return waits or [0.0]

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=COMMIT_SECONDS_MAX)
        headers = {"Content-Type": JSON, "Stream-Auto-Create": "true"}
        try:
            while not self._stopping.is_set():
                began = time.perf_counter()
                connection.request("POST", "/v1/stream/other", BODY, headers)
                answer = connection.getresponse()
                answer.read()
                self._waits.append(time.perf_counter() - began)
                if answer.status != 204:
                    self.problems.append(f"another append answered {answer.status}")
                    return
        finally:
            connection.close()


def quantile(waits: list[float], share: float) -> float:
    """The wait that so many of them are not longer than."""
    return sorted(waits)[int(share * (len(waits) - 1))]
