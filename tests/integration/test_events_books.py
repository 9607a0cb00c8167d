"""Closing the books of entities: nothing goes that is still needed, and the state stays whole."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import pytest

import fencepost
from fencepost.events import (
    App,
    AppSettings,
    ArchiveError,
    Breadcrumb,
    ClosedBooks,
    Context,
    Entity,
    Event,
    Period,
    Recorded,
    action,
    applies,
)
from fencepost.events.loading import base_path, snapshot_path
from tests.engines import engine as engine
from tests.integration.events_support import Opening, listed
from tests.integration.events_support import opening as opening
from tests.serving import ServerProcess

_numbers = itertools.count()


class Paid(Event):
    amount: int


class Ended(Event):
    pass


class Counted(Event):
    pass


class Account(Entity, stream="accounts/{id}"):
    balance: int = 0
    payments: int = 0

    @action
    def pay(self, amount: int) -> Paid:
        return Paid(amount=amount)

    @action
    def end(self) -> Ended:
        return Ended()

    @applies
    def paid(self, event: Paid) -> Self:
        return self.replace(balance=self.balance + event.amount, payments=self.payments + 1)


def banking(**settings: Any) -> App:
    return App(f"bank{next(_numbers)}", entities=[Account], settings=AppSettings(**settings))


@pytest.fixture(autouse=True)
def no_groups_are_left(server_process: ServerProcess) -> Iterator[None]:
    """A group without workers would lag on every stream of the tests behind this one."""
    yield
    with fencepost.connect(server_process.url) as client:
        for group in client.groups():
            client.group(group.group).delete()


def with_reaction(app: App, name: str) -> App:
    """Each payment to an account is counted in another stream, when a worker gets to it."""
    path = f"accounts/{name}"

    @app.reaction(Paid, to=lambda event: path if event.stream == path else None)
    def count(event: Recorded[Paid], context: Context) -> None:
        context.append(f"counts-{app.name}", Counted())

    return app


def fresh() -> str:
    return f"a{next(_numbers)}"


def stored(url: str, path: str) -> list[Any]:
    with fencepost.connect(url) as client:
        try:
            return list(client.stream(path).read())
        except fencepost.StreamNotFoundError:
            return []


def names(url: str, name: str) -> list[str]:
    return [message["name"] for message in stored(url, f"accounts/{name}")]


async def test_a_restarted_entity_keeps_its_state_and_its_versions_go_on(
    opening: Opening, server_process: ServerProcess
) -> None:
    name, app = fresh(), banking(snapshot_every=2)
    crumbs: list[Breadcrumb] = []
    app.hook("closed")(crumbs.append)
    archived: list[Period] = []
    async with opening(app) as bank:
        for amount in (1, 2, 3):
            await bank.do(Account.pay, name, amount=amount)

        done: ClosedBooks = await bank.books.close(Account, name, archive=archived.append)
        after = await bank.do(Account.pay, name, amount=10)

        assert (done.outcome, done.version) == ("restarted", 2)
        assert (after.version, after.state) == (5, Account(balance=16, payments=4))
    assert names(server_process.url, name) == ["$opened", "Paid"]
    [period] = archived
    assert (period.key, period.state.balance) == (f"accounts/{name}@2", 6)
    assert [event.data for event in period.events] == [Paid(amount=n) for n in (1, 2, 3)]
    assert [crumb.stream for crumb in crumbs] == [f"accounts/{name}"]
    async with opening(banking()) as bank:
        assert (await bank.load(Account, name)).state.balance == 16
        assert (await bank.books.close(Account, name)).outcome == "restarted"
        assert (await bank.books.close(Account, name)).outcome == "unchanged"
        assert (await bank.load(Account, name)).state.balance == 16


async def test_the_books_of_an_entity_that_never_was_are_left_as_they_are(
    opening: Opening, server_process: ServerProcess
) -> None:
    name = fresh()
    async with opening(banking()) as bank:
        outcomes = [
            await bank.books.close(Account, name),
            await bank.books.close(Account, name, then="retire"),
            await bank.books.drop(Account, name, before=datetime.now(UTC)),
            await bank.books.reopen(Account, name),
        ]

    assert {(done.outcome, done.version) for done in outcomes} == {("unchanged", -1)}
    with fencepost.connect(server_process.url) as client:
        assert [found.path for found in client.streams(match=f"**/{name}")] == []


async def test_a_retired_entity_holds_nothing_and_takes_nothing(
    opening: Opening, server_process: ServerProcess
) -> None:
    name = fresh()
    async with opening(banking(snapshot_every=1)) as bank:
        await bank.do(Account.pay, name, amount=1)
    async with opening(banking()) as bank:
        assert stored(server_process.url, snapshot_path(f"accounts/{name}")) != []

        done = await bank.books.close(Account, name, then="retire")

        assert done.outcome == "retired"
        assert stored(server_process.url, f"accounts/{name}") == []
        assert stored(server_process.url, snapshot_path(f"accounts/{name}")) == []
        with pytest.raises(fencepost.BooksClosedError):
            await bank.do(Account.pay, name, amount=1)


async def test_what_a_killed_retirement_has_left_beside_its_stream_goes_with_the_next_one(
    opening: Opening, server_process: ServerProcess
) -> None:
    """The stream ends in one commit; what lies beside it is deleted behind that."""
    name = fresh()
    left = snapshot_path(f"accounts/{name}")
    async with opening(banking()) as bank:
        await bank.do(Account.pay, name, amount=1)
        assert (await bank.books.close(Account, name, then="retire")).outcome == "retired"
        with fencepost.connect(server_process.url) as client:
            client.stream(left).append({"left": True}, auto_create=True)
        assert stored(server_process.url, left) != []

        assert (await bank.books.close(Account, name, then="retire")).outcome == "retired"

    assert stored(server_process.url, left) == []


async def test_work_that_is_left_is_never_cut_off_and_its_group_is_named(
    opening: Opening, server_process: ServerProcess
) -> None:
    name = fresh()
    app = with_reaction(banking(), name)
    async with opening(app) as bank:
        await bank.do(Account.pay, name, amount=1)
        await bank.settle()
        await bank.do(Account.pay, name, amount=2)

        pending = await bank.books.close(Account, name)
        await bank.settle()
        done = await bank.books.close(Account, name)

        assert (pending.outcome, pending.group, pending.guarded) == ("pending", app.name, False)
        assert done.outcome == "restarted"
        assert len(stored(server_process.url, f"counts-{app.name}")) == 2


async def test_a_group_that_is_not_of_the_app_keeps_the_guard_until_it_has_looked(
    opening: Opening, server_process: ServerProcess
) -> None:
    name, group = fresh(), f"others{next(_numbers)}"
    path = f"accounts/{name}"
    async with opening(banking(books_wait_ms=300)) as bank:
        await bank.do(Account.pay, name, amount=1)
        with fencepost.connect(server_process.url) as client:
            other = client.group(group)
            other.make(sources=[path], targets="stream", start="now")
            other.claim("w")

            pending = await bank.books.close(Account, name)
            assert (pending.outcome, pending.group) == ("pending", group)
            assert pending.guarded
            with pytest.raises(fencepost.BooksClosedError):
                await bank.do(Account.pay, name, amount=1)
            reopened = await bank.books.reopen(Account, name)
            assert reopened.outcome == "reopened"
            assert (await bank.do(Account.pay, name, amount=5)).state.balance == 6
            other.delete()
        assert (await bank.books.close(Account, name)).outcome == "restarted"
        assert (await bank.load(Account, name)).state == Account(balance=6, payments=2)


async def test_a_guarded_stream_waits_for_a_group_that_lags_and_is_archived_once(
    opening: Opening, server_process: ServerProcess
) -> None:
    """Else it would take no events until the next close, and reactions to it would fail."""
    name, group = fresh(), f"others{next(_numbers)}"
    archived: list[str] = []
    async with opening(banking(books_wait_ms=60_000)) as bank:
        await bank.do(Account.pay, name, amount=1)
        with fencepost.connect(server_process.url) as client:
            other = client.group(group)
            other.make(sources=[f"accounts/{name}"], targets="stream", start="now")
            closing = asyncio.create_task(
                bank.books.close(Account, name, archive=lambda period: archived.append(period.key))
            )
            async with asyncio.timeout(60):
                while not archived:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.to_thread(other.work, lambda *_: None, worker="w", until_idle=True)
            done = await closing

        assert done.outcome == "restarted"
        assert archived == [f"accounts/{name}@0"]


async def test_a_failing_archive_leaves_the_guard_and_the_close_goes_on_later(
    opening: Opening, server_process: ServerProcess
) -> None:
    name = fresh()
    seen: list[Period] = []

    def failing(period: Period) -> None:
        seen.append(period)
        raise OSError("the disk is full")

    async with opening(banking()) as bank:
        await bank.do(Account.pay, name, amount=1)

        with pytest.raises(ArchiveError, match="the disk is full"):
            await bank.books.close(Account, name, then="retire", archive=failing)
        assert names(server_process.url, name) == ["Paid", "$closed"]
        # What was decided first counts: the archive may have been told of it.
        done = await bank.books.close(Account, name, archive=seen.append)

        assert done.outcome == "retired"
        assert [period.key for period in seen] == [f"accounts/{name}@0"] * 2
        assert [period.then for period in seen] == ["retire"] * 2


async def test_a_window_drops_what_is_older_and_the_state_stays_whole(
    opening: Opening, server_process: ServerProcess
) -> None:
    name = fresh()
    async with opening(banking(snapshot_every=None)) as bank:
        for amount in (1, 2, 3):
            await bank.do(Account.pay, name, amount=amount)
        events = await listed(bank.query(stream=f"accounts/{name}"))
        future = datetime.now(UTC) + timedelta(hours=1)
        archived: list[Period] = []

        nothing = await bank.books.drop(Account, name, before=events[0].created)
        done = await bank.books.drop(Account, name, before=future, archive=archived.append)
        again = await bank.books.drop(Account, name, before=future)

        assert (nothing.outcome, done.outcome, again.outcome) == (
            "unchanged",
            "dropped",
            "unchanged",
        )
        assert [len(period.events) for period in archived] == [3]
        assert stored(server_process.url, f"accounts/{name}") == []
    async with opening(banking(snapshot_every=None)) as bank:
        assert (await bank.load(Account, name)).state == Account(balance=6, payments=3)
        assert (await bank.do(Account.pay, name, amount=4)).version == 3
        assert (await bank.load(Account, name)).state.balance == 10
        assert (await bank.load(Account, name, as_of=future)).state.balance == 10
        assert (await bank.load(Account, name, as_of=done.version)).state.balance in (0, 6)
        # The base moves on, and a period may end as well.
        assert (await bank.books.drop(Account, name, before=future)).version == 3
        base = stored(server_process.url, base_path(f"accounts/{name}"))[-1]
        assert base["data"]["state"] == {"balance": 10, "payments": 4}
        assert (await bank.books.close(Account, name)).outcome == "unchanged"
        await bank.do(Account.pay, name, amount=5)
        assert (await bank.books.close(Account, name)).outcome == "restarted"
    async with opening(banking()) as bank:
        assert (await bank.load(Account, name)).state == Account(balance=15, payments=5)
        assert (await bank.books.close(Account, name, then="retire")).outcome == "retired"
    assert stored(server_process.url, base_path(f"accounts/{name}")) == []


async def test_a_window_keeps_what_is_younger(
    opening: Opening, server_process: ServerProcess
) -> None:
    name = fresh()
    async with opening(banking()) as bank:
        await bank.do(Account.pay, name, amount=1)
        first = (await listed(bank.query(stream=f"accounts/{name}")))[0].created
        while True:  # until the server's clock has moved on
            await bank.do(Account.pay, name, amount=1)
            events = await listed(bank.query(stream=f"accounts/{name}"))
            if events[-1].created > first:
                break
        younger = [event for event in events if event.created == events[-1].created]

        done = await bank.books.drop(Account, name, before=events[-1].created)

        kept = stored(server_process.url, f"accounts/{name}")
        assert done.outcome == "dropped"
        assert len(kept) == len(younger)
    async with opening(banking()) as bank:
        assert (await bank.load(Account, name)).state.payments == len(events)


async def test_policies_close_what_is_due_and_nothing_else(
    opening: Opening, server_process: ServerProcess
) -> None:
    folder = f"due{next(_numbers)}"

    class Case(Entity, stream=f"{folder}/{{id}}"):
        open: bool = False

        @action
        def pay(self, amount: int) -> Paid:
            return Paid(amount=amount)

        @action
        def end(self) -> Ended:
            return Ended()

    app = App(f"bank{next(_numbers)}", entities=[Case])
    archived: list[str] = []
    app.books(
        Case, then="retire", final=Ended, archive=lambda period: archived.append(period.stream)
    )
    app.books(Case, then="restart", age=timedelta(days=1))
    async with opening(app) as bank:
        await bank.do(Case.pay, "open", amount=1)
        for name in ("done", "other"):
            await bank.do(Case.pay, name, amount=1)
            await bank.do(Case.end, name)

        closed = await bank.books.close_due()

        assert {(done.stream, done.outcome) for done in closed} == {
            (f"{folder}/done", "retired"),
            (f"{folder}/other", "retired"),
        }
        assert sorted(archived) == [f"{folder}/done", f"{folder}/other"]
        assert await bank.books.close_due() == []
        assert (await bank.do(Case.pay, "open", amount=1)).version == 1


async def test_sixteen_closers_and_writers_lose_nothing(
    opening: Opening, server_process: ServerProcess
) -> None:
    """Whoever comes first wins; every payment that was answered is in the state."""
    name = fresh()
    async with opening(banking()) as bank:
        await bank.do(Account.pay, name, amount=1)

        async def pay() -> int:
            paid = 0
            for _ in range(5):
                try:
                    await bank.do(Account.pay, name, amount=1)
                except (fencepost.BooksClosedError, fencepost.events.ConcurrencyError):
                    continue
                paid += 1
            return paid

        async def close() -> int:
            for _ in range(3):
                await bank.books.close(Account, name)
            return 0

        paid = sum(await asyncio.gather(*(pay() for _ in range(3)), *(close() for _ in range(3))))

        assert (await bank.load(Account, name)).state.balance == 1 + paid
    async with opening(banking()) as bank:
        assert (await bank.load(Account, name)).state.balance == 1 + paid
