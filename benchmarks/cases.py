"""What is measured: each case is a list of measurements, each measurement one table row.

A measurement writes what it needs to a fresh server, runs the generator and returns numbers,
together with what was wrong about the answers. A wrong answer never becomes a number that looks
like a good one: the row is then shown as failed.
"""

import contextlib
import http.client
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import generator, machine
from benchmarks.errors import BenchmarkError
from benchmarks.scale import Scale
from benchmarks.subjects import (
    CEILING,
    OURS,
    REFERENCE,
    REFERENCE_FILE,
    RUST,
    Running,
    Subject,
    last_words,
    running,
)

BYTES = "application/octet-stream"
JSON = "application/json"
LARGE_BYTES = 65536
BATCH = 100
FIRST_READS = 5
"""How many fresh processes are read from once each."""
SERVERS = (OURS, REFERENCE, REFERENCE_FILE, RUST)
FILES_STREAMS_MAX = 64
# With files the reference has no number where many streams are written (it keeps 100 handles and
# answers 404 to concurrent appends on more streams than that) nor with many readers (each reads
# the files for itself, and 1,000 of them got a quarter of their messages in 40 s).
WITHOUT_FILES = (OURS, REFERENCE, RUST)
SETUP_SECONDS_MAX = 1800.0

# Called with what is being prepared, how much is done and how much there is to do.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Site:
    """Where a measurement takes place: the subject, a folder of its own, and the scale."""

    subject: Subject
    folder: Path
    scale: Scale
    progress: Progress


@dataclass
class Outcome:
    """Numbers of one measurement; `problems` lists every answer that was not the right one."""

    metrics: dict[str, Any]
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Measurement:
    """One row: which case it belongs to, what it is called, and what its main number is."""

    case: str
    label: str
    main: str
    measure: Callable[[Site], Outcome]
    subjects: tuple[Subject, ...] = SERVERS


def measurements(scale: Scale) -> list[Measurement]:
    """Every measurement at this scale, in the order of the report."""
    rows = [
        Measurement(
            case,
            _plural(connections, "connection"),
            "rate",
            _appends(connections=connections, content_type=content_type, streams=connections),
            (
                *(SERVERS if connections <= FILES_STREAMS_MAX else WITHOUT_FILES),
                *((CEILING,) if content_type == BYTES else ()),
            ),
        )
        for case, content_type in (("appends", BYTES), ("appends-json", JSON))
        for connections in scale.connections
    ]
    rows += [
        Measurement("one-stream", "64 connections", "rate", _appends(connections=64)),
        Measurement("plain", "64 connections", "rate", _appends(connections=64, producer=False)),
        Measurement(
            "large",
            "16 connections",
            "mb_per_second",
            _appends(connections=16, size=LARGE_BYTES),
            (*SERVERS, CEILING),
        ),
        Measurement(
            "scattered",
            f"{scale.scattered_streams:,} streams",
            "rate",
            _appends(connections=64, streams=scale.scattered_streams),
            WITHOUT_FILES,
        ),
    ]
    rows += _catch_ups(scale)
    rows += [
        Measurement("sse", f"{readers:,} readers", "last_p99_ms", _tails(readers), WITHOUT_FILES)
        for readers in scale.readers
    ]
    rows.append(
        Measurement(
            "restart",
            f"{scale.restart_streams:,} streams, {scale.restart_messages:,} messages",
            "restart_seconds",
            _restart,
            # The quick scale stays below the 100 streams that the reference's files can take.
            (OURS, REFERENCE_FILE) if scale.quick else (OURS,),
        )
    )
    # Imported here because they measure with the tools of this module.
    from benchmarks.conditions import condition_measurements
    from benchmarks.lists import list_measurements
    from benchmarks.logs import log_measurements
    from benchmarks.slices import slice_measurements

    rows += condition_measurements(scale) + slice_measurements(scale)
    return rows + log_measurements(scale) + list_measurements(scale)


def case_names() -> list[str]:
    """The names that `--only` takes."""
    return list(dict.fromkeys(row.case for row in measurements(Scale())))


# -- appends -----------------------------------------------------------------------------------


