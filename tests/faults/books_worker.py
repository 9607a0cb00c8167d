"""A process that closes books, and children of it that are killed while they do.

Arguments: the server's URL, and a folder for archives. For every way to close books and every
point where a close can die, a child fills an entity, closes its books, and kills itself there
(SIGKILL). A line of JSON for each says what it was: the entity, the way, the point.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import fencepost
from fencepost.client import operations
from fencepost.client.effects import Operation
from fencepost.events import App, Entity, Event, OpenApp, Period, action, applies
from fencepost.events.closing import ClosedBooks

WAYS = ("restart", "retire", "window")
POINTS = ("before 0", "after 0", "archive", "before 1", "after 1")
"""Before or after which commit of a close a child dies; a window has one, the others two."""
PAYMENTS = 3
AFTER_ALL = datetime.now(UTC) + timedelta(days=1)


class Paid(Event):
    amount: int


class Account(Entity, stream="accounts/{id}"):
    balance: int = 0

    @action
    def pay(self, amount: int) -> Paid:
        return Paid(amount=amount)

    @applies
    def paid(self, event: Paid) -> Self:
        return self.replace(balance=self.balance + event.amount)


app = App("bank", entities=[Account])


def close(bank: OpenApp, name: str, way: str, archive: Callable[[Period], None]) -> ClosedBooks:
    """Close the books of an account in one of the ways."""
    if way == "window":
        return bank.books.drop(Account, name, before=AFTER_ALL, archive=archive)
    return bank.books.close(
        Account, name, then="retire" if way == "retire" else "restart", archive=archive
    )


def archive_into(folder: Path) -> Callable[[Period], None]:
    """An archive that stores the same period in the same place, as it must."""

    def archive(period: Period) -> None:
        events = [event.data.amount for event in period.events if isinstance(event.data, Paid)]
        (folder / period.key.replace("/", "-")).write_text(json.dumps(events))

    return archive


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(point: str, archive: Callable[[Period], None]) -> Callable[[Period], None]:
    """Have this process die at a point of the close; the archive to close with."""
    commit = operations.commit
    when, _, number = point.partition(" ")
    count = iter(range(1_000))

    def committing(*arguments: Any, **named: Any) -> Operation[Any]:
        own = next(count) == int(number or -1)
        if own and when == "before":
            die()
        done = yield from commit(*arguments, **named)
        if own and when == "after":
            die()
        return done

    def archiving(period: Period) -> None:
        archive(period)
        if point == "archive":
            die()

    operations.commit = committing
    return archiving


def victim(url: str, name: str, way: str, point: str, archive: Callable[[Period], None]) -> None:
    """Fill an account and close its books, up to the point."""
    with fencepost.connect(url) as client, app.open(client) as bank:
        for amount in range(1, PAYMENTS + 1):
            bank.do(Account.pay, name, amount=amount)
        close(bank, name, way, die_at(point, archive))


def main() -> None:
    url, folder = sys.argv[1:]
    for way in WAYS:
        for point in POINTS:
            if way == "window" and point.endswith("1"):
                continue
            name = f"{way}-{point}".replace(" ", "-")
            child = os.fork()
            if child == 0:
                try:
                    victim(url, name, way, point, archive_into(Path(folder)))
                except BaseException:
                    traceback.print_exc()
                os._exit(0)
            _pid, status = os.waitpid(child, 0)
            killed = os.WIFSIGNALED(status)
            line = {"name": name, "way": way, "point": point, "killed": killed}
            sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
