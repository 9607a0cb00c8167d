"""An order service that takes payments, crashes, and still tells the warehouse exactly once.

    fencepost mesh create shop && fencepost mesh member shop warehouse
    python examples/outbox.py shop.db order 7
    python examples/outbox.py shop.db pay 7
    fencepost outbox relay --database shop.db --mesh shop --as orders
    python examples/outbox.py shop.db warehouse

A payment and its message to the warehouse are one transaction of the service's own database. So
there is no moment in which an order is paid and the warehouse will not hear of it, or hears of a
payment that was rolled back. `pay 7 --crash before` and `--crash after` kill the service right
before and right after that transaction commits. Whatever happened, `pay 7` can be run again: the
id `paid-7` stands for this one message, here and at the server.
"""

from __future__ import annotations

import argparse
import os
import signal
import sqlite3

import fencepost
from fencepost.outbox import Outbox, dm
from fencepost.outbox.rows import schema

MESH = "shop"
ORDERS = "create table orders (id integer primary key, paid integer not null default 0)"

outbox = Outbox.table(MESH)


def open_database(path: str) -> sqlite3.Connection:
    """The service's own database. A real one gets the outbox table from its migrations."""
    database = sqlite3.connect(path, timeout=30)
    tables = {name for (name,) in database.execute("select name from sqlite_master")}
    if "orders" not in tables:
        database.executescript(f"begin; {ORDERS}; {schema('sqlite')} commit;")
    return database


def place_order(database: sqlite3.Connection, order: int) -> None:
    with database:
        database.execute("insert into orders (id) values (?)", (order,))


def pay(database: sqlite3.Connection, order: int, crash: str | None = None) -> None:
    """Mark the order as paid and tell the warehouse: both, or neither."""
    with database:
        changed = database.execute("update orders set paid = 1 where id = ?", (order,))
        if changed.rowcount != 1:
            raise SystemExit(f"there is no order {order}")
        outbox.send(database, dm("warehouse"), {"ship": order}, id=f"paid-{order}")
        if crash == "before":
            os.kill(os.getpid(), signal.SIGKILL)
    if crash == "after":
        os.kill(os.getpid(), signal.SIGKILL)


def warehouse(url: str) -> None:
    """What the warehouse is asked to ship."""
    with fencepost.connect(url) as client:
        for message in client.stream(f"__mesh/{MESH}/inbox/warehouse").read().messages():
            print(f"ship order {message['json']['ship']} ({message['client_message_id']})")


def main() -> None:
    parser = argparse.ArgumentParser(description="An order service with an outbox.")
    parser.add_argument("database")
    parser.add_argument("command", choices=["order", "pay", "warehouse"])
    parser.add_argument("order", type=int, nargs="?", default=1)
    parser.add_argument("--crash", choices=["before", "after"])
    given = parser.parse_args()
    if given.command == "warehouse":
        warehouse(os.environ.get("FENCEPOST_URL", "http://127.0.0.1:4437"))
        return
    database = open_database(given.database)
    if given.command == "order":
        place_order(database, given.order)
    else:
        pay(database, given.order, given.crash)
        print(f"order {given.order} is paid")
    database.close()


if __name__ == "__main__":
    main()
