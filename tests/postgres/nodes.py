"""Real servers on one PostgreSQL, and a look past them into the database: who leads?"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import httpx
import psycopg

from tests.serving import ServerProcess

WAIT_SECONDS_MAX = 60.0
LOOK_SECONDS = 0.02


class Node(ServerProcess):
    """One server of several on a database."""

    def __init__(self, dsn: str, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(store=dsn, arguments=["--long-poll-ms", "500"], environment=environment)
        self._is_frozen = False

    def freeze(self) -> None:
        """Stop the process where it stands; its connections stay."""
        os.kill(self.pid, signal.SIGSTOP)
        self._is_frozen = True

    def thaw(self) -> None:
        """Let it go on as if nothing had happened."""
        os.kill(self.pid, signal.SIGCONT)
        self._is_frozen = False

    def _end(self, how: signal.Signals | None) -> int:
        if self._is_frozen:
            self.thaw()
        return super()._end(how)


@contextmanager
def nodes(
    dsn: str, count: int, environment: Mapping[str, str] | None = None
) -> Iterator[list[Node]]:
    """So many servers, the first of which leads."""
    with ExitStack() as stack:
        started = [stack.enter_context(Node(dsn, environment)) for _ in range(count)]
        assert leader_url(dsn) == started[0].url
        yield started


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for a condition, and say which one when it does not come."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, f"waited too long until {what}"
        pause.wait(LOOK_SECONDS)


def rows(dsn: str, query: str) -> list[tuple[object, ...]]:
    """What the database says, without any server."""
    with psycopg.connect(dsn) as connection:
        return connection.execute(query.encode()).fetchall()


def leader_url(dsn: str) -> object:
    """Where the node is that leads, or None."""
    found = rows(dsn, "SELECT url FROM nodes JOIN counters ON leader = node")
    return found[0][0] if found else None


def again(ask: Callable[[], httpx.Response]) -> httpx.Response:
    """Ask until the answer is not that nobody leads, as clients do."""
    answers: list[httpx.Response] = []

    def answered() -> bool:
        answers.append(ask())
        return answers[-1].status_code != 503

    until(answered, "somebody leads")
    return answers[-1]
