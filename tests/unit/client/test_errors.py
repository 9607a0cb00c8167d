"""Errors that go to another process, as those of a worker in a pool of processes do."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from fencepost.client.errors import (
    ConnectionFailedError,
    FencepostError,
    OutcomeUnknownError,
    SequenceUsedError,
)
from fencepost.client.errors.answers import error_of

REFUSED = [
    (404, "stream_not_found"),
    (403, "stale_epoch"),
    (409, "sequence_gap"),
    (410, "offset_truncated"),
    (429, "rate_limited"),
    (500, "not_known_here"),
]


def refusal(status: int, code: str) -> FencepostError:
    headers = {"content-type": "application/problem+json", "retry-after": "3", "x-request-id": "r"}
    problem = {"code": code, "detail": "as the test asked", "item": 4}
    error = error_of(status, headers, json.dumps(problem).encode())
    error.uncertain = 2
    return error.locate("POST", "/v1/stream/a", status, headers)


@pytest.mark.parametrize(
    "error",
    [
        *(refusal(status, code) for status, code in REFUSED),
        ConnectionFailedError("away", sent=True).locate("GET", "/", None, {}),
        OutcomeUnknownError("unknown"),
        SequenceUsedError(epoch=1, seq=2, last_seq=3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_in_another_process(error: FencepostError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301 - our own
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


def test_the_facts_of_a_cause_come_along() -> None:
    error = OutcomeUnknownError("unknown", cause=refusal(503, "overloaded"))

    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own

    assert type(again.cause) is type(error.cause)
    assert vars(again.cause) == vars(error.cause)
