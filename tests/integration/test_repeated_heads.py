"""Requests that repeat a head get the answers, and leave the state, that any others do.

A client that puts a new header line into each request never repeats a head. Two clients say the
same, one with such a line and one without, each to streams of its own.
"""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import httpx

from tests.engines import empty_store, engine, server_at
from tests.integration.auth_support import ALL, ROOT, Place, place, principal, token
from tests.integration.raw import Connection, request
from tests.integration.test_auth_jwt import AUDIENCE, ISSUER, WORKERS, jwks, signed
from tests.serving import ServerProcess
from tests.unit.http.rawhttp import Reply

__all__ = ["empty_store", "engine"]

SEEDS = range(4)
PHASES, REQUESTS, STREAMS = 6, 12, 3
TIME = re.compile(rb"\d{4}-\d\d-\d\dT[\d:.]+Z")
PASSING = frozenset(("date", "stream-position", "x-request-id"))
"""Headers that differ between any two answers."""
TAILS = ("*", '"0"', '"3"', "x", '"999"')
REPEATED = re.compile(r"^fencepost_http_heads_repeated_total (\d+)", re.MULTILINE)


def repeated(metrics: httpx.Response) -> int:
    """How many requests were read by the head of the one before."""
    found = REPEATED.search(metrics.text)
    assert found is not None
    return int(found[1])


def script(dice: random.Random) -> list[tuple[int, list[str], bytes]]:
    """Appends to a few streams: retries, gaps, conditions that hold or do not, and nonsense."""
    said: list[tuple[int, list[str], bytes]] = []
    numbers = [0] * STREAMS
    for _ in range(PHASES):
        names = dice.sample(("producer", "Idempotency-Key", "If-Match"), dice.randint(0, 2))
        for _ in range(REQUESTS):
            stream = dice.randrange(STREAMS)
            headers = ["Content-Type: application/json"]
            if "producer" in names:
                seq = max(0, numbers[stream] + dice.choice((0, 0, 0, 0, -1, -2, 3)))
                numbers[stream] = max(numbers[stream], seq + (seq == numbers[stream]))
                shown = dice.choice((str(seq),) * 9 + ("x",))
                headers += ["Producer-Id: p", "Producer-Epoch: 0", f"Producer-Seq: {shown}"]
            if "Idempotency-Key" in names:
                key = dice.choice(("k", "k2", str(len(said)), ""))
                headers.append(f"Idempotency-Key: {key}")
            if "If-Match" in names:
                headers.append("If-Match: " + dice.choice(TAILS))
            said.append((stream, headers, dice.choice((b"[1,2]", b'{"a":1}', b"[]", b"nonsense"))))
    return said


def said_to(reply: Reply, who: str) -> tuple[object, ...]:
    """An answer but for what differs between any two requests."""
    headers = {name: value for name, value in reply.headers.items() if name not in PASSING}
    return reply.status, headers, TIME.sub(b"then", reply.body.replace(who.encode(), b"one"))


def sent_by(dice: random.Random) -> list[str]:
    """Who sends each request of a script: mostly the same as before, or heads would not repeat."""
    senders = ["ann"]
    while len(senders) < PHASES * REQUESTS:
        others = dice.random() < 0.1
        senders.append(dice.choice(("ann", "bob", "eve", "mallory", "")) if others else senders[-1])
    return senders


def say(
    server: ServerProcess, who: str, seed: int, *, authorized: bool
) -> list[tuple[object, ...]]:
    """What a client is answered to a script, and what is in its streams then."""
    appends = script(random.Random(seed))
    senders = sent_by(random.Random(seed)) if authorized else [""] * len(appends)
    root = [bearer(token("root"))] if authorized else []
    paths = [f"/v1/stream/{who}/{seed}/{stream}" for stream in range(STREAMS)]
    answers: list[tuple[object, ...]] = []
    with Connection(server.port) as connection:
        for path in paths:
            connection.ask("PUT", path, "Content-Type: application/json", *root)
        for turn, (stream, headers, body) in enumerate(appends):
            own = [f"X-Turn: {turn}"] if who == "two" else []
            if senders[turn]:
                own.append(bearer(token(senders[turn])))
            reply = connection.ask("POST", paths[stream], *own, *headers, body=body)
            answers.append(said_to(reply, who))
        for path in paths:
            read = connection.ask("GET", path, *root)
            answers.append((read.headers["stream-next-offset"], read.body))
    return answers


