"""Cursors: numbers that keep a cache from giving a reader the same empty answer for ever.

Time is cut into intervals, and a live answer carries the number of its interval; the reader sends
it back, so its next request has another cache key. A reader that is already at or past this
interval is sent ahead by a random step, or it would go round in a circle.
"""

from __future__ import annotations

EPOCH_MS = 1_728_432_000_000
"""The ninth of October 2024, where counting starts."""
INTERVAL_MS = 20_000
JITTER_MS_MAX = 3_600_000


def next_cursor(sent: str | None, *, now_ms: int, dice: float) -> int:
    """The cursor to answer with; `dice` is a number in [0, 1) that decides the jitter."""
    current = (now_ms - EPOCH_MS) // INTERVAL_MS
    if sent is None or not sent.isascii() or not sent.isdigit() or len(sent) > 18:
        return current
    if int(sent) < current:
        return current
    jitter_ms = 1_000 + int(dice * (JITTER_MS_MAX - 1_000))
    return int(sent) + max(1, jitter_ms // INTERVAL_MS)
