"""Sessions through both clients: pipelining, acks, reconnects, replaced sessions, cut connections.

The servers are real processes; connections are cut by the proxy of the fault tests.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import fencepost
from fencepost.client.aio.sessions import AsyncMeshSession
from tests.engines import POSTGRES, SQLITE, emptied, server_at
from tests.faults.proxy import Proxy, Trouble
from tests.serving import ServerProcess

RETRIES = fencepost.Retries(delay_seconds_min=0.01, delay_seconds_max=0.1)
SECONDS_MAX = 60.0
KILLS = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    few = {"FENCEPOST_SESSIONS_ENTRIES_MAX": "10"}
    with server_at(tmp_path_factory.mktemp("sessions"), environment=few) as server:
        yield server


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[fencepost.AsyncClient]:
    async with fencepost.connect_async(server.url, retries=RETRIES) as client:
        yield client


async def made(client: fencepost.AsyncClient, name: str, policy: str = "prefer_newest") -> None:
    mesh = client.mesh(name)
    await mesh.make(default_policy=policy)
    await mesh.make_member("ann")
    await mesh.make_topic("news", ["ann"])


async def taken(session: AsyncMeshSession, wanted: set[str]) -> list[str]:
    """The ids that come until all that are wanted have come; each delivery is acknowledged.

    An ack whose answer is lost may be stored, so it is not waited for that all are.
    """
    came: list[str] = []
    async with asyncio.timeout(SECONDS_MAX):
        async for delivery in session:
            came += [entry.data["client_message_id"] for entry in delivery.entries]
            await delivery.ack()
            if wanted <= set(came):
                break
    return came


async def test_sends_are_pipelined_and_deliveries_acknowledged(
    client: fencepost.AsyncClient, path: str
) -> None:
    await made(client, path)
    async with client.mesh(path).session("ann") as session:
        sends = [
            await session.send("topic:news", f"n {n}", id=f"m-{n}", sender="bob")
            for n in range(500)
        ]
        receipts = [await pending.receipt() for pending in sends]
        again = await (await session.send("topic:news", "n 0", id="m-0", sender="bob")).receipt()
        with pytest.raises(fencepost.KeyReusedError):
            await (await session.send("topic:news", "other", id="m-0", sender="bob")).receipt()
        other = await session.send("topic:none", "x", sender="bob")
        assert (await other.outcome()).status == 404
        came = await taken(session, {f"m-{n}" for n in range(500)})

    assert not any(receipt.duplicate for receipt in receipts)
    assert again.duplicate
    assert came == [f"m-{n}" for n in range(500)]
    assert session.supported["client_message_id_dedupe"]["version"] == 2
    assert session.reconnects == 0


async def test_what_was_not_acknowledged_comes_again(
    client: fencepost.AsyncClient, path: str
) -> None:
    await made(client, path)
    for number in range(3):
        await client.mesh(path).send("topic:news", "x", id=f"m-{number}", sender="bob")
    async with client.mesh(path).session("ann") as session:
        first = await anext(session)
        await first.ack(first.entries[0].position)
    async with client.mesh(path).session("ann") as session:
        rest = await taken(session, {"m-1", "m-2"})

    assert len(first.entries) == 3
    assert rest == ["m-1", "m-2"]
    assert not await first.ack(), "an ack of a session that is over stores nothing"


async def test_a_replaced_session_and_a_refused_one_say_so(
    client: fencepost.AsyncClient, path: str
) -> None:
    await made(client, path)
    await made(client, f"{path}-old", "prefer_oldest")
    async with client.mesh(path).session("ann") as old, client.mesh(path).session("ann"):
        with pytest.raises(fencepost.SessionReplacedError) as replaced:
            await anext(old)
        with pytest.raises(fencepost.SessionReplacedError):
            await old.send("topic:news", "x", sender="bob")
    async with client.mesh(f"{path}-old").session("ann"):
        with pytest.raises(fencepost.MemberConnectedError) as refused:
            await client.mesh(f"{path}-old").session("ann").open()

    assert replaced.value.close_code == 4003
    assert (refused.value.close_code, refused.value.kind) == (4004, "member_already_connected")


@pytest.mark.parametrize(
    ("require", "error", "code"),
    [
        ({"key_epoch": {"version": 1}}, fencepost.FeatureUnavailableError, 4010),
        ({"max_payload": {"version": 9}}, fencepost.FeatureInvalidError, 4011),
        (
            {"max_payload": {"version": 1, "inline_bytes": 1 << 40}},
            fencepost.FeatureBelowFloorError,
            4012,
        ),
    ],
)
async def test_a_requirement_that_is_not_met_is_an_error_of_its_own(
    client: fencepost.AsyncClient,
    path: str,
    require: dict[str, object],
    error: type[fencepost.SessionClosedError],
    code: int,
) -> None:
    name = f"features-{code}"
    await made(client, name)

    with pytest.raises(error) as refused:
        await client.mesh(name).session("ann", require=require).open()

    assert refused.value.close_code == code
    assert refused.value.feature == next(iter(require))


async def test_a_session_that_cannot_begin_says_why(client: fencepost.AsyncClient) -> None:
    with pytest.raises(fencepost.MeshNotFoundError):
        await client.mesh("none").session().open()
    await made(client, "no-member")
    with pytest.raises(fencepost.SessionClosedError) as missing:
        await client.mesh("no-member").session("nemo").open()
    assert missing.value.kind == "member_not_found"


async def test_the_end_of_a_session_settles_what_is_open(
    client: fencepost.AsyncClient, path: str
) -> None:
    await made(client, path)
    session = await client.mesh(path).session("ann").open()
    reading = asyncio.ensure_future(taken(session, {"never"}))
    await asyncio.sleep(0)

    await session.close()

    assert await reading == []
    with pytest.raises(fencepost.ClientClosedError):
        await session.send("topic:news", "x", sender="bob")


async def test_the_end_of_the_client_ends_its_sessions(server: ServerProcess, path: str) -> None:
    async with fencepost.connect_async(server.url) as client:
        await made(client, path)
        session = await client.mesh(path).session("ann").open()
    async with asyncio.timeout(SECONDS_MAX):
        assert [delivery async for delivery in session] == []
    await session.close()


@pytest.mark.parametrize("seed", [1, 2])
async def test_cut_connections_lose_and_double_nothing(
    server: ServerProcess, path: str, seed: int
) -> None:
    """Whatever the proxy cuts, in either direction: each send has one receipt, each entry comes."""
    trouble = Trouble(cut_requests=1.0, cut_answers=1.0, within_bytes=120_000)
    name = f"cut-{seed}-{asyncio.get_running_loop().__class__.__module__.partition('.')[0]}"
    async with (
        fencepost.connect_async(server.url) as direct,
        Proxy("127.0.0.1", server.port, trouble, seed=seed) as proxy,
        fencepost.connect_async(proxy.url, retries=RETRIES) as client,
    ):
        await made(direct, name)
        wanted = {f"m-{n}" for n in range(600)}
        async with client.mesh(name).session("ann", in_flight_max=50) as session:
            reading = asyncio.ensure_future(taken(session, wanted))
            sends = [
                await session.send("topic:news", "x" * 100, id=f"m-{n}", sender="bob")
                for n in range(600)
            ]
            receipts = [await pending.receipt() for pending in sends]
            came = await reading
        held = [
            entry["client_message_id"]
            async for entry in direct.stream(f"__mesh/{name}/topic/news").read()
        ]

    assert session.reconnects > 3, f"seed {seed} cut next to nothing"
    assert [receipt.client_message_id for receipt in receipts] == [f"m-{n}" for n in range(600)]
    assert sorted(held) == sorted(wanted), "each message is stored once"
    assert set(came) == wanted


@pytest.mark.parametrize("store", [SQLITE, POSTGRES])
async def test_a_server_that_is_killed_again_and_again_is_survived(
    tmp_path: Path, store: str
) -> None:
    with emptied(store, tmp_path) as place, server_at(place) as server:
        async with fencepost.connect_async(server.url, retries=RETRIES) as client:
            await made(client, "kept", "prefer_oldest")
            sends = []
            async with client.mesh("kept").session("ann") as session:
                for kill in range(KILLS):
                    # It is connected again once this one is answered, and so each kill hits it.
                    first = await session.send("topic:news", "x", id=f"a-{kill}", sender="bob")
                    await first.receipt()
                    sends += [
                        await session.send("topic:news", "x", id=f"m-{kill}-{n}", sender="bob")
                        for n in range(100)
                    ]
                    server.kill()
                    late = await session.send("topic:news", "x", id=f"z-{kill}", sender="bob")
                    sends += [first, late]
                    server.restart()
                receipts = [await pending.receipt() for pending in sends]
                came = await taken(session, {receipt.client_message_id for receipt in receipts})
                reconnects = session.reconnects
            report = await client.mesh("kept").check()

    assert len({receipt.history_id for receipt in receipts}) == 102 * KILLS
    assert len(set(came)) == 102 * KILLS
    assert reconnects >= KILLS
    assert report.findings == []


def test_the_sync_session_does_the_same(server: ServerProcess, path: str) -> None:
    with fencepost.connect(server.url, retries=RETRIES) as client:
        mesh = client.mesh(path)
        mesh.make()
        mesh.make_member("ann")
        mesh.make_topic("news", ["ann"])
        with mesh.session("ann", in_flight_max=20) as session:
            sends = [session.send("topic:news", "x", id=f"m-{n}", sender="bob") for n in range(100)]
            assert [pending.receipt().duplicate for pending in sends] == [False] * 100
            came: list[str] = []
            for delivery in session:
                came += [entry.data["client_message_id"] for entry in delivery.entries]
                assert delivery.ack()
                if len(came) == 100:
                    break
            with mesh.session("ann"), pytest.raises(fencepost.SessionReplacedError):
                next(session)

    assert came == [f"m-{n}" for n in range(100)]


def test_threads_share_a_session(server: ServerProcess, path: str) -> None:
    with fencepost.connect(server.url, retries=RETRIES) as client:
        mesh = client.mesh(path)
        mesh.make()
        mesh.make_queue("jobs")
        stored: list[str] = []
        with mesh.session(in_flight_max=8) as session:

            def send(name: str) -> None:
                sends = [
                    session.send("queue:jobs", "x", id=f"{name}-{n}", sender="bob")
                    for n in range(50)
                ]
                stored.extend(pending.receipt().history_id for pending in sends)

            threads = [threading.Thread(target=send, args=(f"t{n}",)) for n in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(SECONDS_MAX)

    assert len(set(stored)) == 300
