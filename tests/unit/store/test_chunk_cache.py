"""Chunks in memory: what one reader could not read, the others try for themselves."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.streams import Segment
from fencepost.store.contract import Missing
from fencepost.store.read.chunk_cache import ASKED_MAX, ENTRY_BYTES, ChunkCache, Place, place_of
from fencepost.store.read.chunks import Piece, Readers

PIECE = Piece(b"x" * 100, Offset(1, 100))
PLACE = Place(7, START, 100, 100, False)


class HeldReaders(Readers[Any]):
    """Threads that finish a piece of work when the test says so."""

    def __init__(self) -> None:
        self.begun: list[asyncio.Future[Any]] = []

    def submit(self, work: Callable[[Any], Any]) -> asyncio.Future[Any]:
        work(None)
        end: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.begun.append(end)
        return end


async def settle() -> None:
    """Let every task that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


def ask(cache: ChunkCache[Any], place: Place = PLACE) -> asyncio.Task[Any]:
    return asyncio.create_task(cache.read(place, lambda _: None))


@pytest.mark.parametrize("failure", [Missing(), OSError("broken")])
async def test_what_comes_instead_of_a_chunk_is_the_affair_of_one_reader(failure: Any) -> None:
    readers = HeldReaders()
    cache = ChunkCache(readers, bytes_max=1 << 20)
    first, second = ask(cache), ask(cache)
    await settle()
    assert len(readers.begun) == 1

    if isinstance(failure, Exception):
        readers.begun[0].set_exception(failure)
    else:
        readers.begun[0].set_result(failure)
    await settle()
    readers.begun[1].set_result(PIECE)

    assert await second == PIECE
    if isinstance(failure, Exception):
        with pytest.raises(OSError, match="broken"):
            await first
    else:
        assert await first == failure
    assert cache.stats()["chunk_cache_bytes"] == 100 + ENTRY_BYTES


async def test_what_was_being_read_when_all_was_dropped_is_not_kept() -> None:
    readers = HeldReaders()
    cache = ChunkCache(readers, bytes_max=1 << 20)
    tasks = [ask(cache), ask(cache)]
    await settle()

    cache.clear()
    readers.begun[0].set_result(PIECE)

    assert await asyncio.gather(*tasks) == [PIECE, PIECE]
    assert cache.stats()["chunk_cache_bytes"] == 0


async def test_places_asked_for_once_are_forgotten_in_the_end() -> None:
    readers = HeldReaders()
    cache = ChunkCache(readers, bytes_max=1 << 20)
    for number in (0, *range(1, ASKED_MAX + 1), 0):
        task = ask(cache, PLACE._replace(stream_id=number))
        await settle()
        readers.begun[-1].set_result(PIECE)
        await task

    assert cache.stats()["chunk_cache_bytes"] == 0
    assert len(cache._asked) == ASKED_MAX


def test_a_fork_shares_what_lies_within_its_source() -> None:
    segments = (Segment(1, Offset(1, 100)), Segment(2, Offset(2, 300)))

    def places(after: int, bytes_max: int) -> tuple[int, int]:
        found = place_of(segments, Offset(0, after), bytes_max=bytes_max, is_json=False)
        return found.stream_id, found.end_bytes

    assert places(0, 99) == (1, 99)
    assert places(0, 100) == (2, 100)
    assert places(50, 100) == (2, 150)
    assert places(100, 100) == (2, 200)
    assert places(100, 1_000) == (2, 300)
