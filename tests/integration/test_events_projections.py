"""Projections on real servers, into SQLite, memory and PostgreSQL: what they hold is a fold of the
log, whatever happened on the way."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fencepost
from fencepost.client.errors import InvalidArgumentError
from fencepost.events import (
    App,
    DefinitionError,
    NonRetryableError,
    Recorded,
    Retry,
    Transaction,
)
from fencepost.events.projections.stores import store_at
from fencepost.testing.postgres import shared_server
from tests.faults.test_groups import wait_until
from tests.serving import ServerProcess
from tests.unit.events.shop import Order, Placed, Stock

_numbers = itertools.count()


@pytest.fixture(params=["sqlite", "memory", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database for projections."""
    if request.param == "postgres":
        postgres = shared_server()
        url = postgres.new_database()
        yield url
        postgres.drop_database(url)
    else:
        yield ":memory:" if request.param == "memory" else str(tmp_path / "shop.db")


def mark(database: str) -> str:
    return "%s" if database.startswith("postgres") else "?"


def app_with(
    database: str, app: str, sku: str, *, version: int = 1, times: int = 1, fail: str = ""
) -> App:
    """An app that lists the orders of one sku, and fails at one of them if asked to."""
    shop = App(app, entities=[Order, Stock])

    @shop.projection(
        "listed",
        version=version,
        schema="create table {listed} (stream text, quantity integer)",
    )
    def listed(event: Recorded[Placed], db: Transaction) -> None:
        if event.data.sku != sku:
            return
        insert = f"insert into {{listed}} values ({mark(database)}, {mark(database)})"
        db.execute(insert, (event.stream, event.data.quantity * times))
        if fail and event.stream.endswith(fail):
            raise NonRetryableError("poison")

    return shop


@pytest.fixture
def names() -> tuple[str, str]:
    """An app and a sku that no other test of this server has."""
    number = next(_numbers)
    return f"listing{number}", f"tea{number}"


def fold(client: fencepost.Client, sku: str) -> list[tuple[str, int]]:
    """What the projection must hold, from the log alone."""
    placed = client.log(match="orders/*", names="Placed")
    return sorted(
        (entry.stream, entry.data["data"]["quantity"])
        for entry in placed
        if entry.data["data"]["sku"] == sku
    )


def rows(opened: Any) -> list[tuple[str, int]]:
    found = opened.projections.read("select stream, quantity from listed order by stream, quantity")
    return [(row[0], row[1]) for row in found]


def test_a_projection_holds_what_the_log_says(
    server_process: ServerProcess, database: str, names: tuple[str, str]
) -> None:
    app, sku = names
    with (
        fencepost.connect(server_process.url) as client,
        app_with(database, app, sku).open(client, projections=database) as shop,
    ):
        for number in range(5):
            shop.do(Order.place, f"{app}-{number}", sku=sku, quantity=number)
            shop.do(Order.place, f"{app}-{number}", sku="other", quantity=1)
        shop.settle()
        shop.do(Order.place, f"{app}-0", sku=sku, quantity=9)
        shop.settle()
        shop.settle()

        assert rows(shop) == fold(client, sku)
        assert len(rows(shop)) == 6
        (status,) = shop.projections.statuses()
        assert (status.version, status.live, status.position) == (1, True, client.log_head())


async def test_the_async_client_does_the_same(
    server_process: ServerProcess, database: str, names: tuple[str, str]
) -> None:
    app, sku = names
    async with (
        fencepost.connect_async(server_process.url) as client,
        app_with(database, app, sku).open(client, projections=database) as shop,
    ):
        await shop.do(Order.place, f"{app}-0", sku=sku, quantity=2)
        await shop.settle()

        assert [tuple(row) for row in await shop.projections.read("select * from listed")] == [
            (f"orders/{app}-0", 2)
        ]


def test_a_new_version_is_built_beside_the_live_one_and_switched(
    server_process: ServerProcess, database: str, names: tuple[str, str], tmp_path: Path
) -> None:
    # Two programs share it, which memory cannot be.
    database = str(tmp_path / "shared.db") if database == ":memory:" else database
    app, sku = names
    seen: list[tuple[int, int]] = []
    second = app_with(database, app, sku, version=2, times=10)
    with (
        fencepost.connect(server_process.url) as client,
        app_with(database, app, sku).open(client, projections=database) as old,
        second.open(client, projections=database) as new,
    ):
        old.do(Order.place, f"{app}-0", sku=sku, quantity=2)
        old.settle()
        run = new.projections._run("listed")
        run.store.prepare(run.projection)
        beside = rows(old)
        reached = new.projections.rebuild(
            "listed", on_progress=lambda at, head: seen.append((at, head))
        )
        switched = rows(old)
        states = [(one.version, one.live) for one in new.projections.statuses()]

    assert beside == [(f"orders/{app}-0", 2)]
    assert switched == [(f"orders/{app}-0", 20)]
    assert states == [(1, False), (2, True)]
    assert seen[-1] == (reached, reached)


