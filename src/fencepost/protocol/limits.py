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
    commit_appends_max: int = 100_000
    """Appends in one commit."""
    commit_parts_max: int = 100_000
    """Staged parts that one commit may name."""
    writer_text_max: int = 256
    """Characters of a writer's query, and of the digest of a batch."""
    bundle_pieces_max: int = 512
    """Chunks that one upload of a bundle may hold, and parts that one request may drop."""
    part_chunks_max: int = 16_384
    """Chunks of one staged part."""
    messages_per_append_max: int = 100_000
    """Messages that one JSON body may hold."""
    json_depth_max: int = 512
    """Arrays and objects inside each other in one JSON body, with the array of a batch."""
    read_chunk_bytes_max: int = 1 << 20
    """Payload bytes of one read; a single larger message is sent whole."""
    ttl_s_max: int = 10 * 365 * 86_400
    """Seconds of a Stream-TTL."""
    waiters_max: int = 20_000
    """Long-polls, SSE readers and claims waiting at once."""
    log_rows_default: int = 10_000
    """Messages in one answer of the log when the reader does not say."""
    log_rows_max: int = 100_000
    """Messages in one answer of the log."""
    log_bytes_max: int = 4 << 20
    """Payload bytes in one answer of the log, with 100 more for each message; a single larger
    message is sent whole."""
    log_scan_max: int = 1_000_000
    """Positions that one answer of the log may look through for the streams it selects."""
    log_comparisons_max: int = 1_000_000
    """Comparisons of a stream's path with a pattern that one answer of the log may take."""
    log_streams_max: int = 64
    """Streams that a reader of the log may name one by one; patterns have no such bound."""
    log_parts_max: int = 1024
    """Parts that parallel readers may divide the streams into."""
    plan_parts_max: int = 256
    """Ranges that a plan of the log may be split into."""
    list_rows_default: int = 100
    """Entries in one page of a list when the reader does not say."""
    list_rows_max: int = 1_000
    """Entries in one page of a list."""
