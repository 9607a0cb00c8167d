"""Every bound on what a client may ask for: its name, its default, its unit.

Bounds on sockets and time belong to the front end (`server/settings.py`); these are the protocol's
own. Going past one is an error that carries the bound's name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request, one stream and one reader may cost."""

    path_bytes_max: int = 1024
    """Bytes of a stream's path, decoded."""
    content_type_bytes_max: int = 256
    """Characters of a Content-Type."""
    producer_id_bytes_max: int = 256
    """Bytes of a Producer-Id."""
    stream_seq_bytes_max: int = 256
    """Bytes of a Stream-Seq."""
    key_bytes_max: int = 256
    """Bytes of an Idempotency-Key."""
    commit_appends_max: int = 10_000
    """Appends in one commit."""
    commit_parts_max: int = 100_000
    """Staged parts that one commit may name."""
    part_chunks_max: int = 16_384
    """Chunks of one staged part."""
    messages_per_append_max: int = 100_000
    """Messages that one JSON body may hold."""
    read_chunk_bytes_max: int = 1 << 20
    """Payload bytes of one read; a single larger message is sent whole."""
    ttl_s_max: int = 10 * 365 * 86_400
    """Seconds of a Stream-TTL."""
    waiters_max: int = 20_000
    """Long-polls and SSE readers waiting at once."""
