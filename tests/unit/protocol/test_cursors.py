"""Cursors: they count intervals, never go back, and always leave the one a reader came with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.cursors import EPOCH_MS, INTERVAL_MS, JITTER_MS_MAX, next_cursor

TIMES_MS = st.integers(EPOCH_MS, EPOCH_MS + 50 * 365 * 86_400_000)
DICE = st.floats(0, 1, exclude_max=True)


def test_a_cursor_is_the_number_of_the_interval_since_october_2024() -> None:
    assert next_cursor(None, now_ms=EPOCH_MS, dice=0.0) == 0
    assert next_cursor(None, now_ms=EPOCH_MS + INTERVAL_MS - 1, dice=0.9) == 0
    assert next_cursor(None, now_ms=EPOCH_MS + 1000 * INTERVAL_MS, dice=0.9) == 1000


@given(TIMES_MS, DICE, st.integers(-5_000, 5_000))
def test_a_cursor_sent_back_always_comes_back_greater(now_ms: int, dice: float, ahead: int) -> None:
    """From behind it becomes the present one; from there or ahead it jumps, by an hour at most."""
    current = (now_ms - EPOCH_MS) // INTERVAL_MS
    sent = max(0, current + ahead)

    answer = next_cursor(str(sent), now_ms=now_ms, dice=dice)

    assert answer > sent
    assert answer >= current
    assert answer <= max(current, sent + JITTER_MS_MAX // INTERVAL_MS)


@pytest.mark.parametrize("sent", ["", "x", "-1", "1.5", "\u0663", "9" * 19, "1 ", "+1"])
def test_a_cursor_that_is_none_of_ours_counts_as_absent(sent: str) -> None:
    now_ms = EPOCH_MS + 7 * INTERVAL_MS

    assert next_cursor(sent, now_ms=now_ms, dice=0.5) == 7
