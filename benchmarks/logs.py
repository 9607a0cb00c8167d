"""The global log: how fast one reader gets all of it, as Arrow and as JSON lines.

Only we have one, so there is no peer in this table. Small messages, one per append, are the hard
case: each is a row of its own in the database. `per_core` is rows for each second of the server's
processor time, whatever else the machine was doing.
"""

import http.client
import time
from collections.abc import Callable

from benchmarks import machine
from benchmarks.cases import BATCH, JSON, Measurement, Outcome, Site, create, fill
from benchmarks.errors import BenchmarkError
from benchmarks.scale import Scale
from benchmarks.subjects import OURS, Running, running

ARROW = "application/vnd.apache.arrow.stream"
LINES = "application/x-ndjson"
STREAMS = 100


def log_measurements(scale: Scale) -> list[Measurement]:
    """The rows of case `log`."""
    return [
        Measurement(
            "log",
            f"{scale.log_rows:,} rows of 100 bytes, {how}, as {form}",
            "rows_per_second",
            _read(scale.log_rows, batch=batch, accept=accept),
            (OURS,),
        )
        for batch, how in ((1, "one per append"), (BATCH, f"{BATCH} per append"))
        for accept, form in ((ARROW, "Arrow"), (LINES, "JSON lines"))
    ]


def _read(rows: int, *, batch: int, accept: str) -> Callable[[Site], Outcome]:
    def measure(site: Site) -> Outcome:
        with running(site.subject, site.folder / "data") as server:
            create(site, server, streams=STREAMS, content_type=JSON)
            fill(
                site,
                server,
                "writing the log",
                expected=200,
                count=rows // batch,
                size=100,
                batch=batch,
                type=JSON,
                streams=STREAMS,
                connections=64,
            )
            _pass(server, accept)
            passes = wrong = size = 0
            cpu, began = machine.cpu_seconds(server.pid), time.perf_counter()
            while not passes or time.perf_counter() - began < site.scale.seconds:
                head, size = _pass(server, accept)
                wrong += head + 1 != rows
                passes += 1
            seconds = time.perf_counter() - began
            cpu = machine.cpu_seconds(server.pid) - cpu
            metrics = {
                "rows_per_second": rows * passes / seconds,
                "mb_per_second": size * passes / seconds / 1e6,
                "per_core": rows * passes / cpu if cpu else 0.0,
                "passes": passes,
                "server_cpu": round(cpu / seconds, 3),
                "peak_mb": machine.peak_resident_mb(server.pid),
            }
        return Outcome(metrics, [f"{wrong} passes had another length"] if wrong else [])

    return measure


def _pass(server: Running, accept: str) -> tuple[int, int]:
    """Read the log from its beginning to its head: the last position, and how many bytes came."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    after, size = -1, 0
    try:
        while True:
            connection.request(
                "GET", f"/v1/log?after={after}&limit=100000", headers={"Accept": accept}
            )
            answer = connection.getresponse()
            size += len(answer.read())
            if answer.status != 200:
                raise BenchmarkError(f"the log answered {answer.status}")
            after = int(answer.headers["Log-Next"])
            if answer.headers["Log-Up-To-Date"]:
                return after, size
    finally:
        connection.close()
