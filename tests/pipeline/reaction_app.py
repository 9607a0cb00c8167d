"""An app for tests of reactions on Spark: its module is imported by drivers and executors."""

from __future__ import annotations

from typing import Self

from fencepost.events import (
    App,
    AppSettings,
    AsyncContext,
    Context,
    Entity,
    Event,
    NonRetryableError,
    Recorded,
    Retry,
    Transaction,
    action,
    applies,
)

PARTS = 7


class Asked(Event):
    number: int
    poison: bool = False


class Noted(Event):
    number: int
    job: str


class Job(Entity, stream="spark-jobs/{id}"):
    asked_count: int = 0

    @action
    def ask(self, number: int, poison: bool = False) -> Asked:
        return Asked(number=number, poison=poison)

    @applies
    def asked(self, event: Asked) -> Self:
        return self.replace(asked_count=self.asked_count + 1)


class Total(Entity, stream="spark-totals/{id}"):
    count: int = 0

    @action
    def note(self, number: int, job: str) -> Noted:
        return Noted(number=number, job=job)

    @applies
    def noted(self, event: Noted) -> Self:
        return self.replace(count=self.count + 1)


app = App("spark-app", entities=[Job, Total], settings=AppSettings(lease_ms=5_000))


def _total(event: Recorded[Asked]) -> str:
    return f"spark-totals/{event.data.number % PARTS}"


@app.reaction(Asked, to=_total, retry=Retry(2, "fixed", base_ms=50, on_exhausted="park"))
def add(event: Recorded[Asked], context: Context) -> None:
    """One effect in the total that the number belongs to."""
    if event.data.poison:
        raise NonRetryableError("poison")
    part = str(event.data.number % PARTS)
    context.do(Total.note, part, number=event.data.number, job=event.stream)


async_app = App("spark-async", entities=[Job, Total])


@async_app.reaction(Asked)
async def follow(event: Recorded[Asked], context: AsyncContext) -> None:
    """The same by an async handler, at the stream of the event itself."""
    await context.do(Total.note, "async", number=event.data.number, job=event.stream)


def _tallying(version: int) -> App:
    """An app with a projection whose rows depend on the order of the events of a stream."""
    tally = App("spark-tally", entities=[Job])

    @tally.projection(
        "tally",
        version=version,
        schema="create table {tally} (job text, number integer, primary key (job, number))",
    )
    def counted(event: Recorded[Asked], db: Transaction) -> None:
        mark = "%s" if "psycopg" in type(db.execute("select 1")).__module__ else "?"
        found = db.execute(f"select max(number) from {{tally}} where job = {mark}", (event.stream,))
        newest = found.fetchone()[0]
        number = event.data.number * version
        if newest is not None and newest >= number:
            raise ValueError(f"{number} of {event.stream} came after {newest}")
        db.execute(f"insert into {{tally}} values ({mark}, {mark})", (event.stream, number))

    return tally


tally_1, tally_2 = _tallying(1), _tallying(2)
