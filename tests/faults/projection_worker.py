"""A worker of one projection in a process of its own, which dies or waits where a test says.

Arguments: the URL of the server, the database, a folder for signs, and what happens to the worker:
`handler` dies inside a transaction, `applied` dies between a commit and its ack, `hold` waits with
a batch in hand until the file `gate` is there, `none` works.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import fencepost
from fencepost.events import App, AppSettings, Entity, Event, Recorded, Transaction
from fencepost.events.projections.stores import ProjectionStore


class Placed(Event):
    quantity: int


class Order(Entity, stream="orders/{id}"):
    pass


def make_app(database: str, die_in_handler: bool = False) -> App:
    mark = "%s" if database.startswith("postgres") else "?"
    app = App("shop", entities=[Order], settings=AppSettings(lease_ms=1_000))

    @app.projection("listed", schema="create table {listed} (stream text, quantity integer)")
    def listed(event: Recorded[Placed], db: Transaction) -> None:
        values = (event.stream, event.data.quantity)
        db.execute(f"insert into {{listed}} values ({mark}, {mark})", values)
        if die_in_handler and event.data.quantity == 3:
            die()

    return app


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(url: str, database: str, folder: Path, fate: str) -> None:
    applying = ProjectionStore.apply

    def apply(self: ProjectionStore, *arguments: Any) -> Any:
        if fate == "hold":
            (folder / "holding").touch()
            while not (folder / "gate").exists():
                time.sleep(0.01)
        applied = applying(self, *arguments)
        if fate == "applied":
            die()
        if fate == "hold":
            (folder / ("refused" if applied is None else "stored")).touch()
        return applied

    ProjectionStore.apply = apply  # type: ignore[method-assign,assignment]
    app = make_app(database, fate == "handler")
    with fencepost.connect(url) as client, app.open(client, projections=database) as shop:
        shop.work()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
