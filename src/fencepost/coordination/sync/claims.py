# Generated from src/fencepost/coordination/aio/claims.py by `just twins`: change that file.
"""Task claims: `TaskClaims` over the rules of `fencepost.coordination.rules.claims`."""

from __future__ import annotations

import threading
from collections.abc import Callable

from fencepost.client.errors import ConnectionFailedError, OutcomeUnknownError, UnavailableError
from fencepost.client.sync.streams import Stream
from fencepost.client.wires import wait
from fencepost.coordination.rules.claims import (
    CLAIM_SECONDS,
    RECLAIM_SECONDS,
    Claim,
    Claiming,
    Kind,
    TaskState,
)


class TaskClaims:
    """The claims of one actor on one stream: of many actors, one at a time has a task.

    Args:
        stream: The JSON stream that all actors share.
        owner: Who we are, for others to read; what proves a claim is its nonce, not this name.
        kind: `task`, or `tool` for the calls of a `ToolExecutor`.
    """

    def __init__(self, stream: Stream, owner: str, *, kind: Kind = "task") -> None:
        self._driver = stream._driver
        self._core = Claiming(stream._driver.settings, stream.path, owner, kind)

    def claim(self, task: str) -> Claim | None:
        """The task as a claim of ours; None when another holds it or it is completed."""
        return self._driver.run(self._core.claim(task))

    def claim_with_timeout(self, task: str, timeout: float = CLAIM_SECONDS) -> Claim | None:
        """The same, and a claim whose holder was silent for `timeout` seconds is taken over."""
        return self._driver.run(self._core.claim_with_timeout(task, timeout))

    def own(self, claim: Claim) -> bool:
        """Whether the task still is ours; one request, and nothing is read."""
        return self._driver.run(self._core.own(claim))

    def heartbeat(self, claim: Claim) -> None:
        """Say that we still work on it; raises `ClaimLostError` when it was taken over."""
        self._driver.run(self._core.heartbeat(claim))

    def release(self, claim: Claim) -> None:
        """Give the task back for anyone to claim; raises `ClaimLostError` when it was taken."""
        self._driver.run(self._core.release(claim))

    def complete(self, claim: Claim) -> None:
        """The task is done, for good; raises `ClaimLostError` when it was taken over."""
        self._driver.run(self._core.complete(claim))

    def get(self, task: str) -> TaskState | None:
        """Where a task is now; None when it was never claimed."""
        return self._driver.run(self._core.get(task))

    def open(self) -> list[TaskState]:
        """The tasks that an actor holds now."""
        return self._driver.run(self._core.open())

    def stale(self, timeout: float = RECLAIM_SECONDS) -> list[TaskState]:
        """The tasks whose holders were silent for `timeout` seconds, by the server's clock."""
        return self._driver.run(self._core.stale(timeout))

    def reclaim_stale(self, timeout: float = RECLAIM_SECONDS) -> list[str]:
        """Make stale tasks available again, and say which; call it now and then, anywhere."""
        return self._driver.run(self._core.reclaim_stale(timeout))

    def keep_reclaiming(
        self,
        stop: threading.Event,
        *,
        timeout: float = RECLAIM_SECONDS,
        every: float = RECLAIM_SECONDS / 4,
        on_reclaimed: Callable[[list[str]], None] | None = None,
    ) -> None:
        """Be the service that puts the tasks of silent holders back, until `stop` is set.

        Any number may run: each task is put back once. A server that is away is waited for.
        """
        while not stop.is_set():
            try:
                reclaimed = self.reclaim_stale(timeout)
            except (ConnectionFailedError, UnavailableError, OutcomeUnknownError):
                reclaimed = []  # whatever is stale now will be stale in the next round
            if reclaimed and on_reclaimed is not None:
                on_reclaimed(reclaimed)
            wait(stop, every)
