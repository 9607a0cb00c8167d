"""SIGKILL and cut connections under sends: each message is in every inbox and queue once.

Eight clients send through a proxy that cuts requests and answers, while the server is killed as
soon as so many sends were answered. FENCEPOST_FAULT_SENDS=50000 FENCEPOST_FAULT_KILLS=50 make it
the long run, which `just faults` has as a soak. FENCEPOST_FAULT_SEED repeats a run.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import fencepost
from tests.engines import empty_store, engine, server_at
from tests.faults.proxy import CALM, Proxy, Trouble
from tests.serving import ServerProcess

__all__ = ["empty_store", "engine"]

CLIENTS = 8
MESH = "shop"
MEMBERS = ("ann", "ben")
DESTINATIONS = ("topic:alerts", "dm:ann", "queue:jobs")
RETRIES = fencepost.Retries(attempts_max=1_000, seconds_max=180, delay_seconds_max=0.2)
TROUBLE = Trouble(cut_requests=0.1, cut_answers=0.2, within_bytes=30_000, refuse=0.05)


class Unfenced(ServerProcess):
    """A server that writes a dedupe row in the transaction after the one of its message."""

    def _command(self) -> list[str]:
        command = super()._command()
        return ["tests.faults.unfenced_sends" if part == "fencepost" else part for part in command]


class Run:
    """So many sends under so many kills."""

    def __init__(self, server: ServerProcess, *, sends: int, kills: int) -> None:
        self.seed = int(os.environ.get("FENCEPOST_FAULT_SEED", random.randrange(1_000_000)))
        self.server = server
        self.sends = int(os.environ.get("FENCEPOST_FAULT_SENDS", sends))
        self.kills = int(os.environ.get("FENCEPOST_FAULT_KILLS", kills))
        self._answered = threading.Semaphore(0)

    def run(self, trouble: Trouble = TROUBLE) -> None:
        """Send everything; each send is answered as stored, once it is."""
        with fencepost.connect(self.server.url) as client:
            mesh = client.mesh(MESH)
            mesh.make()
            for member in MEMBERS:
                mesh.make_member(member)
            mesh.make_topic("alerts", MEMBERS)
            mesh.make_queue("jobs")
        try:
            asyncio.run(self._through_a_proxy(trouble))
        except BaseException as error:
            error.add_note(self.replay())
            raise

    def replay(self) -> str:
        return (
            f"FENCEPOST_FAULT_SEED={self.seed} FENCEPOST_FAULT_SENDS={self.sends}"
            f" FENCEPOST_FAULT_KILLS={self.kills} pytest {__file__}"
        )

    async def _through_a_proxy(self, trouble: Trouble) -> None:
        async with Proxy("127.0.0.1", self.server.port, trouble, seed=self.seed) as proxy:
            await asyncio.to_thread(self._storm, proxy.url)

    def _storm(self, url: str) -> None:
        dice = random.Random(self.seed)
        marks = sorted(dice.sample(range(1, self.sends), self.kills))
        with ThreadPoolExecutor(CLIENTS) as pool:
            sending = [pool.submit(self._send, url, number) for number in range(CLIENTS)]
            seen = 0
            for mark in marks:
                while seen < mark:
                    # A client that failed answers no more: then its error is what counts.
                    if not self._answered.acquire(timeout=1):
                        assert not any(one.done() and one.exception() for one in sending)
                        continue
                    seen += 1
                self.server.kill()
                self.server.restart()
            for one in sending:
                one.result()

    def _send(self, url: str, client_number: int) -> None:
        with fencepost.connect(url, retries=RETRIES) as client:
            mesh = client.mesh(MESH)
            for number in range(client_number, self.sends, CLIENTS):
                to = DESTINATIONS[number // CLIENTS % len(DESTINATIONS)]
                mesh.send(to, number, id=f"n-{number}", sender=f"client-{client_number}")
                self._answered.release()

    def found(self) -> dict[str, Counter[int]]:
        """How often each number is where."""
        places = {"queue": f"__mesh/{MESH}/queue/jobs", "topic": f"__mesh/{MESH}/topic/alerts"}
        places |= {member: f"__mesh/{MESH}/inbox/{member}" for member in MEMBERS}
        with fencepost.connect(self.server.url) as client:
            return {
                name: Counter(one["json"] for one in client.stream(path).read().messages())
                for name, path in places.items()
            }

    def expected(self) -> dict[str, Counter[int]]:
        to: dict[str, list[int]] = {name: [] for name in DESTINATIONS}
        for number in range(self.sends):
            to[DESTINATIONS[number // CLIENTS % len(DESTINATIONS)]].append(number)
        return {
            "queue": Counter(to["queue:jobs"]),
            "topic": Counter(to["topic:alerts"]),
            "ann": Counter(to["topic:alerts"] + to["dm:ann"]),
            "ben": Counter(to["topic:alerts"]),
        }

    def check(self) -> None:
        """Everything once, and dedupe rows and messages belong together."""
        found = self.found()
        for name, expected in self.expected().items():
            difference = found[name] - expected, expected - found[name]
            assert difference == (Counter(), Counter()), f"{name}: {self.replay()}"
        with fencepost.connect(self.server.url) as client:
            assert client.mesh(MESH).check().findings == [], self.replay()


@pytest.fixture
def server(empty_store: Path | str) -> Iterator[ServerProcess]:
    with server_at(empty_store) as server:
        yield server


def test_each_send_is_stored_once_through_kills_and_cut_connections(server: ServerProcess) -> None:
    run = Run(server, sends=400, kills=4)
    run.run()

    run.check()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_fifty_thousand_sends_are_stored_once_through_fifty_kills(server: ServerProcess) -> None:
    run = Run(server, sends=50_000, kills=50)
    run.run()

    run.check()


def test_with_the_dedupe_row_in_another_transaction_sends_would_be_stored_twice(
    empty_store: Path | str,
) -> None:
    """Not about the server: this shows that the test above fails without the fence."""
    at = server_at(empty_store)
    with Unfenced(at.data, store=at.store) as unfenced:
        run = Run(unfenced, sends=400, kills=4)
        run.run(CALM)

        with pytest.raises(AssertionError):
            run.check()
