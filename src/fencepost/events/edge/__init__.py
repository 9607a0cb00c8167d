"""Idempotency at the edge: an ASGI middleware that runs a request with an Idempotency-Key once.

`RedisBackend` needs the extra `[redis]`. The guide is
docs/guides/idempotency.md, the rules are in `rules.py`.
"""

from fencepost.events.edge.backends import Backend, BackendUnavailableError, MemoryBackend
from fencepost.events.edge.middleware import IdempotencyMiddleware, by_header, effect_key
from fencepost.events.edge.redis import RedisBackend
from fencepost.events.edge.settings import IdempotencySettings
from fencepost.events.edge.streams import StreamBackend

__all__ = [
    "Backend",
    "BackendUnavailableError",
    "IdempotencyMiddleware",
    "IdempotencySettings",
    "MemoryBackend",
    "RedisBackend",
    "StreamBackend",
    "by_header",
    "effect_key",
]
