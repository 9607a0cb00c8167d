"""Leaders that die, hang and come back while streams are made and written to: nothing is missed."""

import random
import threading
from collections.abc import Sequence

import httpx
import pytest

from tests.integration.subscriptions_support import DONE, JSON, Client, Receiver, tails
from tests.postgres.nodes import Node, again, leader_url, nodes, rows, until

ROUNDS = 6
SEED = 5
QUICK = {
    "FENCEPOST_STORE_LEADER_SILENCE_MS": "1000",
    "FENCEPOST_STORE_POLL_INTERVAL_MS": "100",
    "FENCEPOST_STORE_TURN_IDLE_MS": "2000",
}


class Writer:
    """Makes streams and appends to them through any node that answers, until it is told to stop."""

    def __init__(self, number: int, cluster: Sequence[Node]) -> None:
        self._dice = random.Random(SEED + number)
        self._urls = [node.url for node in cluster]
        self._number = number
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self._made = 0
        self.written: set[str] = set()
        """The streams that an append was answered for."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _write(self) -> None:
        with httpx.Client(timeout=5, headers=JSON) as http:
            while not self._stop.is_set():
                path = f"events/{self._number}-{self._made}"
                self._made += 1
                self._send(http, "PUT", path, "[]")
                for value in range(self._dice.randrange(1, 4)):
                    self._send(http, "POST", path, str(value))

    def _send(self, http: httpx.Client, method: str, path: str, body: str) -> None:
        """Send until it is answered: what is sent twice is only there twice."""
        while not self._stop.is_set():
            url = f"{self._dice.choice(self._urls)}/v1/stream/{path}"
            try:
                answer = http.request(method, url, content=body)
            except httpx.HTTPError:
                continue
            if answer.status_code < 300:
                if method == "POST":
                    self.written.add(path)
                return
            assert answer.status_code == 503, answer.text


@pytest.mark.timeout(600)
def test_leaders_that_die_and_hang_in_turn_miss_no_stream_and_lose_no_cursor(
    postgres_dsn: str,
) -> None:
    dice = random.Random(SEED)
    seen: set[str] = set()
    with nodes(postgres_dsn, 3, QUICK) as cluster, Receiver(DONE) as receiver:
        with Client(cluster[0].url) as client:
            client.webhook("hook", receiver.url)
        writers = [Writer(number, cluster) for number in range(3)]
        for writer in writers:
            writer.start()
        try:
            for _ in range(ROUNDS):
                [leader] = [node for node in cluster if node.url == leader_url(postgres_dsn)]
                _depose(postgres_dsn, leader, kill=dice.random() < 0.5)
        finally:
            for writer in writers:
                writer.stop()
        written = {path for writer in writers for path in writer.written}

        while not written <= seen:
            seen |= tails(receiver.next().wake).keys()
        with Client(cluster[0].url) as client:
            until(
                lambda: (
                    again(lambda: client.http.get("__ds/subscriptions/hook")).json()[
                        "pending_streams"
                    ]
                    == 0
                ),
                "all work is done",
            )

    assert len(written) > ROUNDS
    links = rows(
        postgres_dsn,
        "SELECT l.path, s.tail_bytes - l.acked_bytes"
        " FROM links l JOIN streams s ON s.id = l.stream",
    )
    assert {path for path, _ in links} >= written
    assert {left for _, left in links} == {0}


def _depose(dsn: str, leader: Node, *, kill: bool) -> None:
    """End the leader's time, wait until another leads, and let it come back."""
    if kill:
        leader.kill()
    else:
        leader.freeze()
    until(lambda: leader_url(dsn) not in (None, leader.url), "another node leads")
    if kill:
        leader.restart()
    else:
        leader.thaw()