def _appends(
    *,
    connections: int,
    content_type: str = BYTES,
    size: int = 100,
    producer: bool = True,
    streams: int = 1,
) -> Callable[[Site], Outcome]:
    def measure(site: Site) -> Outcome:
        with running(site.subject, site.folder / "data") as server:
            if site.subject is not CEILING:
                create(site, server, streams=streams, content_type=content_type)
            cpu, started = machine.cpu_seconds(server.pid), time.perf_counter()
            got = generator.run(
                "append",
                seconds_max=site.scale.seconds + site.scale.warmup_seconds + 60,
                port=server.port,
                path="/v1/stream/bench",
                connections=connections,
                seconds=site.scale.seconds,
                warmup=site.scale.warmup_seconds,
                type=content_type,
                size=size,
                producer=int(producer),
                streams=streams,
                random=1,
            )
            cpu = machine.cpu_seconds(server.pid) - cpu
            metrics = {
                "rate": got["rate"],
                "mb_per_second": got["bytes"] / 1e6 / got["seconds"],
                "p50_ms": got["latency"]["p50_us"] / 1e3,
                "p99_ms": got["latency"]["p99_us"] / 1e3,
                "max_ms": got["latency"]["max_us"] / 1e3,
                "answers": got["answers"],
                "statuses": got["statuses"],
                "generator_cpu": got["cpu"],
                "cpu_us": round(1e6 * cpu / max(1, got["done"]), 1),
                "server_cpu": round(cpu / (time.perf_counter() - started), 3),
                "peak_mb": machine.peak_resident_mb(server.pid),
            }
        # A new append of a producer is answered 200, one without a producer 204.
        return Outcome(metrics, wrong_answers(got, 200 if producer else 204))

    return measure


def wrong_answers(got: dict[str, Any], expected: int) -> list[str]:
    """What an append run's answers say against it: other statuses, breaks, nothing at all."""
    problems = [
        f"{count} answers were {status}, not {expected}"
        for status, count in got["statuses"].items()
        if int(status) != expected
    ]
    if got["broken"]:
        problems.append(f"{got['broken']} connections broke")
    if not got["answers"]:
        problems.append("nothing was answered")
    if not got["complete"]:
        problems.append("not everything was written in time")
    return problems


# -- setting up --------------------------------------------------------------------------------


def create(site: Site, server: Running, *, streams: int, content_type: str) -> None:
    """Create `bench`, or `bench-0` and on when there are several."""
    fill(
        site,
        server,
        "creating streams",
        expected=201,
        count=streams,
        method="PUT",
        size=0,
        producer=0,
        type=content_type,
        streams=streams,
        connections=min(16, streams),
    )


def fill(
    site: Site, server: Running, doing: str, *, expected: int, count: int, **options: Any
) -> None:
    """Write `count` appends and see that each was answered as expected."""
    got = generator.run(
        "append",
        seconds_max=SETUP_SECONDS_MAX + 60,
        progress=lambda done: site.progress(doing, done, count),
        port=server.port,
        path="/v1/stream/bench",
        count=count,
        seconds=SETUP_SECONDS_MAX,
        **options,
    )
    if problems := wrong_answers(got, expected):
        raise BenchmarkError(f"while {doing}: " + "; ".join(problems))


# -- catch-up ----------------------------------------------------------------------------------


def _catch_ups(scale: Scale) -> list[Measurement]:
    whole, little = scale.catch_up_bytes, scale.catch_up_single_bytes
    forms = [
        ("catch-up", "in 64 KiB appends", BYTES, LARGE_BYTES, 1, whole),
        ("catch-up", "in 100-byte appends", BYTES, 100, 1, little),
        ("catch-up-json", "in 64 KiB messages", JSON, LARGE_BYTES, 1, whole),
        ("catch-up-json", "in 100-byte messages, 100 per append", JSON, 100, BATCH, whole),
        ("catch-up-json", "in 100-byte messages, one per append", JSON, 100, 1, little),
    ]
    rows = []
    for case, how, content_type, size, batch, total in forms:
        data = ReadData(content_type=content_type, size=size, batch=batch, total=total)
        subjects = (*SERVERS, CEILING) if how == "in 64 KiB appends" else SERVERS
        label = f"{_size(total)} {how}"
        rows += [
            Measurement(case, label, "mb_per_second", partial(_catch_up, data), subjects),
            Measurement(
                case, f"{label}, first read", "first_mb_per_second", partial(_first_read, data)
            ),
        ]
    return rows


