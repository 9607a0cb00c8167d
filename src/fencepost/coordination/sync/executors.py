# Generated from src/fencepost/coordination/aio/executors.py by `just twins`: change that file.
"""Tool executors: `ToolExecutor` over `fencepost.coordination.rules.executors`."""

from __future__ import annotations

from typing import Any

from fencepost.client.errors import InvalidArgumentError
from fencepost.client.handlers import check_handler
from fencepost.client.sync.streams import Stream
from fencepost.coordination.rules.checks import check_stream
from fencepost.coordination.rules.claims import CLAIM_SECONDS
from fencepost.coordination.rules.executors import POLL_SECONDS, Executing, Handler, ToolCall


class ToolExecutor:
    """Carries out the tool calls of a session; of many executors one gives a call its result.

    Args:
        session: The JSON stream with messages `{"type": "tool_call", "id": ...}`.
        coordination: The JSON stream that the executors share, another one than the session.
        owner: Who we are, for others to read.
        handler: Gets a `ToolCall` and returns its result, any JSON value; what it raises becomes a
            `tool_error`.
        timeout: Seconds after which a silent executor counts as dead. A handler that takes longer
            calls `heartbeat` in between.
    """

    def __init__(
        self,
        session: Stream,
        coordination: Stream,
        owner: str,
        handler: Handler,
        *,
        timeout: float = CLAIM_SECONDS,
    ) -> None:
        for stream in (session, coordination):
            check_stream(stream, Stream)
        check_handler(handler, ("call",))
        if session._driver is not coordination._driver:
            raise InvalidArgumentError(
                "the session and the coordination stream must come from one client:"
                " a commit spans both"
            )
        self._driver = session._driver
        settings, paths = session._driver.settings, (session.path, coordination.path)
        self._core = Executing(settings, *paths, owner, handler, timeout)

    @property
    def refused(self) -> list[dict[str, Any]]:
        """The tool calls that cannot be carried out, because their `id` is no text.

        Each is also a warning in the log `fencepost.coordination`.
        """
        return list(self._core.refused)

    def step(self) -> int:
        """Carry out the calls of the session that no other executor has; how many got a result."""
        return self._driver.run(self._core.step())

    def run(self, *, poll: float = POLL_SECONDS) -> None:
        """Carry out calls as they come, until the session is closed and none is left.

        Calls that others hold are looked at every `poll` seconds.
        """
        self._driver.run(self._core.run(poll))

    def heartbeat(self, call: ToolCall) -> None:
        """For handlers: we still work on it; raises `ClaimLostError` when it was taken over."""
        self._driver.run(self._core.claims.heartbeat(call.claim))
