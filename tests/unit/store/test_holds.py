"""Holding: who waits for a large commit, in which order they go on, and how commits are cut."""

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.appends import Append
from fencepost.protocol.commits import Commit, CommitItem, Part
from fencepost.store.large.commits import cut, is_large
from fencepost.store.large.locks import Holds
from fencepost.store.large.slices import Slice, decode_slice


def item(path: str, parts: int = 0) -> CommitItem:
    return CommitItem(
        Append(path, None, None), tuple(Part("t", f"{path}{n}") for n in range(parts))
    )


def commit(*paths: str, **more: Any) -> Commit:
    return Commit([item(path) for path in paths], **more)


class Queue:
    """Requests to streams, decided at once unless they must wait."""

    def __init__(self) -> None:
        self.holds = Holds()
        self.decided: list[str] = []

    def ask(self, name: str, *paths: str) -> None:
        request = commit(*paths)
        if self.holds.all and self.holds.keeps_commit(request, lambda: self.ask(name, *paths)):
            return
        self.decided.append(name)


async def test_what_is_held_waits_and_everything_else_goes_on() -> None:
    queue = Queue()
    held = queue.holds.take(commit("a", "b"))

    queue.ask("first", "a")
    queue.ask("free", "c")
    queue.ask("second", "c", "b")
    await queue.holds.release(held)
    queue.ask("third", "a")

    assert queue.decided == ["free", "first", "second", "third"]


async def test_a_commit_that_came_later_does_not_hold_up_what_came_before() -> None:
    queue = Queue()
    first = queue.holds.take(commit("a"))
    queue.ask("between", "a", "b")
    second = queue.holds.take(commit("b"))
    queue.ask("after", "a", "b")

    await queue.holds.release(first)
    assert queue.decided == ["between"]
    await queue.holds.release(second)

    assert queue.decided == ["between", "after"]


async def test_whoever_comes_while_others_go_on_stands_behind_them() -> None:
    queue = Queue()
    held = queue.holds.take(commit("a"))
    for number in range(200):
        queue.ask(f"{number:03}", "a")

    releasing = asyncio.create_task(queue.holds.release(held))
    await asyncio.sleep(0)
    assert 0 < len(queue.decided) < 200, "some of them in each turn"
    queue.ask("late", "a")
    await releasing

    assert queue.decided == [*(f"{number:03}" for number in range(200)), "late"]


async def test_a_page_waits_only_if_it_shows_what_is_half_carried_out() -> None:
    holds = Holds()
    held = holds.take(commit("a"))
    holds.begin(held)
    held.carrying = True
    reads: list[int] = []

    async def read() -> list[str]:
        reads.append(len(reads))
        return ["a"]

    async def elsewhere() -> list[str]:
        return ["b"]

    assert await holds.whole(elsewhere, list) == ["b"]
    waiting = asyncio.create_task(holds.whole(read, list))
    await asyncio.sleep(0)
    assert not waiting.done()
    holds.shown()

    assert await waiting == ["a"]
    assert reads == [0, 1], "read again, not shown what was read before"


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(0, 7))
def test_slices_hold_everything_in_order_and_none_is_much_too_heavy(
    parts: list[int], weight_max: int
) -> None:
    """Joined, the slices are the items; each is within its bounds but for its last item."""
    items = [item(f"s{number}", count) for number, count in enumerate(parts)]

    slices = list(cut(items, weight_max))

    assert [one for piece in slices for one in piece] == items
    for piece in slices:
        assert 0 < len(piece) <= max(weight_max, 1)
        assert sum(1 + len(one.parts) for one in piece[:-1]) < max(2 * weight_max, 1)


def test_a_commit_is_large_by_its_appends_or_by_its_parts() -> None:
    assert not is_large(Commit([item("s")] * 128), 128)
    assert is_large(Commit([item("s")] * 129), 128)
    assert not is_large(Commit([item("s", 254)]), 128)
    assert is_large(Commit([item("s", 256)]), 128)


values = st.none() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.binary() | st.booleans()
rows = st.lists(st.lists(values, max_size=5).map(tuple), max_size=4)


@given(rows, rows, st.lists(st.tuples(st.text(), st.lists(values).map(tuple)), max_size=3))
def test_a_slice_is_on_disk_what_it_was(
    some: list[Any], others: list[Any], statements: list[Any]
) -> None:
    """Reading what was written gives the same rows, whatever their values."""
    piece = Slice(some, others, some, others, some, statements, True)

    assert decode_slice(piece.encode()) == piece
