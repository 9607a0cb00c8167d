"""The daemon's way to the server: its session, plain HTTP where that does not pass, and back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gatekeeper import Gatekeeper
from tests.integration.mesh_support import Shop
from tests.outboxing import OutboxProcess, until
from tests.serving import ServerProcess

_names = itertools.count()


@pytest.fixture(scope="module")
def http(server_process: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server_process.url, timeout=30) as client:
        yield client


def a_shop(http: httpx.Client, **settings: Any) -> Shop:
    return Shop(http, f"ways-{next(_names)}", **settings)


def link_of(outbox: OutboxProcess) -> dict[str, Any]:
    [link] = outbox.get("/v1/health")["meshes"]
    return link  # type: ignore[no-any-return]


def goes(outbox: OutboxProcess, via: str) -> None:
    """Wait until the mesh is reached that way."""

    def look() -> bool:
        link = link_of(outbox)
        return (link["state"], link["via"]) == ("connected", via)

    until(look)


def came_in(outbox: OutboxProcess) -> list[str]:
    return [entry["client_message_id"] for entry in outbox.inbox()]


def has_all(outbox: OutboxProcess, count: int) -> bool:
    return len(came_in(outbox)) == count


def test_sends_and_deliveries_go_through_one_session(
    server_process: ServerProcess, http: httpx.Client, tmp_path: Path
) -> None:
    shop = a_shop(http)
    with (
        Gatekeeper(server_process.port) as gate,
        OutboxProcess(tmp_path / "outbox", gate.url, [shop.name], "ann") as outbox,
    ):
        goes(outbox, "session")
        for number in range(20):
            assert outbox.send(f"m-{number}").status_code == 202
        outbox.send("nowhere", ref="nowhere")

        until(lambda: outbox.counts() == {"done": 20, "dead": 1})
        until(lambda: len(came_in(outbox)) == 20)
        assert "destination_not_found" in outbox.row("nowhere")["last_error"]
        metrics = outbox.http.get("/v1/metrics").text
        assert f'fencepost_outbox_session{{mesh="{shop.name}"}} 1.0' in metrics
        assert gate.upgrades == 1

        assert gate.cut() > 0
        outbox.send("after")
        until(lambda: "after" in came_in(outbox))
        goes(outbox, "session")
        link = link_of(outbox)
    assert (gate.upgrades, link["reconnects"]) == (2, 1)
    ids = [message["client_message_id"] for message in shop.held("inbox/bea")]
    assert sorted(ids) == sorted({*ids}) == sorted([*(f"m-{n}" for n in range(20)), "after"])


def test_a_daemon_without_a_member_has_a_session_for_its_sends(
    server_process: ServerProcess, http: httpx.Client, tmp_path: Path
) -> None:
    shop = a_shop(http)
    with OutboxProcess(tmp_path / "outbox", server_process.url, [shop.name]) as outbox:
        goes(outbox, "session")
        outbox.send("m-1")

        assert outbox.settled("m-1")["status"] == "done"


def test_where_sessions_do_not_pass_plain_http_does_all_of_it(
    server_process: ServerProcess, http: httpx.Client, tmp_path: Path
) -> None:
    shop = a_shop(http)
    with (
        Gatekeeper(server_process.port, "refuse") as gate,
        OutboxProcess(tmp_path / "outbox", gate.url, [shop.name], "ann") as outbox,
    ):
        outbox.send("m-1")

        until(lambda: came_in(outbox) == ["m-1"])
        goes(outbox, "http")
        assert gate.upgrades == 1


def test_a_session_is_tried_again_when_it_may_pass_now(
    server_process: ServerProcess, http: httpx.Client, tmp_path: Path
) -> None:
    shop = a_shop(http)
    with (
        Gatekeeper(server_process.port, "cut") as gate,
        OutboxProcess(tmp_path / "outbox", gate.url, [shop.name], "ann") as outbox,
    ):
        outbox.send("m-1")
        until(lambda: came_in(outbox) == ["m-1"])
        gate.treatment = "pass"

        goes(outbox, "session")
        outbox.send("m-2")
        until(lambda: came_in(outbox) == ["m-1", "m-2"])
        assert outbox.is_running


@pytest.mark.parametrize("treatment", ["pass", "refuse"])
def test_daemons_of_a_shared_inbox_each_get_everything_once_and_go_on_where_they_were(
    server_process: ServerProcess, http: httpx.Client, tmp_path: Path, treatment: Any
) -> None:
    """`allow_concurrent`: there is no lease, each daemon keeps a place of its own."""
    shop = a_shop(http, default_policy="allow_concurrent")
    with Gatekeeper(server_process.port, treatment) as gate:
        one, two = (
            OutboxProcess(tmp_path / name, gate.url, [shop.name], "ann") for name in ("one", "two")
        )
        with one, two:
            for number in range(3):
                shop.send(f"m-{number}")
            for outbox in (one, two):
                until(partial(has_all, outbox, 3))
            two.stop()
            shop.send("m-3")
            two.start()

            for outbox in (one, two):
                until(partial(has_all, outbox, 4))
            text = two.http.get("/v1/metrics").text
            assert "fencepost_outbox_inbox_stored_total 1.0" in text
            assert "fencepost_outbox_inbox_duplicates_total 0.0" in text


@pytest.mark.parametrize("treatment", ["pass", "refuse"])
@pytest.mark.parametrize(
    ("policy", "loser", "code"), [("prefer_newest", 0, 13), ("prefer_oldest", 1, 14)]
)
def test_one_of_two_daemons_loses_the_inbox(
    server_process: ServerProcess,
    http: httpx.Client,
    tmp_path: Path,
    policy: str,
    loser: int,
    code: int,
    treatment: Any,
) -> None:
    shop = a_shop(http, default_policy=policy)
    with Gatekeeper(server_process.port, treatment) as gate:
        daemons = [
            OutboxProcess(tmp_path / name, gate.url, [shop.name], "ann") for name in ("a", "b")
        ]
        daemons[0].start()
        shop.send("m-0")
        until(lambda: came_in(daemons[0]) == ["m-0"])  # now it has the lease
        daemons[1].start()

        assert daemons[loser].wait() == code

        shop.send("m-1")
        winner = daemons[1 - loser]
        until(lambda: came_in(winner)[-1:] == ["m-1"])
        assert winner.stop() == 0
        for daemon in daemons:
            daemon.http.close()
    left = (tmp_path / "ab"[loser] / "last_exit.json").read_text()
    assert {13: "4003", 14: "4004"}[code] in left


def test_the_same_daemon_gets_its_inbox_back_from_a_connection_that_hangs(
    server_process: ServerProcess, http: httpx.Client, tmp_path: Path
) -> None:
    """A daemon that was killed is the same worker again: `prefer_oldest` does not keep it out."""
    shop = a_shop(http, default_policy="prefer_oldest")
    outbox = OutboxProcess(tmp_path / "outbox", server_process.url, [shop.name], "ann")
    outbox.start()
    goes(outbox, "session")
    outbox.kill()
    shop.send("m-1")
    outbox.start()

    until(lambda: came_in(outbox) == ["m-1"])
    outbox.stop()
    outbox.http.close()
