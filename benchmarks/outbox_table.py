"""`python -m benchmarks.outbox_table`: the cost of a send in the caller's transaction, and drains.

A transaction updates one row of an order table in PostgreSQL and commits. Measured are that alone,
with a plain insert of the same size, with a send of the outbox, with a send that also wakes an idle
relay by NOTIFY, and with procrastinate's `defer` on the same connection; one connection, then
sixteen. The cases take turns in one process, round by round, so that other work on the machine
slows all of them. Then relays drain what was sent, from PostgreSQL and from SQLite, into a server
on SQLite.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

import fencepost
from benchmarks import machine
from fencepost.outbox import Outbox, topic
from fencepost.outbox.rows import schema
from fencepost.testing.postgres import PostgresServer
from tests.serving import ServerProcess

PEER = ("procrastinate==3.10.0", "psycopg[binary,pool]")
ORDERS = """
create table orders (id integer primary key, paid integer not null default 0);
insert into orders (id) select generate_series(0, 999);
create table plain (id bigint generated always as identity primary key, message_id text unique,
    lane text not null, payload bytea not null, mark bytea not null, status text not null)
"""
DESTINATIONS = 16
Act = Callable[[Any, int], object]


def actions() -> dict[str, Act]:
    """What is done beside the update."""
    import procrastinate

    app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector())

    @app.task(name="nothing")
    def nothing(paid: int) -> None:
        pass

    loud, quiet = Outbox.table("shop"), Outbox.table("shop", wake=False)
    insert = (
        "insert into plain (message_id, lane, payload, mark, status) values (%s, %s, %s, %s, 'new')"
    )

    def destination(number: int) -> Any:
        return topic(f"orders-{number % DESTINATIONS}")

    def send(outbox: Any, prefix: str) -> Act:
        return lambda connection, number: outbox.send(
            connection, destination(number), {"paid": number}, id=f"{prefix}-{number}"
        )

    return {
        "the update alone": lambda _connection, _number: None,
        "with a plain insert": lambda connection, number: connection.execute(
            insert, (f"m-{number}", "shop/topic:orders/1", b"x" * 90, b"y" * 32)
        ),
        "with a send": send(quiet, "quiet"),
        "with a send that wakes a relay": send(loud, "loud"),
        "with procrastinate's defer": lambda connection, number: nothing.configure(
            connection=connection
        ).defer(paid=number),
    }


def round_of(url: str, act: Act, first: int, transactions: int, connections: int) -> float:
    """Seconds that so many transactions take, on so many connections at once."""
    each = transactions // connections
    opened = [psycopg.connect(url) for _ in range(connections)]
    ready = threading.Barrier(connections + 1)

    def work(number: int) -> None:
        connection = opened[number]
        ready.wait()
        for at in range(each):
            order = first + number * each + at
            connection.execute("update orders set paid = paid + 1 where id = %s", (order % 1000,))
            act(connection, order)
            connection.commit()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(connections)]
    for thread in threads:
        thread.start()
    ready.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - started
    for connection in opened:
        connection.close()
    return took


def measure(url: str, transactions: int, rounds: int, connections: int) -> dict[str, Any]:
    """Median milliseconds per transaction of each case, and our own processor time."""
    done = {name: ([], []) for name in actions()}  # type: ignore[var-annotated]
    acts = actions()
    first = connections * 10_000_000
    for _ in range(rounds):
        for name, act in acts.items():
            busy = _processor_s()
            took = round_of(url, act, first, transactions, connections)
            done[name][0].append(took / transactions * 1000)
            done[name][1].append((_processor_s() - busy) / transactions * 1e6)
            first += transactions
    return {
        name: [statistics.median(times), statistics.median(busy)]
        for name, (times, busy) in done.items()
    }


def _processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measured(url: str, transactions: int, rounds: int) -> None:
    """The inner program: procrastinate can be imported here."""
    import procrastinate

    app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=url))
    with app.open():
        app.schema_manager.apply_schema()
    with psycopg.connect(url) as connection:
        connection.execute(ORDERS)
        connection.execute(schema("postgresql"))
        # As if an idle relay waited all the time. One that is busy is not told of commits.
        connection.execute("update fencepost_outbox_state set waiting_until_ms = 1::bigint << 60")
    found = {
        connections: measure(url, transactions, rounds, connections) for connections in (1, 16)
    }
    print(json.dumps(found))


def costs(url: str, transactions: int, rounds: int) -> None:
    """Run the inner program with procrastinate beside us, and show what it found."""
    with tempfile.TemporaryDirectory() as folder:
        install = [sys.executable, "-m", "pip", "install", "-q", "--target", folder, *PEER]
        subprocess.run(install, check=True)
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "benchmarks.outbox_table", "--inner", url),
                *("--transactions", str(transactions), "--rounds", str(rounds)),
            ],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"the inner program failed: {done.stderr[-3000:]}")
    for connections, cases in json.loads(done.stdout.splitlines()[-1]).items():
        alone = cases["the update alone"][0]
        peer = cases["with procrastinate's defer"][0] - alone
        for name, (per_ms, busy_us) in cases.items():
            added = per_ms - alone
            print(
                f"{connections} connections, {name}: {per_ms:.3f} ms, adds {added:.3f} ms"
                f" ({added / peer:.2f} of procrastinate's), {busy_us:.0f} us of processor",
                flush=True,
            )


def drain(address: str, rows: int, relays: int, server: ServerProcess) -> float:
    """Rows a second that relays deliver."""
    command = ["outbox", "relay", "--database", address, "--mesh", "shop", "--url", server.url]
    started = time.perf_counter()
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "fencepost", *command, "--as", "shop", "--log-level", "error"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(relays)
    ]
    is_postgres = address.startswith("postgresql")
    connection: Any = psycopg.connect(address, autocommit=True) if is_postgres else None
    if connection is None:
        connection = sqlite3.connect(address, timeout=60)
    left = "select count(*) from fencepost_outbox where status <> 'done'"
    while connection.execute(left).fetchone()[0]:
        time.sleep(0.05)
    took = time.perf_counter() - started
    dead = connection.execute("select count(*) from fencepost_outbox where attempts <> 1")
    if dead.fetchone()[0]:
        print("some rows took more than one attempt")
    connection.execute("delete from fencepost_outbox")
    connection.commit()
    connection.close()
    for relay in running:
        relay.terminate()
        relay.wait()
    return rows / took


def fill(address: str, rows: int, destinations: int, run: int) -> None:
    """Rows for so many destinations."""
    is_postgres = address.startswith("postgresql")
    connection: Any = psycopg.connect(address) if is_postgres else sqlite3.connect(address)
    outbox = Outbox.table("shop")
    for number in range(rows):
        to = topic(f"orders-{number % destinations}")
        outbox.send(connection, to, {"paid": number}, id=f"run-{run}-{number}")
    connection.commit()
    connection.close()


def drains(folder: Path, url: str, rows: int) -> None:
    """Drains with one and two relays, to many destinations and to one."""
    file = str(folder / "shop.db")
    with sqlite3.connect(file) as made:
        made.execute("pragma journal_mode = wal")
        made.executescript(schema("sqlite"))
    made.close()
    with ServerProcess(folder / "data") as server, fencepost.connect(server.url) as client:
        mesh = client.mesh("shop")
        mesh.make()
        mesh.make_member("ann")
        for number in range(DESTINATIONS):
            mesh.make_topic(f"orders-{number}", ["ann"])
        run = 0
        for name, address in (("PostgreSQL", url), ("SQLite", file)):
            for relays, destinations in ((1, DESTINATIONS), (2, DESTINATIONS), (1, 1)):
                run += 1
                fill(address, rows, destinations, run)
                rate = drain(address, rows, relays, server)
                print(
                    f"{name}: {relays} relay(s), {destinations} destination(s), with their start:"
                    f" {rate:,.0f} rows/s",
                    flush=True,
                )


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transactions", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--inner", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        measured(options.inner, options.transactions, options.rounds)
        return 0
    with tempfile.TemporaryDirectory() as folder, PostgresServer() as postgres:
        print(machine.facts(Path(folder)))
        url = postgres.new_database(migrated=False)
        costs(url, options.transactions, options.rounds)
        with psycopg.connect(url) as connection:
            connection.execute("truncate fencepost_outbox")
            connection.execute("update fencepost_outbox_state set waiting_until_ms = 0")
        drains(Path(folder), url, options.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
