"""Show the way of one request through the server, call by call: `just walk`.

A real server runs in this process on an empty store, and a plain socket on another thread sends
requests. Every call of a function of `fencepost` between the first byte of the last request and its
answer is printed in order, indented by depth; the same call several times in a row is one line with
a count. What the server does on its own meanwhile is printed too.

The last lines count. A call is a *step* when it comes from another module than the function's own:
what a module does inside is its own business. Constructors and the modules in `NO_STEPS` (types of
values, the clock, counters) do not count, and neither does what comes before the first byte or
after the answer. A step that is taken twice counts twice. `--steps` prints the steps alone.

The walks in ARCHITECTURE.md were written from this output.
"""

import argparse
import asyncio
import contextlib
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from fencepost.store.opener import AnyStoreSettings
from fencepost.store.settings import PostgresSettings, SqliteSettings
from fencepost.store.write.group_commit import THREAD_COMMITS_AFTER_SLOW
from fencepost.testing.postgres import shared_server
from fencepost.testing.server import TestServer

JSON = "Content-Type: application/json\r\n"
WARM_UP = THREAD_COMMITS_AFTER_SLOW + 6
"""How many appends come before the one that is shown: the first ones are committed by a thread."""
REQUESTS = {
    "append": (
        "POST",
        JSON + "Producer-Id: walk\r\nProducer-Epoch: 0\r\nProducer-Seq: " + f"{WARM_UP}\r\n",
        "[1]",
    ),
    "read": ("GET", "", ""),
}
NO_STEPS = (
    "clock",
    "http.front",
    "http.messages",
    "protocol.acks",
    "protocol.offsets",
    "protocol.streams",
    "server.metrics",
    "store.postgres.cluster",
    "store.records",
)
"""Modules without steps: types of values and their columns, the clock, counters, and the news for
other nodes, which leaves after the answer."""
_FRONT = "fencepost.http."
_COROUTINE = 0x20 | 0x80 | 0x200  # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR


class Call(NamedTuple):
    """A function that was entered, how deep below the first one, and the module that called it."""

    depth: int
    module: str
    function: str
    caller: str = ""

    @property
    def is_step(self) -> bool:
        """Whether the request goes from one module to another here."""
        module = self.module.removeprefix("fencepost.")
        if not self.caller and module.startswith("store.postgres.driver"):
            return False  # the event loop goes on with a wait of the driver
        return (
            self.caller != self.module
            and not self.function.endswith(("__init__", "__len__"))
            and not module.startswith(NO_STEPS)
            and not self.caller.removeprefix("fencepost.").startswith(NO_STEPS)
        )


class Tracer:
    """Notes the calls of every thread that is profiled by it, while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls: list[Call] = []
        self._seen: list[FrameType] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if not self.is_on or event != "call":
            return
        code = frame.f_code
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("fencepost.") or code.co_name.startswith("<"):
            return
        # A coroutine is entered again after each wait; that is no call.
        if code.co_flags & _COROUTINE:
            if any(frame is seen for seen in self._seen):
                return
            self._seen.append(frame)
        callers = list(_callers(frame))
        # Background work of the cluster goes on beside the request; nothing below it is a step.
        aside = [name for name in callers if name.startswith("fencepost.store.postgres.cluster")]
        caller = (*aside, *callers, "")[0]
        self.calls.append(Call(len(callers), module, code.co_qualname, caller))


def _callers(frame: FrameType) -> Iterator[str]:
    """The modules of `fencepost` above a frame, the nearest first."""
    above = frame.f_back
    while above is not None:
        name = above.f_globals.get("__name__", "")
        if name.startswith("fencepost.") and not above.f_code.co_name.startswith("<"):
            yield name
        above = above.f_back


class Client:
    """A connection that is kept open, as those of real clients are."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))

    def send(self, method: str, headers: str, body: str, query: str = "") -> bytes:
        """Send one request and return the answer, which is short enough for one piece."""
        head = f"{method} /v1/stream/walk{query} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        self._socket.sendall(f"{head}{headers}{length}\r\n{body}".encode())
        return self._socket.recv(65536)

    def close(self) -> None:
        self._socket.close()


async def walk(store: AnyStoreSettings, what: str) -> tuple[list[Call], bytes]:
    """The calls of one request, on a server that has answered others like it before."""
    tracer = Tracer()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        async with TestServer(store) as server:
            client = Client(server.port)
            await asyncio.to_thread(client.send, "PUT", JSON, "")
            for seq in range(WARM_UP):
                headers = REQUESTS["append"][1].replace(str(WARM_UP), str(seq))
                await asyncio.to_thread(client.send, "POST", headers, "[0]")
            method, headers, body = REQUESTS[what]
            query = "?offset=-1" if what == "read" else ""
            tracer.is_on = True
            answer = await asyncio.to_thread(client.send, method, headers, body, query)
            tracer.is_on = False
            client.close()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return [
        call for call in tracer.calls if not call.module.startswith("fencepost.testing")
    ], answer


def steps_of(calls: list[Call]) -> list[Call]:
    """The steps of one request: from its first byte to the last call of its answer."""
    numbers = [number for number, call in enumerate(calls) if call.module.startswith(_FRONT)]
    first, last = (numbers[0], numbers[-1] + 1) if numbers else (0, len(calls))
    return [call for call in calls[first:last] if call.is_step]


def listing(calls: list[Call]) -> Iterator[str]:
    """The calls as lines; the same call several times in a row is one line with a count."""
    shown: list[tuple[Call, int]] = []
    for call in calls:
        if shown and shown[-1][0] == call:
            shown[-1] = (call, shown[-1][1] + 1)
        else:
            shown.append((call, 1))
    floor = min((call.depth for call in calls), default=0)
    for number, (call, times) in enumerate(shown, 1):
        module = call.module.removeprefix("fencepost.")
        count = f"  x{times}" if times > 1 else ""
        yield f"{number:3}  {'  ' * (call.depth - floor)}{module}: {call.function}{count}"
    functions = len({(call.module, call.function) for call in calls})
    modules = len({call.module for call in calls})
    yield f"{len(calls)} calls of {functions} functions in {modules} modules"
    steps = steps_of(calls)
    yield f"{len(steps)} steps through {len({call.module for call in steps})} modules"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", nargs="?", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("request", nargs="?", choices=("append", "read"), default="append")
    parser.add_argument("--steps", action="store_true", help="print the steps alone")
    chosen = parser.parse_args()
    with contextlib.ExitStack() as stack:
        store: AnyStoreSettings
        if chosen.store == "sqlite":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            # However slow the disk is at this moment, commits run where those of fast disks do.
            store = SqliteSettings(folder=folder, loop_commit_us_max=10**9)
        else:
            store = PostgresSettings(url=shared_server().new_database())
        calls, answer = asyncio.run(walk(store, chosen.request))
    if chosen.steps:
        calls = steps_of(calls)
    print(*listing(calls), sep="\n")
    print(answer.partition(b"\r\n")[0].decode())


if __name__ == "__main__":
    main()
