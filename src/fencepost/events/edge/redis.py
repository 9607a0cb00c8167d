"""Records in Redis (extra `[redis]`): one hash per key, changed by a Lua script.

The script compares and sets in one step, and reads the time from Redis, so that all processes of
the application measure leases by one clock. A Redis that may evict keys is refused: an evicted
record is an effect that happens twice.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from fencepost.events.edge.backends import BackendUnavailableError
from fencepost.events.edge.rules import Record, Released, Seen

if TYPE_CHECKING:
    from redis.asyncio import Redis

logger = logging.getLogger("fencepost.events.edge")

LOAD = """
local found = redis.call('HMGET', KEYS[1], 'version', 'changed_ms', 'record')
if not found[1] then return false end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
return {found[1], tostring(math.max(0, now_ms - tonumber(found[2]))), found[3]}
"""
REPLACE = """
local version = redis.call('HGET', KEYS[1], 'version')
if version == ARGV[2] then return 1 end
if (version or '') ~= ARGV[1] then return 0 end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'changed_ms', string.format('%d', now_ms),
    'record', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 1
"""
"""An attempt whose answer was lost finds its own version and is answered as the first time."""
RELEASED_MS = 60_000
"""A released record is kept this long, for attempts whose answer was lost."""


class RedisBackend:
    """Records in Redis, whose client the application makes and closes.

    Redis must write its append-only file (`appendonly yes`, best with `appendfsync always`) or a
    crash of Redis loses records, and must not evict keys (`maxmemory-policy noeviction`).
    """

    def __init__(self, client: Redis, *, prefix: str = "fencepost:idempotency") -> None:
        self._client = client
        self._prefix = prefix
        self._is_checked = False

    async def load(self, record_id: str) -> Seen | None:
        async with _reaching():
            await self._check()
            found: list[Any] | None = await self._client.eval(LOAD, 1, self._name(record_id))
        if found is None:
            return None
        version, idle_ms, record = (_encoded(one) for one in found)
        return Seen(
            msgspec.json.decode(record, type=Record), version.decode(), int(idle_ms.decode())
        )

    async def replace(
        self, record_id: str, version: str | None, record: Record, *, stamp: str, ttl_ms: int
    ) -> str | None:
        kept_ms = min(ttl_ms, RELEASED_MS) if isinstance(record, Released) else ttl_ms
        async with _reaching():
            await self._check()
            changed = await self._client.eval(
                REPLACE,
                1,
                self._name(record_id),
                version or "",
                stamp,
                msgspec.json.encode(record),
                str(kept_ms),
            )
        return stamp if changed else None

    async def _check(self) -> None:
        """Refuse a Redis that evicts keys, once; warn of one that forgets them in a crash."""
        if self._is_checked:
            return
        memory = await self._client.info("memory")
        policy = str(memory.get("maxmemory_policy", "noeviction"))
        if policy != "noeviction":
            raise BackendUnavailableError(
                f"Redis may evict idempotency records (maxmemory-policy {policy}):"
                " set maxmemory-policy noeviction"
            )
        persistence = await self._client.info("persistence")
        if not persistence.get("aof_enabled"):
            logger.warning(
                "Redis writes no append-only file: a crash of Redis loses idempotency records,"
                " and their requests run again when they are repeated"
            )
        self._is_checked = True

    def _name(self, record_id: str) -> str:
        return f"{self._prefix}:{record_id}"


def _encoded(value: bytes | str) -> bytes:
    """A reply as bytes, also from a client with `decode_responses`."""
    return value.encode() if isinstance(value, str) else value


@asynccontextmanager
async def _reaching() -> AsyncIterator[None]:
    from redis.exceptions import RedisError

    try:
        yield
    except (RedisError, OSError) as error:
        raise BackendUnavailableError(f"Redis: {error}") from error
