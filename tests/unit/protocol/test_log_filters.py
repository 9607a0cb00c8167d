"""Which messages a filter of events takes."""

from __future__ import annotations

import pytest

from fencepost.protocol.log_filters import EventFilter, check_correlation, check_names

PAID = b'{"name":"Paid","data":{},"meta":{"correlation":"c1","causation":null},"schema":1}'


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        (EventFilter(frozenset({"Paid"})), True),
        (EventFilter(frozenset({"Paid", "Refunded"})), True),
        (EventFilter(frozenset({"Refunded"})), False),
        (EventFilter(correlation="c1"), True),
        (EventFilter(correlation="c2"), False),
        (EventFilter(frozenset({"Paid"}), "c1"), True),
        (EventFilter(frozenset({"Paid"}), "c2"), False),
        (EventFilter(frozenset({"Refunded"}), "c1"), False),
    ],
)
def test_name_and_correlation_must_both_fit(wanted: EventFilter, taken: bool) -> None:
    assert wanted.takes(PAID) is taken


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"1",
        b'"Paid"',
        b"[]",
        b"null",
        b"{}",
        b'{"name":7}',
        b'{"name":["Paid"]}',
        b'{"name":null,"meta":{"correlation":"c1"}}',
        b'{"meta":{"correlation":"c1"}}',
        b'{"name":"Other","meta":5}',
        b"{" * 5000,
        b"\xff",
    ],
)
@pytest.mark.parametrize(
    "wanted", [EventFilter(frozenset({"Paid"})), EventFilter(correlation="c1")]
)
def test_a_message_that_is_no_such_event_is_left_out(message: bytes, wanted: EventFilter) -> None:
    assert not wanted.takes(message)


def test_a_name_is_compared_as_a_text_however_it_is_written() -> None:
    assert EventFilter(frozenset({"Paidé"})).takes(b'{"name":"P\\u0061id\\u00e9"}')


def test_a_strange_meta_does_not_hide_a_name() -> None:
    assert EventFilter(frozenset({"Paid"})).takes(b'{"name":"Paid","meta":5}')


def test_names_and_correlations_that_none_can_have_are_refused() -> None:
    assert check_names(["Paid", "Refunded"]) is None
    assert "64" in (check_names(["a"] * 65) or "")
    assert check_names(["ok", ""]) is not None
    assert check_correlation("c1") is None
    assert check_correlation("a\0") is not None
