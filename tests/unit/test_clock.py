"""The clock of the machine: it is followed for dates, and decisions never go back."""

from __future__ import annotations

import pytest

from fencepost import clock as clock_module
from fencepost.clock import SystemClock

HOUR_MS = 3_600_000


class Machine:
    """The two clocks of a machine, set by hand; it stands in for the module `time`."""

    def __init__(self) -> None:
        self.wall_ms = 1_700_000_000_000
        self.up_ms = 5_000

    def pass_ms(self, ms: int) -> None:
        """Let time pass, for both clocks."""
        self.wall_ms += ms
        self.up_ms += ms

    def time_ns(self) -> int:
        return self.wall_ms * 1_000_000

    def monotonic_ns(self) -> int:
        return self.up_ms * 1_000_000


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(clock_module, "time", made)
    return made


def test_dates_follow_the_wall_clock_in_both_directions(machine: Machine) -> None:
    clock = SystemClock()

    for set_ms in (HOUR_MS, -2 * HOUR_MS):
        machine.wall_ms += set_ms
        assert clock.wall_ms() == machine.wall_ms


def test_decisions_follow_a_machine_that_was_suspended(machine: Machine) -> None:
    clock = SystemClock()
    before_ms = clock.now_ms()

    machine.wall_ms += HOUR_MS  # the monotonic clock stood still meanwhile

    assert clock.now_ms() == before_ms + HOUR_MS


def test_decisions_never_go_back_and_never_stand_still(machine: Machine) -> None:
    clock = SystemClock()
    before_ms = clock.now_ms()
    machine.wall_ms -= HOUR_MS

    seen = [clock.now_ms()]
    for _ in range(60):
        machine.pass_ms(60_000)
        seen.append(clock.now_ms())

    assert seen == sorted(seen)
    assert seen[0] == before_ms
    assert seen[-1] == before_ms + HOUR_MS // 2


def test_decisions_meet_a_clock_that_was_set_back_and_then_follow_it(machine: Machine) -> None:
    clock = SystemClock()
    clock.now_ms()
    machine.wall_ms -= HOUR_MS
    clock.now_ms()
    machine.pass_ms(2 * HOUR_MS)

    assert clock.now_ms() == machine.wall_ms
    machine.pass_ms(7)
    assert clock.now_ms() == machine.wall_ms


def test_durations_do_not_notice_that_the_wall_clock_was_set(machine: Machine) -> None:
    clock = SystemClock()
    before_ms = clock.monotonic_ms()

    machine.wall_ms += HOUR_MS
    machine.up_ms += 3

    assert clock.monotonic_ms() == before_ms + 3
    assert clock.monotonic_ns() == (before_ms + 3) * 1_000_000
