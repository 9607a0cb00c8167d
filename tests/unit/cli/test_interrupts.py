"""Ctrl-C is taken where nothing is half done, with real signals to this process."""

from __future__ import annotations

import signal

import pytest

from fencepost.cli.interrupts import interrupts


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_in_the_middle_of_work_is_raised_when_asked_for() -> None:
    with interrupts() as pressed:
        pressed.check()
        press()
        with pytest.raises(KeyboardInterrupt):
            pressed.check()


def test_ctrl_c_before_a_wait_ends_it_before_it_begins() -> None:
    with interrupts() as pressed:
        press()
        with pytest.raises(KeyboardInterrupt), pressed.waiting():
            pytest.fail("it waited")


def test_ctrl_c_ends_a_wait_at_once_and_not_the_work_after_it() -> None:
    with interrupts() as pressed:
        with pytest.raises(KeyboardInterrupt), pressed.waiting():
            press()
        press()


def test_ctrl_c_a_second_time_is_raised_at_once() -> None:
    with interrupts():
        press()
        with pytest.raises(KeyboardInterrupt):
            press()


def test_ctrl_c_is_as_before_after_the_block() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
