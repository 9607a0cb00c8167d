"""Records: what a producer remembers of its batches, and how long a stream lives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.offsets import Offset
from fencepost.protocol.streams import (
    RECENT_BATCHES,
    Lifetime,
    Producer,
    Remembered,
    Stream,
    media_type,
    pack,
)


def batch(number: int) -> Remembered:
    return Remembered(Offset(number, number * 7), number.to_bytes(16, "big"))


def producer_after(last: int) -> Producer:
    """A producer that has sent the batches 0 to `last` of epoch 3."""
    producer = Producer.opening("p", 3, pack(*batch(0)), position=0, now_ms=0)
    for number in range(1, last + 1):
        producer = producer.next(number, pack(*batch(number)), position=number, now_ms=number)
    return producer


@given(st.integers(0, 60), st.integers(0, 70))
def test_a_producer_remembers_its_first_batch_and_the_last_sixteen(last: int, asked: int) -> None:
    """Exactly seq 0 and the newest RECENT_BATCHES are known, each as it was."""
    producer = producer_after(last)

    found = producer.remembered(asked)

    known = asked == 0 or last - RECENT_BATCHES < asked <= last
    assert found == (batch(asked) if known else None)
    assert (producer.epoch, producer.seq) == (3, last)


def test_what_a_producer_keeps_is_bounded() -> None:
    producer = producer_after(1000)

    assert len(producer.recent) == RECENT_BATCHES * len(pack(*batch(0)))
    assert len(producer.first) == len(pack(*batch(0)))


def test_a_stream_without_a_lifetime_never_ends() -> None:
    stream = Stream(1, "s", "text/plain", created_ms=0)

    assert Lifetime().deadline_ms(5) is None
    assert Lifetime().stored_deadline_ms(5) is None
    assert not stream.expired(2**62)


def test_a_fixed_end_does_not_slide() -> None:
    lifetime = Lifetime(expires_at_ms=500)
    stream = Stream(1, "s", "text/plain", created_ms=0, lifetime=lifetime)
    stream.touched_ms = 499

    assert not stream.expired(499)
    assert stream.expired(500)
    assert lifetime.stored_deadline_ms(499) == 500


@given(st.integers(0, 10 * 365 * 86_400), st.integers(0, 2**42))
def test_what_is_stored_of_a_window_is_never_earlier_than_the_truth(
    ttl_s: int, touched_ms: int
) -> None:
    """The slack is not negative, an eighth of the window at most, and at most a minute."""
    lifetime = Lifetime(ttl_s=ttl_s)
    true_ms = lifetime.deadline_ms(touched_ms)
    stored_ms = lifetime.stored_deadline_ms(touched_ms)

    assert true_ms == touched_ms + ttl_s * 1000
    assert stored_ms is not None
    assert true_ms <= stored_ms <= true_ms + min(ttl_s * 1000 / 8, 60_000)


def test_a_window_of_nothing_ends_at_once() -> None:
    stream = Stream(1, "s", "text/plain", created_ms=10, lifetime=Lifetime(ttl_s=0))

    assert stream.expired(10)


def test_a_window_counts_from_the_last_touch() -> None:
    stream = Stream(1, "s", "text/plain", created_ms=0, lifetime=Lifetime(ttl_s=1))
    stream.touched_ms = 600

    assert not stream.expired(1_599)
    assert stream.expired(1_600)


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        ("text/plain", "text/plain"),
        ("Text/Plain", "text/plain"),
        ("application/json; charset=utf-8", "application/json"),
        ("application/json ;charset=utf-8", "application/json"),
        ("APPLICATION/JSON;a=b;c=d", "application/json"),
        ("application/json-seq", "application/json-seq"),
    ],
)
def test_only_type_and_subtype_count_in_any_case(content_type: str, expected: str) -> None:
    assert media_type(content_type) == expected


def test_only_application_json_is_json() -> None:
    def is_json(content_type: str) -> bool:
        return Stream(1, "s", content_type, created_ms=0).is_json

    assert is_json("application/json; charset=utf-8")
    assert not is_json("application/ndjson")
    assert not is_json("application/problem+json")
