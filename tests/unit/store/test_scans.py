"""The fair queue of scans: principals take turns, and a reader that leaves frees its place."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from fencepost.store.read.chunks import Readers
from fencepost.store.read.scans import Scans


class HeldReaders(Readers[Any]):
    """Threads that finish a slice when the test says so."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, asyncio.Future[Any]]] = []

    async def run(self, work: Any) -> Any:
        end: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.begun.append((work(None), end))
        return await end

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.begun]

    def end(self, place: int) -> None:
        self.begun[place][1].set_result(self.begun[place][0])


async def settle() -> None:
    """Let every task that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


def ask(scans: Scans, principal: str, name: str) -> asyncio.Task[str]:
    return asyncio.create_task(scans.run(principal, lambda _: name))


async def test_principals_take_turns_however_much_one_of_them_asks() -> None:
    readers = HeldReaders()
    scans = Scans(readers, threads=1)
    tasks = [ask(scans, "mallory", f"m{number}") for number in range(4)]
    await settle()
    tasks += [ask(scans, "ann", "a0"), ask(scans, "ann", "a1"), ask(scans, "bob", "b0")]
    await settle()
    assert scans.waiting_count == 6

    for place in range(7):
        readers.end(place)
        await settle()

    assert readers.names == ["m0", "m1", "a0", "b0", "m2", "a1", "m3"]
    assert [task.result() for task in tasks] == ["m0", "m1", "m2", "m3", "a0", "a1", "b0"]
    assert scans.stats() == {"scan_slices_total": 7, "scans_waiting": 0}


async def test_a_reader_that_leaves_the_queue_takes_no_turn() -> None:
    readers = HeldReaders()
    scans = Scans(readers, threads=1)
    first = ask(scans, "ann", "first")
    gone, stays = ask(scans, "mallory", "gone"), ask(scans, "mallory", "stays")
    await settle()

    gone.cancel()
    await settle()
    readers.end(0)
    await settle()

    assert readers.names == ["first", "stays"]
    readers.end(1)
    assert await stays == "stays"
    assert await first == "first"


async def test_a_reader_that_leaves_as_its_turn_comes_passes_the_turn_on() -> None:
    readers = HeldReaders()
    scans = Scans(readers, threads=1)
    first, gone = ask(scans, "ann", "first"), ask(scans, "mallory", "gone")
    stays = ask(scans, "bob", "stays")
    await settle()
    readers.end(0)
    # The task of the slice ends, then it tells the queue: gone has the turn and has not run since.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert scans.waiting_count == 1

    gone.cancel()
    await settle()

    assert readers.names == ["first", "stays"]
    readers.end(1)
    assert await stays == "stays"
    assert await first == "first"


@pytest.mark.parametrize("steps", range(5))
async def test_a_reader_that_leaves_while_a_slice_ends_takes_no_thread_along(steps: int) -> None:
    readers = HeldReaders()
    scans = Scans(readers, threads=1)
    first, gone = ask(scans, "ann", "first"), ask(scans, "mallory", "gone")
    stays = ask(scans, "bob", "stays")
    await settle()

    readers.end(0)
    for _ in range(steps):
        await asyncio.sleep(0)
    gone.cancel()
    await settle()

    places = {name: place for place, name in enumerate(readers.names)}
    if "gone" in places:  # its turn had come: its slice keeps the thread until it ends
        readers.end(places["gone"])
        await settle()
    readers.end(readers.names.index("stays"))
    assert await stays == "stays"
    assert await first == "first"
    await settle()
    assert (scans.waiting_count, scans._free, scans._running) == (0, 1, Counter())


@pytest.mark.parametrize("seed", range(40))
async def test_every_thread_comes_back_whatever_readers_do(seed: int) -> None:
    """Readers of three principals come, leave and are served, with any number of steps between."""
    dice = random.Random(seed)
    readers = HeldReaders()
    scans = Scans(readers, threads=dice.choice([1, 2, 3]))
    free = scans._free
    tasks: list[asyncio.Task[str]] = []
    for number in range(200):
        move = dice.choice(["ask", "ask", "leave", "end", "end"])
        under_way = [at for at, (_, end) in enumerate(readers.begun) if not end.done()]
        if move == "ask":
            tasks.append(ask(scans, dice.choice("abc"), str(number)))
        elif move == "leave" and tasks:
            dice.choice(tasks).cancel()
        elif move == "end" and under_way:
            readers.end(dice.choice(under_way))
        for _ in range(dice.randrange(4)):
            await asyncio.sleep(0)

    await settle()
    place = 0
    while place < len(readers.begun):
        if not readers.begun[place][1].done():
            readers.end(place)
            await settle()
        place += 1

    assert all(task.done() for task in tasks), "a reader waits for ever"
    assert (scans.waiting_count, scans._free, scans._running) == (0, free, Counter())


async def test_a_slice_keeps_its_thread_after_its_reader_has_left() -> None:
    readers = HeldReaders()
    scans = Scans(readers, threads=1)
    gone, stays = ask(scans, "mallory", "gone"), ask(scans, "ann", "stays")
    await settle()

    gone.cancel()
    await settle()
    assert readers.names == ["gone"]
    readers.end(0)
    await settle()

    assert readers.names == ["gone", "stays"]
    readers.end(1)
    assert await stays == "stays"


async def test_a_slice_that_fails_frees_its_thread() -> None:
    readers = HeldReaders()
    scans = Scans(readers, threads=1)
    fails, stays = ask(scans, "mallory", "fails"), ask(scans, "ann", "stays")
    await settle()

    readers.begun[0][1].set_exception(ValueError("broken"))
    await settle()
    readers.end(1)

    with pytest.raises(ValueError, match="broken"):
        await fails
    assert await stays == "stays"


async def test_a_principal_leaves_one_thread_to_the_others() -> None:
    readers = HeldReaders()
    scans = Scans(readers, threads=3)
    tasks = [ask(scans, "mallory", f"m{number}") for number in range(4)]
    await settle()
    assert readers.names == ["m0", "m1"]

    tasks.append(ask(scans, "ann", "a0"))
    await settle()
    assert readers.names == ["m0", "m1", "a0"]
    tasks.append(ask(scans, "bob", "b0"))
    await settle()
    assert readers.names == ["m0", "m1", "a0"]

    readers.end(2)
    await settle()
    assert readers.names == ["m0", "m1", "a0", "b0"], "mallory took the thread that is left"
    for place in range(6):
        if not readers.begun[place][1].done():
            readers.end(place)
            await settle()

    assert [task.result() for task in tasks] == ["m0", "m1", "m2", "m3", "a0", "b0"]
    assert (scans.waiting_count, scans._free) == (0, 3)