def test_workers_of_the_old_version_go_on_and_leave_the_new_one_to_its_readers(
    server_process: ServerProcess, database: str, names: tuple[str, str], tmp_path: Path
) -> None:
    """Both run for a while in every deploy. Only a rebuild by hand goes back."""
    database = str(tmp_path / "shared.db") if database == ":memory:" else database
    app, sku = names
    second = app_with(database, app, sku, version=2, times=10)
    with (
        fencepost.connect(server_process.url) as client,
        app_with(database, app, sku).open(client, projections=database) as old,
        second.open(client, projections=database) as new,
    ):
        old.do(Order.place, f"{app}-0", sku=sku, quantity=2)
        old.settle()
        new.settle()
        assert rows(old) == [(f"orders/{app}-0", 20)]

        old.do(Order.place, f"{app}-1", sku=sku, quantity=3)
        old.settle()

        assert rows(old) == [(f"orders/{app}-0", 20)]
        assert [(one.version, one.live) for one in old.projections.statuses()] == [
            (1, False),
            (2, True),
        ]
        old.projections.rebuild("listed")
        assert rows(new) == [(f"orders/{app}-0", 2), (f"orders/{app}-1", 3)]


def test_a_schema_that_changed_without_its_version_is_refused_until_it_is_built_anew(
    server_process: ServerProcess, database: str, names: tuple[str, str], tmp_path: Path
) -> None:
    database = str(tmp_path / "shared.db") if database == ":memory:" else database
    app, sku = names

    def with_schema(schema: str) -> App:
        shop = App(app, entities=[Order, Stock])

        @shop.projection("listed", schema=schema)
        def listed(event: Recorded[Placed], db: Transaction) -> None:
            if event.data.sku == sku:
                values = f"({mark(database)}, {mark(database)})"
                db.execute(
                    f"insert into {{listed}} (stream, quantity) values {values}",
                    (event.stream, event.data.quantity),
                )

        return shop

    made = "create table {listed} (stream text, quantity integer)"
    wider = "create table {listed} (stream text, quantity integer, note text default 'new')"
    with fencepost.connect(server_process.url) as client:
        with with_schema(made).open(client, projections=database) as shop:
            shop.do(Order.place, f"{app}-0", sku=sku, quantity=2)
            shop.settle()
        with with_schema(made.replace(" (", "\n    (")).open(client, projections=database) as shop:
            shop.settle()  # it says the same
        with with_schema(wider).open(client, projections=database) as shop:
            with pytest.raises(DefinitionError, match=r"listed v1 has changed: raise its version"):
                shop.settle()
            shop.projections.rebuild("listed", after=-1)
            shop.settle()

            assert shop.projections.read("select note from listed") == [("new",)]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("create tabel {listed} (stream text)", r"create tabel listed_v1"),
        ("create table {taken} (stream text)", r"taken_v1"),
    ],
)
def test_a_schema_that_cannot_be_made_is_shown_with_its_projection(
    server_process: ServerProcess, database: str, names: tuple[str, str], schema: str, said: str
) -> None:
    app, _sku = names
    shop = App(app, entities=[Order])

    @shop.projection("listed", schema=schema)
    def listed(event: Recorded[Placed], db: Transaction) -> None: ...

    with (
        fencepost.connect(server_process.url) as client,
        shop.open(client, projections=database) as opened,
    ):
        with opened.projections.store._transaction() as execute:
            execute("create table taken_v1 (stream text)")
        with pytest.raises(DefinitionError, match=f"listed v1 cannot be made.*{said}"):
            opened.settle()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("mysql://db/shop", "a file, :memory: or postgresql://"),
        ("/no/such/folder/shop.db", "/no/such/folder/shop.db"),
    ],
)
def test_a_database_that_cannot_be_is_named(
    server_process: ServerProcess, address: str, said: str
) -> None:
    app = app_with(address, "nowhere", "tea")
    with (
        fencepost.connect(server_process.url) as client,
        pytest.raises((InvalidArgumentError, sqlite3.OperationalError), match=said),
        app.open(client, projections=address) as shop,
    ):
        shop.projections.statuses()


def test_building_another_version_anew_leaves_the_live_one_to_its_readers(
    server_process: ServerProcess, database: str, names: tuple[str, str], tmp_path: Path
) -> None:
    database = str(tmp_path / "shared.db") if database == ":memory:" else database
    app, sku = names
    second = app_with(database, app, sku, version=2, times=10)
    with (
        fencepost.connect(server_process.url) as client,
        app_with(database, app, sku).open(client, projections=database) as old,
        second.open(client, projections=database) as new,
    ):
        old.do(Order.place, f"{app}-0", sku=sku, quantity=2)
        old.settle()
        run = new.projections._run("listed")
        run.store.prepare(run.projection)
        run.store.reset(run.projection, -1)

        assert rows(old) == [(f"orders/{app}-0", 2)]


