"""Where the records of keys are kept: the contract, and the backend in memory.

A backend is a store, not a cache: a record that is lost too early is an effect that happens twice.
`streams.py` keeps records on a Fencepost server and `redis.py` in Redis.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import NamedTuple, Protocol

from fencepost.clock import Clock, SystemClock
from fencepost.events.edge.rules import Record, Released, Seen

logger = logging.getLogger("fencepost.events.edge")
RECORDS_MAX = 100_000


class BackendUnavailableError(Exception):
    """The backend cannot be reached or refuses to keep records; its text says why. Retry later."""


class Backend(Protocol):
    """Keeps one record per id, and replaces it by compare and set.

    Both methods raise `BackendUnavailableError` when the outcome is not known. Calling `replace`
    again with the same arguments is then safe: a change that was made before is recognised.
    """

    async def load(self, record_id: str) -> Seen | None:
        """The record as it is now; None if there is none, or it expired."""
        ...

    async def replace(
        self, record_id: str, version: str | None, record: Record, *, stamp: str, ttl_ms: int
    ) -> str | None:
        """Replace `version` (None: no record) by a record that lives for `ttl_ms`.

        `stamp` is a text that no other change has. Gives the new version, or None if `version` is
        no longer the current one. When this returns, the record survives what the backend survives.
        """
        ...


class _Kept(NamedTuple):
    record: Record
    version: str
    changed_ms: int
    expires_ms: int


class MemoryBackend:
    """Records in the memory of this process: for tests, and for programs of one process.

    A second process of the application does not see them, and they end with the process: a request
    that is repeated after a restart runs again.
    """

    def __init__(self, *, records_max: int = RECORDS_MAX, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._records_max = records_max
        self._records: OrderedDict[str, _Kept] = OrderedDict()
        logger.warning(
            "idempotency keys are kept in the memory of one process: use Fencepost or Redis when"
            " several processes serve the application, or when keys must survive a restart"
        )

    async def load(self, record_id: str) -> Seen | None:
        kept = self._current(record_id)
        if kept is None:
            return None
        return Seen(kept.record, kept.version, self._clock.monotonic_ms() - kept.changed_ms)

    async def replace(
        self, record_id: str, version: str | None, record: Record, *, stamp: str, ttl_ms: int
    ) -> str | None:
        kept = self._current(record_id)
        if (kept.version if kept is not None else None) != version:
            return None
        if kept is None:
            self._make_room()
        now_ms = self._clock.monotonic_ms()
        if isinstance(record, Released):
            self._records.pop(record_id, None)
            return stamp
        self._records[record_id] = _Kept(record, stamp, now_ms, now_ms + ttl_ms)
        self._records.move_to_end(record_id)
        return stamp

    def _current(self, record_id: str) -> _Kept | None:
        kept = self._records.get(record_id)
        if kept is not None and self._clock.monotonic_ms() >= kept.expires_ms:
            del self._records[record_id]
            return None
        return kept

    def _make_room(self) -> None:
        """Drop what has expired, oldest first; refuse rather than drop what has not."""
        now_ms = self._clock.monotonic_ms()
        while self._records and next(iter(self._records.values())).expires_ms <= now_ms:
            self._records.popitem(last=False)
        if len(self._records) >= self._records_max:
            raise BackendUnavailableError(f"records_max is reached: {self._records_max} keys")
