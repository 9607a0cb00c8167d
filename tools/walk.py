"""Show the way of one request through the server, call by call: `just walk`.

A real server runs in this process on an empty store, and a plain socket on another thread sends one
request. Every call of a function of `fencepost` between the first byte and the answer is printed in
order, indented by depth; the same call several times in a row is one line with a count. What the
server does on its own meanwhile is printed too. The last line counts calls, functions and modules.

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
from fencepost.testing.postgres import shared_server
from fencepost.testing.server import TestServer

JSON = "Content-Type: application/json\r\n"
REQUESTS = {
    "append": (
        "POST",
        JSON + "Producer-Id: walk\r\nProducer-Epoch: 0\r\nProducer-Seq: 2\r\n",
        "[1]",
    ),
    "read": ("GET", "", ""),
}
_COROUTINE = 0x20 | 0x80 | 0x200  # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR


class Call(NamedTuple):
    """A function that was entered, and how deep below the first one."""

    depth: int
    module: str
    function: str


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
        self.calls.append(Call(self._depth(frame), module, code.co_qualname))

    def _depth(self, frame: FrameType) -> int:
        depth, above = 0, frame.f_back
        while above is not None:
            name = above.f_globals.get("__name__", "")
            depth += name.startswith("fencepost.") and not above.f_code.co_name.startswith("<")
            above = above.f_back
        return depth


def send(port: int, method: str, headers: str, body: str, query: str = "") -> bytes:
    """Send one request on a connection of its own, and return the answer."""
    head = f"{method} /v1/stream/walk{query} HTTP/1.1\r\nHost: walk\r\nConnection: close\r\n"
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}{headers}{length}\r\n{body}".encode())
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return answer


async def walk(store: AnyStoreSettings, what: str) -> tuple[list[Call], bytes]:
    """The calls of one request, on a server that has answered others like it before."""
    tracer = Tracer()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        async with TestServer(store) as server:
            await asyncio.to_thread(send, server.port, "PUT", JSON, "")
            for seq in (0, 1):
                headers = REQUESTS["append"][1].replace("Seq: 2", f"Seq: {seq}")
                await asyncio.to_thread(send, server.port, "POST", headers, "[0]")
            method, headers, body = REQUESTS[what]
            query = "?offset=-1" if what == "read" else ""
            tracer.is_on = True
            answer = await asyncio.to_thread(send, server.port, method, headers, body, query)
            tracer.is_on = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return [
        call for call in tracer.calls if not call.module.startswith("fencepost.testing")
    ], answer


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", nargs="?", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("request", nargs="?", choices=("append", "read"), default="append")
    chosen = parser.parse_args()
    with contextlib.ExitStack() as stack:
        store: AnyStoreSettings
        if chosen.store == "sqlite":
            store = SqliteSettings(folder=Path(stack.enter_context(tempfile.TemporaryDirectory())))
        else:
            store = PostgresSettings(url=shared_server().new_database())
        calls, answer = asyncio.run(walk(store, chosen.request))
    print(*listing(calls), sep="\n")
    print(answer.partition(b"\r\n")[0].decode())


if __name__ == "__main__":
    main()