@dataclass(frozen=True, kw_only=True)
class ReadData:
    """What is written before it is read."""

    content_type: str
    size: int
    batch: int
    total: int

    @property
    def appends(self) -> int:
        return self.total // (self.size * self.batch)

    def write(self, site: Site, server: Running) -> None:
        create(site, server, streams=1, content_type=self.content_type)
        fill(
            site,
            server,
            "writing what is read",
            expected=200,
            count=self.appends,
            size=self.size,
            batch=self.batch,
            type=self.content_type,
            connections=4 if self.size * self.batch > 1000 else 64,
        )

    def problems(self, got: dict[str, Any]) -> list[str]:
        problems = [] if got["same"] else ["passes returned different numbers of bytes"]
        messages = self.appends * self.batch
        if self.content_type == BYTES and got["bytes"] != self.appends * self.size:
            problems.append(f"{got['bytes']} bytes came back, not {self.appends * self.size}")
        if self.content_type == JSON and got["braces"] != messages:
            problems.append(f"{got['braces']} messages came back, not {messages}")
        return problems


def _read(server: Running, seconds: float) -> tuple[dict[str, Any], float]:
    """What reading measured, and the seconds of processor that it took the server."""
    before = machine.processor_s([server.pid])[server.pid]
    got = generator.run(
        "read",
        seconds_max=seconds + 130,
        port=server.port,
        path="/v1/stream/bench",
        seconds=seconds,
    )
    return got, machine.processor_s([server.pid])[server.pid] - before


def _first_read(data: ReadData, site: Site) -> Outcome:
    """The first pass over the data of a server that has just started, the median of some starts.

    The reference in memory would have nothing then: it is read by the process that was written to.
    """
    got = []
    with running(site.subject, site.folder / "data") as server:
        data.write(site, server)
        if site.subject is REFERENCE:
            got.append(_read(server, 0)[0])
        else:
            server.stop()
    while len(got) < FIRST_READS and site.subject is not REFERENCE:
        with running(site.subject, site.folder / "data") as server:
            got.append(_read(server, 0)[0])
    rates = [one["first_mb_per_second"] for one in got]
    metrics = {"first_mb_per_second": statistics.median(rates), "every_first": rates}
    return Outcome(metrics, [problem for one in got for problem in data.problems(one)])


def _catch_up(data: ReadData, site: Site) -> Outcome:
    """Passes over the data, one after the other; the first two are not timed."""
    with running(site.subject, site.folder / "data") as server:
        if site.subject is not CEILING:
            data.write(site, server)
        before_mb = machine.resident_mb(server.pid)
        got, spent = _read(server, site.scale.seconds)
        metrics = {
            "mb_per_second": got["mb_per_second"],
            "mb_per_cpu_second": got["bytes"] * (got["passes"] + 2) / 1e6 / max(spent, 0.01),
            "best_mb_per_second": got["best_mb_per_second"],
            "passes": got["passes"],
            "responses_per_pass": got["responses"],
            "largest_response_mb": got["largest"] / 1e6,
            "generator_cpu": got["cpu"],
            "memory_before_mb": before_mb,
            "peak_mb": machine.peak_resident_mb(server.pid),
        }
    return Outcome(metrics, [] if site.subject is CEILING else data.problems(got))


# -- tails -------------------------------------------------------------------------------------


