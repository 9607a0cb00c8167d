"""The age at which an outbox gives a row up: before the server forgets the id of its send.

A row that is sent again after the server has forgotten its id would be stored twice. So the age at
which a row dies follows from how long the mesh keeps dedupe rows, with a margin for clocks and
sweeps that grows with it.
"""

from __future__ import annotations

from typing import NamedTuple

from fencepost.protocol.meshes import RETENTION_DAYS_MIN, DedupeMode

PERMANENT_HOURS = 168
PERMANENT_HOURS_MAX = 720
MARGIN_HOURS_MIN = 24
HOUR_MS = 3_600_000


class AgeRefused(NamedTuple):
    """The daemon does not start: `code` is the reason."""

    code: str
    detail: str


def max_age_hours(
    mode: DedupeMode, retention_days: int, *, override_hours: int | None = None
) -> int | AgeRefused:
    """After how many hours without success a row dies."""
    if mode == "permanent":
        hours, cap = PERMANENT_HOURS, PERMANENT_HOURS_MAX
    else:
        assert retention_days >= RETENTION_DAYS_MIN, "the negotiation has checked the floor"
        window = 24 * retention_days
        # A tenth of the window, rounded up to whole hours.
        hours = window - max(MARGIN_HOURS_MIN, -(-window // 10))
        cap = window - MARGIN_HOURS_MIN
    if override_hours is None:
        return hours
    if override_hours < 1:
        return AgeRefused("outbox_max_age_invalid", "max_age_hours_override is at least 1")
    if override_hours > cap:
        return AgeRefused(
            "outbox_max_age_above_dedupe_window",
            f"max_age_hours_override is {override_hours}, and this mesh allows {cap} at most",
        )
    return override_hours


def is_past_window(enqueued_ms: int, now_ms: int, mode: DedupeMode, retention_days: int) -> bool:
    """Whether the server may have forgotten the id of a row since its first attempt.

    The ages above keep this from happening; when a clock jumps it can, and is counted
    (`fencepost_outbox_retries_after_expiry_total`).
    """
    return mode == "retention_scoped" and now_ms - enqueued_ms >= retention_days * 24 * HOUR_MS
