"""Overrides: `AsyncOverrides` over the rules of `fencepost.coordination.rules.overrides`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fencepost.client.aio.streams import AsyncStream
from fencepost.coordination.rules.checks import check_stream
from fencepost.coordination.rules.claims import Kind
from fencepost.coordination.rules.overrides import Overriding, Value
from fencepost.coordination.rules.resources import Row


class AsyncOverrides:
    """Bypasses the order of claims and versions on one stream, each time with a reason.

    Args:
        stream: The JSON stream of the claims and rows.
        by: Who we are, for others to read.
    """

    def __init__(self, stream: AsyncStream, by: str) -> None:
        check_stream(stream, AsyncStream)
        self._driver = stream._driver
        self._core = Overriding(stream._settings, stream.path, by)

    async def free(self, task: str, *, reason: str, kind: Kind = "task") -> bool:
        """Crashed executor: take a task from its holder now; False when no actor holds it.

        A claim that cannot be read is taken, too; `TaskState.reason` then says over what.
        """
        return await self._driver.run(self._core.free(task, reason, kind))

    async def correct(self, type: str, key: str, value: Any, *, reason: str) -> Row[Value]:
        """Administrative correction: write a value over whatever there is.

        If that cannot be read, `Row.override.skipped` says what it was.
        """
        return await self._driver.run(self._core.correct(type, key, value, reason))

    async def restart_versions(
        self,
        type: str,
        key: str,
        *,
        reason: str,
        migrate: Callable[[Value], Any] | None = None,
    ) -> Row[Value]:
        """Versioning restart: begin a row's versions again at 0, its value migrated."""
        return await self._driver.run(self._core.restart_versions(type, key, reason, migrate))

    async def baseline(self, type: str, values: Mapping[str, Any], *, reason: str) -> int:
        """Clean baseline: make these all the rows of a type, in one commit; how many changed.

        Rows that cannot be read are replaced, too; their `Row.override.skipped` says what they
        were.
        """
        return await self._driver.run(self._core.baseline(type, values, reason))