def test_answers_and_streams_are_the_same_with_and_without_a_repeated_head(
    empty_store: Path | str,
) -> None:
    with server_at(empty_store) as server:
        for seed in SEEDS:
            counts = [repeated(httpx.get(f"{server.url}/metrics"))]
            found = []
            for who in ("one", "two"):
                found.append(say(server, who, seed, authorized=False))
                counts.append(repeated(httpx.get(f"{server.url}/metrics")))

            assert found[0] == found[1], f"seed {seed}"
            assert counts[1] - counts[0] > PHASES * (REQUESTS - 6)
            assert counts[1] == counts[2]


def test_they_are_the_same_for_several_principals_on_one_connection(
    empty_store: Path | str,
) -> None:
    """One may do all, one has a single stream, one may read only, and some are not known at all."""
    ann = principal("ann", ("one/**", ALL), ("two/**", ALL))
    bob = principal("bob", ("one/*/0", ALL), ("two/*/0", ALL))
    eve = principal("eve", ("**", ["read"]))
    with place(empty_store, ROOT, ann, bob, eve) as here:
        statuses: set[object] = set()
        for seed in SEEDS:
            counts = [counted(here)]
            found = []
            for who in ("one", "two"):
                found.append(say(here.process, who, seed, authorized=True))
                counts.append(counted(here))

            assert found[0] == found[1], f"seed {seed}"
            assert counts[1] - counts[0] > PHASES * 2
            assert counts[1] == counts[2]
            statuses.update(answer[0] for answer in found[0])

        assert statuses >= {200, 204, 401, 403, 412}


def asked(connection: Connection, path: str, *headers: str) -> int:
    """The status of one more append, whose head may repeat."""
    lines = ("Content-Type: application/json", *headers)
    return connection.ask("POST", f"/v1/stream/{path}", *lines, body=b"1").status


def bearer(value: str) -> str:
    return f"Authorization: Bearer {value}"


def counted(here: Place) -> int:
    return repeated(here("root").get("/metrics"))


def test_a_token_that_ends_is_refused_on_a_connection_that_repeats_its_head(
    tmp_path: Path,
) -> None:
    (tmp_path / "keys.json").write_text(jwks())
    with place(
        tmp_path / "data",
        ROOT,
        WORKERS,
        jwt_keys=tmp_path / "keys.json",
        jwt_issuer=ISSUER,
        jwt_audience=AUDIENCE,
        jwt_leeway_s=5,
    ) as here:
        here("root").create("jobs/1")
        with Connection(here.process.port) as connection:
            sent = bearer(signed(exp=int(time.time()) - 3))
            statuses = [asked(connection, "jobs/1", sent) for _ in range(3)]
            deadline = time.monotonic() + 30
            while statuses[-1] == 204 and time.monotonic() < deadline:
                statuses.append(asked(connection, "jobs/1", sent))
            stored = len(here("root").get("/v1/stream/jobs/1").json())

        assert statuses[-1] == 401
        assert stored == statuses.count(204)
        assert counted(here) >= len(statuses) - 2


def test_grants_and_rates_are_asked_for_each_request_that_repeats_a_head(tmp_path: Path) -> None:
    """Twelve appends at once, and a day until the next."""
    ann = principal("ann", ("orders/**", ALL), appends_per_s=0.0001)
    with place(tmp_path, ROOT, ann, burst_s="120000") as here:
        for path in ("orders/1", "orders/2", "bills/1"):
            assert here("root").create(path).status_code == 201
        with Connection(here.process.port) as connection:
            sent = bearer(token("ann"))
            paths = ("orders/1", "orders/1", "orders/2", "bills/1", "orders/2", "bills/1")
            statuses = [asked(connection, path, sent) for path in paths]
            others = [asked(connection, "orders/1", bearer(token("bob"))) for _ in range(3)]
            fast = [asked(connection, "orders/1", sent) for _ in range(20)]

        assert statuses == [204, 204, 204, 403, 204, 403]
        assert others == [401] * 3
        assert fast == [204] * 8 + [429] * 12
        assert counted(here) >= 20


def test_a_foreign_host_or_origin_is_refused_each_time(tmp_path: Path) -> None:
    own = request("POST", "/v1/stream/a", "Content-Type: application/json", body=b"1")
    host = own.replace(b"Host: localhost", b"Host: elsewhere.example")
    page = own.replace(b"\r\n\r\n", b"\r\nOrigin: http://elsewhere.example\r\n\r\n")
    with server_at(tmp_path) as server, Connection(server.port) as connection:
        connection.ask("PUT", "/v1/stream/a", "Content-Type: application/json")
        statuses = []
        for data in (own, own, own, own, host, host, host, host, page, page, page, own):
            connection.send(data)
            statuses.append(connection.reply("POST").status)

        assert statuses == [204] * 4 + [403] * 7 + [204]
        assert repeated(httpx.get(f"{server.url}/metrics")) >= 4