def test_a_projection_can_be_built_anew_in_place(
    server_process: ServerProcess, database: str, names: tuple[str, str]
) -> None:
    app, sku = names
    with (
        fencepost.connect(server_process.url) as client,
        app_with(database, app, sku).open(client, projections=database) as shop,
    ):
        shop.do(Order.place, f"{app}-0", sku=sku, quantity=2)
        shop.settle()
        shop.projections.rebuild("listed", after=-1)
        anew = rows(shop)
        shop.projections.rebuild("listed", after=client.log_head() - 1)

        assert anew == fold(client, sku)
        assert len(rows(shop)) == 2 * len(anew)  # the last event was applied again


def test_an_event_that_fails_blocks_the_projection_and_keeps_what_came_before(
    server_process: ServerProcess, database: str, names: tuple[str, str]
) -> None:
    app, sku = names
    failing = app_with(database, app, sku, fail="-poison")
    with fencepost.connect(server_process.url) as client:
        with failing.open(client, projections=database) as shop:
            for number in ("a", "poison", "b"):
                shop.do(Order.place, f"{app}-{number}", sku=sku, quantity=1)
            shop.settle()

            assert rows(shop) == [(f"orders/{app}-a", 1)]
        (row,) = client.group(f"{app}.listed.v1").streams(state="blocked")
        assert "poison" in (row.error or "")


def test_a_projection_that_fails_says_so_in_the_log(
    server_process: ServerProcess,
    database: str,
    names: tuple[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    app, sku = names
    with (
        fencepost.connect(server_process.url) as client,
        app_with(database, app, sku, fail="-0").open(client, projections=database) as shop,
        caplog.at_level("WARNING", logger="fencepost.events"),
    ):
        done = shop.do(Order.place, f"{app}-0", sku=sku, quantity=1)
        shop.settle()

    assert [record.getMessage() for record in caplog.records] == [
        f"the projection {app}.listed.v1 failed at position {done.events[0].position}, it is "
        "blocked: NonRetryableError: poison"
    ]


def test_a_failure_behind_another_event_has_retries_of_its_own(
    server_process: ServerProcess, names: tuple[str, str]
) -> None:
    app, sku = names
    shop = App(app, entities=[Order, Stock])
    failures: list[int] = []

    @shop.projection(
        "listed",
        schema="create table {listed} (stream text, quantity integer)",
        retry=Retry(1, base_ms=0),
    )
    def listed(event: Recorded[Placed], db: Transaction) -> None:
        if event.data.sku != sku:
            return
        if event.data.quantity not in failures:
            failures.append(event.data.quantity)
            raise RuntimeError("each event fails once")
        db.execute("insert into {listed} values (?, ?)", (event.stream, event.data.quantity))

    with (
        fencepost.connect(server_process.url) as client,
        shop.open(client, projections=":memory:") as opened,
    ):
        for number in range(3):
            opened.do(Order.place, f"{app}-{number}", sku=sku, quantity=number)
        opened.settle()

        assert rows(opened) == fold(client, sku)
        assert failures == [0, 1, 2]
        assert not list(client.group(f"{app}.listed.v1").streams(state="blocked"))


def test_a_worker_whose_projection_was_taken_changes_nothing(
    server_process: ServerProcess, database: str, names: tuple[str, str]
) -> None:
    app, sku = names
    shop = app_with(database, app, sku)
    store = store_at(database)
    projection = shop.projections["listed"]
    store.prepare(projection)
    zombie = store.take(projection)
    current = store.take(projection)
    event: Any = Recorded(
        data=Placed(sku=sku, quantity=1),
        name="Placed",
        stream="orders/1",
        version=0,
        position=7,
        timestamp_ms=0,
    )
    call = projection.handlers[0].function

    refused = store.apply(projection, zombie, [event], 7, call)
    applied = store.apply(projection, current, [event], 7, call)
    again = store.apply(projection, current, [event], 7, call)

    assert refused is None
    assert applied is not None
    assert again is None  # the checkpoint has moved on
    assert len(store.read("select * from listed")) == 1
    assert not store.switch(projection, zombie)
    store.close()


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("place"), st.integers(1, 9)),
            st.tuples(st.sampled_from(["settle", "reopen", "rebuild", "take"]), st.just(0)),
        ),
        max_size=12,
    )
)
def test_a_projection_equals_a_fold_of_the_log_after_any_steps(
    server_process: ServerProcess, tmp_path: Path, steps: list[tuple[str, int]]
) -> None:
    """Placing, settling, opening again, building anew and losing the fence, in any order."""
    number = next(_numbers)
    app, sku = f"any{number}", f"any{number}"
    database = str(tmp_path / f"{number}.db")
    with fencepost.connect(server_process.url) as client:
        shop = app_with(database, app, sku).open(client, projections=database)
        for step, quantity in steps:
            match step:
                case "place":
                    shop.do(Order.place, f"{app}-{quantity}", sku=sku, quantity=quantity)
                case "settle":
                    shop.settle()
                case "rebuild":
                    shop.projections.rebuild("listed", after=-1)
                case "take":
                    run = shop.projections._run("listed")
                    run.store.prepare(run.projection)
                    run.store.take(run.projection)
                case _:
                    shop.close()
                    shop = app_with(database, app, sku).open(client, projections=database)
        shop.settle()

        assert rows(shop) == fold(client, sku)
        shop.close()


