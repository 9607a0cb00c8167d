"""Lists: how long a page takes where there are very many streams, producers and keys.

Each stream has one producer and one key. Every page of a list is fetched, one after the other over
one connection: a page must cost the same wherever it is. Patterns are asked for again and again;
the one that begins with a star has to look at everything, ten thousand streams a page. Only we have
lists, so there is no peer.
"""

import http.client
import json
import time
from typing import Any

from benchmarks.cases import JSON, Measurement, Outcome, Site
from benchmarks.errors import BenchmarkError
from benchmarks.scale import Scale
from benchmarks.slices import commit, quantile
from benchmarks.subjects import OURS, running

PER_COMMIT = 1_000
TENANTS = 100
PATTERN_PAGES = 100


def list_measurements(scale: Scale) -> list[Measurement]:
    """The row of case `lists`."""
    label = f"{scale.listed_streams:,} streams, producers and keys"
    return [Measurement("lists", label, "slowest_page_ms", _measure, (OURS,))]


def _measure(site: Site) -> Outcome:
    streams = site.scale.listed_streams
    with running(site.subject, site.folder / "data") as server:
        for first in range(0, streams, PER_COMMIT):
            site.progress("making streams", first, streams)
            commit(server.port, _commit_body(range(first, min(first + PER_COMMIT, streams))))
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        pages = {
            "streams": _walk(connection, "streams", "limit=100"),
            "producers": _walk(connection, "producers", "limit=100"),
            "keys": _walk(connection, "keys", "limit=100"),
            "a pattern": _again(connection, "streams?limit=100&match=tenant-07/**"),
            "a pattern of a star": _again(connection, "streams?limit=100&match=*/none"),
        }
        connection.close()
    metrics: dict[str, Any] = {
        "slowest_page_ms": 1e3 * max(max(waits) for waits, _ in pages.values()),
        "pages": {
            name: {"p50_ms": 1e3 * quantile(waits, 0.5), "p99_ms": 1e3 * quantile(waits, 0.99)}
            for name, (waits, _) in pages.items()
        },
    }
    problems = [
        f"{name} had {found} entries"
        for name, (_, found) in pages.items()
        if name in ("streams", "producers", "keys") and found != streams
    ]
    return Outcome(metrics, problems)


def _commit_body(numbers: range) -> bytes:
    appends = [
        {
            "stream": f"tenant-{number % TENANTS:02}/order-{number:06}",
            "content_type": JSON,
            "auto_create": True,
            "data": {"n": number},
            "producer": {"id": f"task:{number}", "epoch": 0, "seq": 0},
            "key": f"key-{number}",
        }
        for number in numbers
    ]
    return json.dumps({"appends": appends}).encode()


def _walk(connection: http.client.HTTPConnection, name: str, query: str) -> tuple[list[float], int]:
    """Every page of a list: how long each took, and how many entries there were."""
    waits: list[float] = []
    found, after = 0, ""
    while True:
        wait, page = _page(connection, f"{name}?{query}{after}")
        waits.append(wait)
        found += len(page[name])
        if page["next"] is None:
            return waits, found
        after = f"&after={page['next']}"


def _again(connection: http.client.HTTPConnection, target: str) -> tuple[list[float], int]:
    """The same page, many times."""
    asked = [_page(connection, target) for _ in range(PATTERN_PAGES)]
    return [wait for wait, _ in asked], len(asked[-1][1]["streams"])


def _page(connection: http.client.HTTPConnection, target: str) -> tuple[float, dict[str, Any]]:
    began = time.perf_counter()
    connection.request("GET", f"/v1/{target}")
    answer = connection.getresponse()
    body = answer.read()
    wait = time.perf_counter() - began
    if answer.status != 200:
        raise BenchmarkError(f"/v1/{target} answered {answer.status}")
    page: dict[str, Any] = json.loads(body)
    return wait, page
