"""A process of an app: it acts, works on reactions, or stops itself with an event in hand.

Arguments: the server's URL, the name of the app, the worker's name, and what it does:

    act       adds so many numbers to so many jobs, in turns, and ends
    collide   adds so many numbers to one job that all others add to as well, and ends
    work      runs reactions for ever; killed at any point
    freeze    the same, but in its first reaction it says `holding` and stops itself (SIGSTOP); when
              it is woken it says whether its commit was `committed` or `lost`, and goes on

With a number as a further argument it works as a version of the code whose events go to so many
targets; without one these are three. With `async` as a further argument it does the same on the
async client and uvloop.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from typing import Any, NamedTuple, Self

import uvloop

import fencepost
from fencepost.events import (
    App,
    AppSettings,
    AsyncOpenApp,
    ConcurrencyError,
    Context,
    Entity,
    Event,
    OpenApp,
    Recorded,
    Retry,
    action,
    applies,
)

LEASE_MS = 1_000
WOKEN = threading.Event()
"""Set when the process was stopped and goes on (SIGCONT)."""


class Added(Event):
    number: str
    count: int
    """How many were there before, as the action saw it: what it decided on."""


class Summed(Event):
    number: str
    by: str
    count: int


class Declared(NamedTuple):
    """An app, and the entities that its streams belong to."""

    app: App
    job: Any
    total: Any


def declare(name: str, worker: str, *, freezes: bool = False, shards: int = 3) -> Declared:
    """An app whose streams have its name: every number of a job goes into one of so many totals,
    each of which is of one target.
    """

    class Job(Entity, stream=f"{name}-jobs/{{id}}"):
        count: int = 0

        @action
        def add(self, number: str) -> Added:
            return Added(number=number, count=self.count)

        @applies
        def added(self, event: Added) -> Self:
            return self.replace(count=self.count + 1)

    class Total(Entity, stream=f"{name}-totals/{{id}}"):
        count: int = 0

        @action
        def add(self, number: str, by: str) -> Summed:
            return Summed(number=number, by=by, count=self.count)

        @applies
        def summed(self, event: Summed) -> Self:
            return self.replace(count=self.count + 1)

    app = App(name, entities=[Job, Total], settings=AppSettings(lease_ms=LEASE_MS))
    state = {"freezes": freezes}

    def target(event: Recorded[Added]) -> str:
        return f"t{sum(event.data.number.encode()) % shards}"

    @app.reaction(Added, to=target, retry=Retry(50, "fixed"))
    def add_up(event: Recorded[Added], context: Context) -> None:
        context.do(Total.add, context.target, number=event.data.number, by=worker)
        if state.pop("freezes", False):
            say(holding=context.target)
            for kind in ("committed", "lost"):
                app.hook(kind)(lambda crumb: say(late=crumb.kind))
            os.kill(os.getpid(), signal.SIGSTOP)
            WOKEN.wait()  # this thread may run on for a moment while the process is being stopped

    return Declared(app, Job, Total)


def add(opened: OpenApp, job: Any, name: str, number: str) -> None:
    """Add a number, however often others come first: `do` gives up after a number of conflicts."""
    while True:
        try:
            opened.do(job.add, name, number=number)
        except ConcurrencyError:
            continue  # nothing was stored
        return


async def async_add(opened: AsyncOpenApp, job: Any, name: str, number: str) -> None:
    while True:
        try:
            await opened.do(job.add, name, number=number)
        except ConcurrencyError:
            continue
        return


def say(**facts: str) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main() -> None:
    url, name, worker, how, *more = sys.argv[1:]
    signal.signal(signal.SIGCONT, lambda _number, _frame: WOKEN.set())
    shards = int(more[0]) if how == "work" and more[0].isdigit() else 3
    declared = declare(name, worker, freezes=how == "freeze", shards=shards)
    is_async = "async" in more
    count, jobs = (int(number) for number in (more[:2] if how in ("act", "collide") else (0, 0)))
    numbers = [(str(0 if how == "collide" else n % jobs), f"{worker}:{n}") for n in range(count)]
    if is_async:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(async_run(url, declared, worker, numbers))
        return
    with fencepost.connect(url) as client, declared.app.open(client) as opened:
        for to, number in numbers:
            add(opened, declared.job, to, number)
        if not numbers:
            opened.work(worker=worker, streams=3, events=3)


async def async_run(
    url: str, declared: Declared, worker: str, numbers: list[tuple[str, str]]
) -> None:
    async with fencepost.connect_async(url) as client, declared.app.open(client) as opened:
        for to, number in numbers:
            await async_add(opened, declared.job, to, number)
        if not numbers:
            await opened.work(worker=worker, streams=3, events=3)


if __name__ == "__main__":
    main()