def ignore(event: Any, db: Transaction) -> None:
    """A handler that does not say which events it is for."""


def test_declarations_that_cannot_work_are_refused() -> None:
    shop = App("refused", entities=[Order])

    with pytest.raises(InvalidArgumentError, match="Bad Name"):
        shop.projection("Bad Name")(ignore)
    with pytest.raises(DefinitionError, match="Recorded"):
        shop.projection("untyped")(ignore)
    shop.projection("listed", events=[Placed])(ignore)
    with pytest.raises(DefinitionError, match="two versions"):
        shop.projection("listed", version=2, events=[Placed])(ignore)


@pytest.mark.parametrize("statement", ["commit", " ROLLBACK", "begin", "end transaction"])
def test_a_handler_cannot_leave_the_transaction_of_its_checkpoint(
    server_process: ServerProcess, database: str, names: tuple[str, str], statement: str
) -> None:
    name, sku = names
    shop = App(name, entities=[Order, Stock])

    @shop.projection(
        "listed", schema="create table {listed} (stream text, quantity integer)", retry=Retry(0)
    )
    def listed(event: Recorded[Placed], db: Transaction) -> None:
        if event.data.sku == sku:
            db.execute("insert into {listed} values ('x', 1)")
            db.execute("savepoint here")
            db.execute("rollback to here")
            db.execute(statement)

    with (
        fencepost.connect(server_process.url) as client,
        shop.open(client, projections=database) as opened,
    ):
        opened.do(Order.place, f"{sku}-1", sku=sku, quantity=1)

        opened.settle()

        assert rows(opened) == []
        [blocked] = client.group(f"{name}.listed.v1").streams(state="blocked")
        assert "not the handler's to begin or end" in str(blocked.error)


def test_many_workers_of_an_app_may_start_at_the_same_moment(
    server_process: ServerProcess, database: str, names: tuple[str, str]
) -> None:
    """Each makes the tables if they are not there, and shows the first version."""
    count = 1 if database == ":memory:" else 8
    shop = app_with(database, *names)
    meeting = threading.Barrier(count)

    def start(_number: int) -> None:
        with (
            fencepost.connect(server_process.url) as client,
            shop.open(client, projections=database) as opened,
        ):
            meeting.wait()
            opened.projections.store.prepare(shop.projections["listed"])
            assert len(opened.projections.statuses()) == 1

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(start, range(count)))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_worker_waits_for_a_database_that_cannot_be_used_and_says_so(
    server_process: ServerProcess,
    names: tuple[str, str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    is_async: bool,
) -> None:
    """The folder of the database is not there yet when the worker starts."""
    name, sku = names
    folder = tmp_path / "later"
    database = str(folder / "shop.db")
    shop = app_with(database, name, sku)
    stopping = threading.Event()

    def work() -> None:
        if is_async:
            asyncio.run(work_async())
            return
        with (
            fencepost.connect(server_process.url) as client,
            shop.open(client, projections=database) as opened,
        ):
            opened.work(stopping=stopping)

    async def work_async() -> None:
        async with (
            fencepost.connect_async(server_process.url) as client,
            shop.open(client, projections=database) as opened,
        ):
            stop = asyncio.Event()
            working = asyncio.create_task(opened.work(stopping=stop))
            await asyncio.to_thread(stopping.wait)
            stop.set()
            await working

    worker = threading.Thread(target=work)
    worker.start()
    try:
        wait_until(lambda: "the projection listed has stopped and starts again" in caplog.text)
        folder.mkdir()
        with (
            fencepost.connect(server_process.url) as client,
            shop.open(client, projections=database) as opened,
        ):
            opened.do(Order.place, f"{sku}-1", sku=sku, quantity=3)
            wait_until(lambda: opened.projections.statuses() != [])
            wait_until(lambda: rows(opened) == [(f"orders/{sku}-1", 3)])
    finally:
        stopping.set()
        worker.join()
