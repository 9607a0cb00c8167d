"""Which live readers of the log a commit wakes, and what that costs."""

import asyncio
from typing import NamedTuple, cast

import pytest

from fencepost.protocol.globs import Glob
from fencepost.protocol.logs import Selection
from fencepost.server import waiters as waiting
from fencepost.server.waiters import Waiters, Waiting
from fencepost.store.contract import Published


class Info(NamedTuple):
    id: int
    path: str


class Change(NamedTuple):
    info: Info


def change(stream: int, path: str) -> list[Published]:
    return cast(list[Published], [Change(Info(stream, path))])


class Counting(Selection):
    """A selection that counts how often it is asked."""

    asked = 0

    def takes(self, stream_id: int, path: str) -> bool:
        self.asked += 1
        return super().takes(stream_id, path)


def reader(waiters: Waiters, pattern: str, principal: str = "") -> Waiting:
    return Waiting(waiters, Counting(globs=[Glob(pattern)]), principal)


async def settle(waiters: Waiters) -> None:
    """Let the steps that are left be taken."""
    for _ in range(1_000):
        await asyncio.sleep(0)
    assert waiters.uncompared_count == 0


async def test_a_commit_wakes_the_readers_that_select_its_stream() -> None:
    waiters = Waiters()
    with reader(waiters, "a/*") as one, reader(waiters, "b/*") as other:
        waiters.published(change(1, "a/x"))

        assert one.news.is_set()
        assert not other.news.is_set()


async def test_a_stream_and_a_selection_are_compared_once() -> None:
    waiters = Waiters()
    with reader(waiters, "a/*") as one:
        for _ in range(5):
            one.look()
            waiters.published(change(1, "a/x"))
            assert one.news.is_set()
        with reader(waiters, "a/*") as same:
            waiters.published(change(1, "a/x"))
            assert same.news.is_set()

        assert (one.selection.asked, same.selection.asked) == (1, 0)  # type: ignore[attr-defined]


async def test_a_reader_that_comes_later_is_woken_too() -> None:
    waiters = Waiters()
    with reader(waiters, "b/*"):
        waiters.published(change(1, "a/x"))
        with reader(waiters, "a/*") as late:
            waiters.published(change(1, "a/x"))

            assert late.news.is_set()


async def test_one_principal_with_many_patterns_does_not_delay_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "STEP_COMPARISONS", 2)
    waiters = Waiters()
    others = [reader(waiters, f"x{number}/*", "mallory") for number in range(50)]
    for other in others:
        other.__enter__()
    with reader(waiters, "a/*", "ann") as one:
        waiters.published(change(1, "a/x"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

        assert one.news.is_set()
        assert waiters.uncompared_count == 1
        await settle(waiters)
    assert not any(other.news.is_set() for other in others)


async def test_readers_are_woken_unasked_when_too_much_waits_to_be_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "STEP_COMPARISONS", 1)
    monkeypatch.setattr(waiting, "UNCOMPARED_MAX", 3)
    waiters = Waiters()
    with reader(waiters, "a/*") as one, reader(waiters, "c/*"), reader(waiters, "b/*") as other:
        for stream in range(6):
            waiters.published(change(stream, f"b/{stream}"))

        assert one.news.is_set()
        assert other.news.is_set()


async def test_an_index_that_grew_too_large_is_begun_anew_and_loses_no_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "STREAMS_MAX", 4)
    waiters = Waiters()
    with reader(waiters, "a/*") as one:
        for stream in range(20):
            one.look()
            waiters.published(change(stream % 7, f"a/{stream % 7}"))
            await settle(waiters)
            assert one.news.is_set()