def _tails(readers: int) -> Callable[[Site], Outcome]:
    def measure(site: Site) -> Outcome:
        with running(site.subject, site.folder / "data") as server:
            create(site, server, streams=1, content_type=JSON)
            got = generator.run(
                "sse",
                seconds_max=site.scale.sse_seconds + 120,
                port=server.port,
                path="/v1/stream/bench",
                readers=readers,
                rate=site.scale.sse_rate,
                seconds=site.scale.sse_seconds,
            )
            metrics = {
                "last_p50_ms": got["last_reader"]["p50_us"] / 1e3,
                "last_p99_ms": got["last_reader"]["p99_us"] / 1e3,
                "delivery_p50_ms": got["delivery"]["p50_us"] / 1e3,
                "delivery_p99_ms": got["delivery"]["p99_us"] / 1e3,
                "append_p50_ms": got["append"]["p50_us"] / 1e3,
                "append_p99_ms": got["append"]["p99_us"] / 1e3,
                "deliveries": got["deliveries"],
                "messages_per_second": got["rate"],
                "connect_seconds": got["connect_seconds"],
                "generator_cpu": got["cpu"],
                "peak_mb": machine.peak_resident_mb(server.pid),
            }
        problems = []
        if got["deliveries"] != got["expected"]:
            problems.append(f"{got['deliveries']} deliveries, not {got['expected']}")
        problems += [f"{w}: {got[w]}" for w in ("strays", "dropped", "refused") if got[w]]
        return Outcome(metrics, problems)

    return measure


# -- restart -----------------------------------------------------------------------------------


def _restart(site: Site) -> Outcome:
    """Fill, stop in order, start; then write more, kill, and start again over what was left."""
    data, scale = site.folder / "data", site.scale
    streams, messages = scale.restart_streams, scale.restart_messages
    with running(site.subject, site.folder / "empty") as server:
        _read_first(server, expected=404)
        empty_mb = machine.resident_mb(server.pid)
    with running(site.subject, data) as server:
        create(site, server, streams=streams, content_type=BYTES)
        began = time.perf_counter()
        fill(
            site,
            server,
            "writing messages",
            expected=200,
            count=messages,
            streams=streams,
            connections=64,
        )
        fill_seconds = time.perf_counter() - began
        filled_mb = machine.resident_mb(server.pid)
        stop_seconds = server.stop()
    metrics: dict[str, Any] = {
        "fill_per_second": messages / fill_seconds,
        "stop_seconds": stop_seconds,
        "disk_mb": machine.folder_mb(data),
        "empty_memory_mb": empty_mb,
        # A server may load streams only when they are used, so an idle one is weighed where all
        # have just been written to, not after the restart.
        "filled_memory_mb": filled_mb,
        "bytes_per_stream": (filled_mb - empty_mb) * 1e6 / streams,
    }
    with _restarted(site, data) as (server, seconds):
        metrics |= {
            "restart_seconds": seconds,
            "memory_mb": machine.resident_mb(server.pid),
        }
        fill(
            site,
            server,
            "writing before the kill",
            expected=200,
            count=max(64, messages // 10),
            streams=streams,
            connections=64,
            # Other producers than before, so that every sequence begins at 0 again.
            writer="second",
        )
        server.stop(signal.SIGKILL)
    with _restarted(site, data) as (server, seconds):
        metrics |= {
            "restart_after_kill_seconds": seconds,
            "memory_after_kill_mb": machine.resident_mb(server.pid),
        }
    return Outcome(metrics)


@contextlib.contextmanager
def _restarted(site: Site, data: Path) -> Iterator[tuple[Running, float]]:
    """A server started on a filled folder, with the seconds until its first read succeeded."""
    with running(site.subject, data, seconds_max=SETUP_SECONDS_MAX) as server:
        began = time.perf_counter()
        _read_first(server, expected=200)
        yield server, server.ready_seconds + time.perf_counter() - began


def _read_first(server: Running, *, expected: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("GET", "/v1/stream/bench-0?offset=-1")
        answer = connection.getresponse()
        answer.read()
    finally:
        connection.close()
    if answer.status != expected:
        raise BenchmarkError(f"the first read was answered {answer.status}, not {expected}")


def measure(row: Measurement, subject: Subject, scale: Scale, data: Path, say: Progress) -> Outcome:
    """Make one measurement in a folder of its own below `data`, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix=f"{row.case}-", dir=data) as folder:
        try:
            return row.measure(Site(subject, Path(folder), scale, say))
        except (BenchmarkError, OSError) as error:
            said = last_words(Path(folder) / "data.log")
            return Outcome({}, [f"{error} (the server's last words: {said})"])


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _size(count: int) -> str:
    return f"{count // 2**20} MiB" if count >= 2**20 else f"{count // 2**10} KiB"
