"""How long an outbox may try."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.outbox.ages import HOUR_MS, AgeRefused, is_past_window, max_age_hours


@pytest.mark.parametrize(
    ("days", "hours"), [(7, 144), (8, 168), (10, 216), (11, 237), (30, 648), (365, 7884)]
)
def test_the_age_follows_from_the_days_that_the_server_remembers(days: int, hours: int) -> None:
    assert max_age_hours("retention_scoped", days) == hours


def test_a_server_that_never_forgets_leaves_a_week() -> None:
    assert max_age_hours("permanent", 365) == 168
    assert max_age_hours("permanent", 365, override_hours=720) == 720
    assert isinstance(max_age_hours("permanent", 365, override_hours=721), AgeRefused)


def test_an_override_may_come_within_a_day_of_the_window_and_not_closer() -> None:
    assert max_age_hours("retention_scoped", 7, override_hours=144) == 144
    assert max_age_hours("retention_scoped", 365, override_hours=8736) == 8736

    refused = max_age_hours("retention_scoped", 7, override_hours=145)

    assert isinstance(refused, AgeRefused)
    assert refused.code == "outbox_max_age_above_dedupe_window"
    assert isinstance(max_age_hours("retention_scoped", 7, override_hours=0), AgeRefused)


@given(st.integers(7, 36_500))
def test_the_margin_is_a_day_or_a_tenth_of_the_window_whichever_is_more(days: int) -> None:
    """Rows die before the server forgets their ids, by a day at least."""
    hours = max_age_hours("retention_scoped", days)

    assert isinstance(hours, int)
    assert hours >= 144
    assert 24 * days - hours >= 24
    assert 10 * (24 * days - hours) >= 24 * days


def test_a_retry_after_the_window_is_noticed() -> None:
    week_ms = 7 * 24 * HOUR_MS

    assert not is_past_window(1000, 999 + week_ms, "retention_scoped", 7)
    assert is_past_window(1000, 1000 + week_ms, "retention_scoped", 7)
    assert not is_past_window(1000, 2**60, "permanent", 7)
