"""One test for both clients: the sync client, called in a thread, looks like the async one.

A test asks for the fixture `connect` and is written with `await`. It runs once on the async client,
and once on the sync client behind `Threaded`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import fencepost

AT_ONCE = frozenset(
    (
        "stream",
        "read",
        "follow",
        "producer",
        "log",
        "streams",
        "batches",
        "subscription",
        "subscriptions",
        "wake",
        "forget",
    )
)
"""Methods that the async client does not have to await."""
_END = object()

Connect = Callable[..., Any]


@pytest.fixture(params=["async", "sync"])
def connect(request: pytest.FixtureRequest) -> Connect:
    """`connect(url, ...)` for either client; what it gives is used like an `AsyncClient`."""
    if request.param == "async":
        return fencepost.connect_async
    return lambda *arguments, **named: Threaded(fencepost.connect(*arguments, **named))


class Threaded:
    """An object of the sync client whose methods are awaited: each call runs in a thread."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self._iterator: Any = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        if not callable(found) or isinstance(found, type):
            return found
        if name in AT_ONCE:
            return lambda *arguments, **named: Threaded(found(*arguments, **named))

        async def call(*arguments: Any, **named: Any) -> Any:
            result = await asyncio.to_thread(found, *arguments, **named)
            ours = type(result).__module__.startswith("fencepost.client.sync")
            return Threaded(result) if ours else result

        return call

    def __aiter__(self) -> Threaded:
        self._iterator = iter(self._wrapped)
        return self

    async def __anext__(self) -> Any:
        found = await asyncio.to_thread(next, self._iterator, _END)
        if found is _END:
            raise StopAsyncIteration
        return found

    async def __aenter__(self) -> Threaded:
        await asyncio.to_thread(self._wrapped.__enter__)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await asyncio.to_thread(self._wrapped.__exit__, *error)
