"""Which failures are repeated, and what is raised in the end: the core without any I/O."""

from __future__ import annotations

from typing import Any

import pytest

from fencepost.client import operations
from fencepost.client.effects import Call, Effect, Operation, Send, Sleep
from fencepost.client.errors import (
    BadRequestError,
    ConnectionFailedError,
    OutcomeUnknownError,
    RateLimitedError,
    StreamNotFoundError,
    UnavailableError,
)
from fencepost.client.http import Request, Response, parse_url
from fencepost.client.operations import Condition
from fencepost.client.settings import ClientSettings, Retries
from fencepost.testing import SimClock

OK = Response(204, {"stream-next-offset": "1"})
LOST = ConnectionFailedError("cut", sent=True)
REFUSED = ConnectionFailedError("nobody listens", sent=False)
UNKNOWN = Response(503, {"content-type": "text/plain"})
NOTHING_STORED = Response(
    503, {"content-type": "application/problem+json"}, b'{"code":"storage_unavailable"}'
)


class Script:
    """Runs an operation against prepared answers, in a time that only it moves."""

    def __init__(self, *answers: Response | Exception, seed: int = 0, **given: Any) -> None:
        self.clock = SimClock(seed=seed)
        self.settings = ClientSettings(address=parse_url("http://x"), clock=self.clock, **given)
        self.answers = list(answers)
        self.sent: list[Request] = []
        self.slept: list[float] = []

    def run(self, operation: Operation[Any]) -> Any:
        try:
            effect = next(operation)
            while True:
                effect = self._step(operation, effect)
        except StopIteration as stop:
            return stop.value

    def _step(self, operation: Operation[Any], effect: Effect) -> Effect:
        match effect:
            case Sleep(seconds):
                self.slept.append(seconds)
                self.clock.advance(int(seconds * 1000))
                return operation.send(None)
            case Call(function):
                return operation.send(function())
            case Send(request):
                self.sent.append(request)
                answer = self.answers.pop(0)
                if isinstance(answer, Exception):
                    return operation.throw(answer)
                return operation.send(answer)
            case _:
                raise AssertionError(effect)

    def append(self, *, retry: bool = True, key: str | None = None) -> Any:
        return self.run(
            operations.append(
                self.settings, "s", b"[1]", "application/json", Condition(key=key), retry=retry
            )
        )


def keys(script: Script) -> set[str | None]:
    return {dict(request.headers).get("Idempotency-Key") for request in script.sent}


@pytest.mark.parametrize("failure", [LOST, REFUSED, UNKNOWN, Response(429, {}), Response(408, {})])
def test_an_append_is_repeated_under_one_key(failure: Response | Exception) -> None:
    script = Script(failure, failure, OK)

    assert script.append().next_offset == "1"
    assert len(script.sent) == 3
    assert len(keys(script)) == 1
    assert None not in keys(script)


def test_an_append_without_a_key_is_not_repeated_after_it_may_have_arrived() -> None:
    script = Script(REFUSED, NOTHING_STORED, LOST)

    with pytest.raises(OutcomeUnknownError) as unknown:
        script.append(retry=False)
    assert unknown.value.cause is LOST
    assert len(script.sent) == 3
    assert keys(script) == {None}


def test_a_write_whose_retries_run_out_is_unknown_unless_it_never_arrived() -> None:
    few = Retries(attempts_max=3)
    with pytest.raises(OutcomeUnknownError):
        Script(LOST, LOST, LOST, retries=few).append()
    with pytest.raises(ConnectionFailedError):
        Script(REFUSED, REFUSED, REFUSED, retries=few).append()
    with pytest.raises(UnavailableError):
        Script(*[NOTHING_STORED] * 3, retries=few).append()
    with pytest.raises(RateLimitedError):
        Script(*[Response(429, {})] * 3, retries=few).append()


def test_retry_after_is_honoured_and_time_is_bounded() -> None:
    patient = Script(Response(503, {"retry-after": "9"}), OK)
    patient.append()
    assert patient.slept == [9.0]

    impatient = Script(Response(503, {"retry-after": "90"}), OK)
    with pytest.raises(OutcomeUnknownError):
        impatient.append()
    assert impatient.slept == []


@pytest.mark.parametrize("seed", range(20))
def test_a_server_that_is_away_is_waited_for_a_minute(seed: int) -> None:
    script = Script(*[REFUSED] * 100, seed=seed)

    with pytest.raises(ConnectionFailedError):
        script.append()
    assert 50 < sum(script.slept) <= 60


def test_what_is_wrong_is_not_repeated() -> None:
    script = Script(Response(400, {}))
    with pytest.raises(BadRequestError):
        script.append()
    assert len(script.sent) == 1


def test_a_deletion_that_may_have_arrived_is_done_when_nothing_is_found() -> None:
    missing = Response(404, {})
    lost = Script(LOST, missing)
    lost.run(operations.delete(lost.settings, "s"))

    never = Script(REFUSED, missing)
    with pytest.raises(StreamNotFoundError):
        never.run(operations.delete(never.settings, "s"))


def test_values_may_be_functions_and_are_asked_for_each_attempt() -> None:
    tokens = iter("ab")
    script = Script(
        UNKNOWN,
        OK,
        token=lambda: next(tokens),
        headers={"X-Team": "blue"},
        params={"tenant": lambda: "t 1"},
    )

    script.append()

    assert [dict(request.headers)["Authorization"] for request in script.sent] == [
        "Bearer a",
        "Bearer b",
    ]
    assert all(dict(request.headers)["X-Team"] == "blue" for request in script.sent)
    assert script.sent[0].target == "/v1/stream/s?tenant=t+1"
