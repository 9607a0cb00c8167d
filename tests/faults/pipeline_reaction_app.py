"""The app of the kill tests on Spark: each number that is asked for is noted once in a total."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Self

from fencepost.events import (
    App,
    AppSettings,
    Context,
    Entity,
    Event,
    Recorded,
    Retry,
    action,
    applies,
)

LEASE_MS = 2_000
TOTALS = 3
HOLD_ENV = "FENCEPOST_HOLD_FILE"
"""The handler that finds this file removes it and sleeps for as long as it says, in seconds."""


class Asked(Event):
    number: int


class Noted(Event):
    number: int
    process: int


class Job(Entity, stream="jobs/{id}"):
    asked_count: int = 0

    @action
    def ask(self, number: int) -> Asked:
        return Asked(number=number)

    @applies
    def asked(self, event: Asked) -> Self:
        return self.replace(asked_count=self.asked_count + 1)


class Total(Entity, stream="totals/{id}"):
    noted_count: int = 0

    @action
    def note(self, number: int) -> Noted:
        return Noted(number=number, process=os.getpid())

    @applies
    def noted(self, event: Noted) -> Self:
        return self.replace(noted_count=self.noted_count + 1)


app = App("spark-kills", entities=[Job, Total], settings=AppSettings(lease_ms=LEASE_MS))


@app.reaction(
    Asked, to=lambda event: f"totals/{event.data.number % TOTALS}", retry=Retry(5, "fixed")
)
def add(event: Recorded[Asked], context: Context) -> None:
    context.do(Total.note, str(event.data.number % TOTALS), number=event.data.number)
    hold = os.environ.get(HOLD_ENV)
    if hold and Path(hold).exists():
        seconds = float(Path(hold).read_text())
        Path(hold).unlink(missing_ok=True)
        time.sleep(seconds)
