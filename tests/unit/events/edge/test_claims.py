"""Claims on one key against a model: several requests, crashes, sleeps, and time that passes."""

import asyncio
from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    rule,
)

from fencepost.events.edge.backends import BackendUnavailableError, MemoryBackend
from fencepost.events.edge.claims import Claim, ClaimLostError
from fencepost.events.edge.rules import Answer, OtherRequest, Record, Replay, Running, Take
from fencepost.events.edge.settings import IdempotencySettings
from fencepost.testing import SimClock

LEASE_MS, TTL_MS = 1_000, 5_000
SETTINGS = IdempotencySettings(ttl_s=5, lease_s=1.0)


class Held(NamedTuple):
    claim: Claim
    fingerprint: str


class KeyMachine(RuleBasedStateMachine):
    """One key. At any time at most one request can renew or finish; what finished is replayed
    to every request with its body until it expires, and no other answer is.
    """

    requests = Bundle("requests")

    @initialize()
    def start(self) -> None:
        self.runner = asyncio.Runner()
        self.clock = SimClock()
        self.backend = self.make_backend()
        self.holder: Held | None = None
        self.renewed_ms = 0
        self.finished: tuple[str, Answer, int] | None = None
        self.answers = 0

    def make_backend(self) -> MemoryBackend:
        return MemoryBackend(clock=self.clock)

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.close()

    @rule(target=requests, fingerprint=st.sampled_from(["tea", "coffee"]))
    def begin(self, fingerprint: str) -> object:
        claim = Claim(self.backend, "key", fingerprint, SETTINGS, self.clock)

        decision = self.runner.run(claim.take())

        self.forget_what_expired()
        if self.finished is not None:
            done, answer, _ = self.finished
            assert decision == (Replay(answer) if done == fingerprint else OtherRequest())
        elif self.holder is not None:
            left_ms = self.renewed_ms + LEASE_MS - self.clock.monotonic_ms()
            runs = self.holder.fingerprint == fingerprint
            assert decision == (Running(left_ms) if runs else OtherRequest())
        else:
            assert isinstance(decision, Take)
            self.holder = Held(claim, fingerprint)
            self.renewed_ms = self.clock.monotonic_ms()
            return self.holder
        return multiple()

    @rule(held=requests)
    def renew(self, held: Held) -> None:
        self.forget_who_slept_too_long()
        if held is self.holder:
            self.runner.run(held.claim.renew())
            self.renewed_ms = self.clock.monotonic_ms()
        else:
            with pytest.raises(ClaimLostError):
                self.runner.run(held.claim.renew())

    @rule(held=consumes(requests))
    def finish(self, held: Held) -> None:
        self.answers += 1
        answer = Answer(200, (), b"%d" % self.answers)
        self.forget_who_slept_too_long()
        if held is self.holder:
            assert self.runner.run(held.claim.finish(200, answer))
            self.holder = None
            self.finished = (held.fingerprint, answer, self.clock.now_ms() + TTL_MS)
        else:
            with pytest.raises(ClaimLostError):
                self.runner.run(held.claim.finish(200, answer))

    @rule(held=consumes(requests))
    def release(self, held: Held) -> None:
        self.runner.run(held.claim.release())

        if held is self.holder:
            self.holder = None

    @rule(ms=st.sampled_from([1, LEASE_MS // 2, LEASE_MS - 1, LEASE_MS, TTL_MS - 1, TTL_MS]))
    def time_passes(self, ms: int) -> None:
        self.clock.advance(ms)

    def forget_who_slept_too_long(self) -> None:
        """A holder may be late by any time while its record is there, and loses with it."""
        if self.clock.monotonic_ms() - self.renewed_ms >= TTL_MS:
            self.holder = None

    def forget_what_expired(self) -> None:
        """A request that begins takes over a claim that was not renewed: its holder lost it."""
        if self.finished is not None and self.clock.now_ms() >= self.finished[2]:
            self.finished = None
        if self.clock.monotonic_ms() - self.renewed_ms >= LEASE_MS:
            self.holder = None


TestOneKey = KeyMachine.TestCase


class _Unfenced(MemoryBackend):
    """A backend that replaces whatever is there."""

    async def replace(
        self, record_id: str, version: str | None, record: Record, *, stamp: str, ttl_ms: int
    ) -> str | None:
        seen = await self.load(record_id)
        version = seen.version if seen is not None else None
        return await super().replace(record_id, version, record, stamp=stamp, ttl_ms=ttl_ms)


def test_a_backend_that_does_not_compare_fails_the_model() -> None:
    machine = KeyMachine()
    machine.make_backend = lambda: _Unfenced(clock=machine.clock)  # type: ignore[method-assign]
    machine.start()
    zombie = machine.begin(fingerprint="tea")
    assert isinstance(zombie, Held)
    machine.time_passes(ms=LEASE_MS)
    machine.begin(fingerprint="tea")

    with pytest.raises(pytest.fail.Exception):
        machine.finish(held=zombie)

    machine.teardown()


class _Losing(MemoryBackend):
    """Loses the answers of some calls, or the calls themselves."""

    def __init__(self, clock: SimClock) -> None:
        super().__init__(clock=clock)
        self.lose: list[str] = []
        self.stamps: dict[str, str] = {}

    async def replace(
        self, record_id: str, version: str | None, record: Record, *, stamp: str, ttl_ms: int
    ) -> str | None:
        fault = self.lose.pop(0) if self.lose else ""
        if fault == "call":
            raise BackendUnavailableError("the call was lost")
        seen = await self.load(record_id)
        if seen is not None and seen.version == stamp:
            changed: str | None = stamp
        else:
            changed = await super().replace(record_id, version, record, stamp=stamp, ttl_ms=ttl_ms)
        if fault == "answer":
            raise BackendUnavailableError("the answer was lost")
        return changed


@pytest.mark.parametrize("fault", ["call", "answer"])
async def test_a_claim_whose_outcome_is_unknown_is_given_back(fault: str) -> None:
    clock = SimClock()
    backend = _Losing(clock)
    backend.lose = [fault]

    with pytest.raises(BackendUnavailableError):
        await Claim(backend, "key", "tea", SETTINGS, clock).take()

    assert isinstance(await Claim(backend, "key", "tea", SETTINGS, clock).take(), Take)


@pytest.mark.parametrize("faults", [["call"], ["answer"], ["answer", "call", "answer"]])
async def test_an_answer_is_stored_once_through_lost_calls_and_answers(faults: list[str]) -> None:
    clock = SimClock()
    backend = _Losing(clock)
    claim = Claim(backend, "key", "tea", SETTINGS, clock)
    await claim.take()
    backend.lose = faults

    stored = await claim.finish(200, Answer(200, (), b"done"))

    assert stored
    again = await Claim(backend, "key", "tea", SETTINGS, clock).take()
    assert again == Replay(Answer(200, (), b"done"))


async def test_a_waiting_request_that_is_cancelled_does_not_release_the_claim_of_another() -> None:
    clock = SimClock()
    backend = MemoryBackend(clock=clock)
    await Claim(backend, "key", "tea", SETTINGS, clock).take()
    waiting = Claim(backend, "key", "tea", SETTINGS, clock)
    assert isinstance(await waiting.take(), Running)

    await waiting.release()

    assert isinstance(await Claim(backend, "key", "tea", SETTINGS, clock).take(), Running)


async def test_a_full_memory_refuses_new_keys_and_drops_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = SimClock()
    backend = MemoryBackend(records_max=1, clock=clock)
    await Claim(backend, "first", "tea", SETTINGS, clock).take()

    with pytest.raises(BackendUnavailableError, match="records_max"):
        await Claim(backend, "second", "tea", SETTINGS, clock).take()

    assert "one process" in caplog.text
    clock.advance(TTL_MS)
    assert isinstance(await Claim(backend, "second", "tea", SETTINGS, clock).take(), Take)
