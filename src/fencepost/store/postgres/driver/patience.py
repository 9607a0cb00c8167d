"""Connections that do not wait for ever: a database that says nothing for too long is away.

The server bounds its own work by timeouts, and the kernel notices a peer that is gone. Neither is
of use against a server that is stopped, or whose disk hangs, while its machine acknowledges. So
silence is counted here, in the intervals at which psycopg looks up from waiting, and after so many
the connection is given up. It is closed, because an answer may still be on its way: whoever was in
COMMIT then knows that they do not know.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

import psycopg

from fencepost.store.database import Row

T = TypeVar("T")

INTERVAL_S = 0.1
"""How often psycopg looks up."""


class SilentError(psycopg.OperationalError):
    """The database has not answered in the time that it was given: it may come back."""


class PatientConnection(psycopg.Connection[Row]):
    """A connection for one thread."""

    silence_s_max: float | None = None
    """How long the server may say nothing while it is waited for; None is for ever."""

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        return super().wait(_listening(self, gen), *args, **options)


class PatientAsyncConnection(psycopg.AsyncConnection[Row]):
    """A connection on the event loop."""

    silence_s_max: float | None = None
    """How long the server may say nothing while it is waited for; None is for ever."""

    async def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        return await super().wait(_listening(self, gen), *args, **options)


def _listening(
    connection: PatientConnection | PatientAsyncConnection, gen: Generator[Any, Any, T]
) -> Generator[Any, Any, T]:
    """What psycopg waits with, ended when it has only waited for too long."""
    if connection.silence_s_max is None:
        return (yield from gen)
    silent_intervals_max = connection.silence_s_max / INTERVAL_S
    silent_intervals = 0
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            silent_intervals = 0 if ready else silent_intervals + 1
            if silent_intervals > silent_intervals_max:
                connection.pgconn.finish()
                raise SilentError(
                    f"the database has said nothing for {connection.silence_s_max:g} s"
                )
            wanted = gen.send(ready)
    except StopIteration as end:
        answer: T = end.value
        return answer
