"""Chunks in memory: reads give what they give without them, whatever becomes of the streams."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fencepost.protocol.appends import Appended
from fencepost.protocol.creates import Created
from fencepost.protocol.offsets import START, Offset
from fencepost.store.contract import Chunk, Missing, StreamInfo, Truncated
from fencepost.store.maintain.jobs import Upkeep
from fencepost.store.read.chunk_cache import ENTRY_BYTES, ChunkCache
from fencepost.testing.clock import SimClock
from tests.contract.subject import ENGINES, Subject, answered

DAY_MS = 86_400_000


class Counted:
    """The store's reader threads, and how often they were asked for a chunk."""

    def __init__(self, subject: Subject) -> None:
        self.count = 0
        store = cast(Any, subject.store)
        self._submit = store.readers.submit
        store.chunks._readers = self

    def submit(self, work: Callable[[Any], Any]) -> asyncio.Future[Any]:
        self.count += 1
        return cast(asyncio.Future[Any], self._submit(work))

    async def run(self, work: Callable[[Any], Any]) -> Any:
        return await self.submit(work)


def stats(subject: Subject) -> dict[str, float]:
    found: dict[str, float] = cast(Any, subject.store).chunks.stats()
    return {name.removeprefix("chunk_cache_"): value for name, value in found.items()}


def bound(subject: Subject, bytes_max: int) -> None:
    """Give the store's cache another size, and nothing in it."""
    store = cast(Any, subject.store)
    store.chunks = ChunkCache(store.readers, bytes_max=bytes_max)


async def test_a_chunk_that_is_read_again_comes_from_memory(subject: Subject) -> None:
    await subject.made("s", body=b"a" * 5_000)
    threads = Counted(subject)

    chunks = [await subject.read("s", bytes_max=1_000) for _ in range(5)]

    assert {chunk.data for chunk in chunks} == {b"a" * 1_000}
    assert threads.count == 2
    assert stats(subject) == {"hits_total": 3, "misses_total": 2, "bytes": 1_000 + ENTRY_BYTES}


async def test_readers_who_start_together_read_each_chunk_from_disk_once(subject: Subject) -> None:
    await subject.made("s", body=b"000" * 100)
    for number in range(1, 50):
        await subject.appended("s", b"%03d" % number * 100)
    info = await subject.info("s")
    expected = b"".join(b"%03d" % number * 100 for number in range(50))
    threads = Counted(subject)

    async def read_all() -> bytes:
        parts, at = [], START
        while at != info.tail:
            chunk = await subject.store.read(info, at, bytes_max=4_000)
            assert isinstance(chunk, Chunk)
            parts.append(chunk.data)
            at = chunk.next
        return b"".join(parts)

    found = await asyncio.gather(*(read_all() for _ in range(100)))

    assert set(found) == {expected}
    assert threads.count == 4


async def test_a_stream_made_again_at_its_path_is_not_answered_from_the_old_one(
    subject: Subject,
) -> None:
    await subject.made("s", body=b"old" * 1_000)
    for _ in range(3):
        assert (await subject.read("s", bytes_max=30)).data == b"old" * 10
    assert stats(subject)["hits_total"] == 1

    await subject.delete("s")
    await subject.made("s", body=b"new" * 1_000)

    for _ in range(3):
        assert (await subject.read("s", bytes_max=30)).data == b"new" * 10


async def test_what_is_truncated_or_deleted_is_not_read_from_memory(subject: Subject) -> None:
    await subject.made("s", body=b"one,")
    await subject.appended("s", b"two,")
    for _ in range(3):
        assert (await subject.read("s", bytes_max=4)).data == b"one,"
    info = await subject.info("s")

    await answered(truncating(subject, "s", Offset(1, 4)))
    assert await subject.read("s", bytes_max=4) == Truncated(Offset(1, 4))

    await subject.delete("s")
    assert await subject.look("s") == Missing()
    if "sqlite" in type(subject.store).__module__:
        # PostgreSQL answers what was true when the reader looked.
        assert await subject.store.read(info, START, bytes_max=4) == Missing()


def truncating(subject: Subject, path: str, at: Offset) -> asyncio.Future[Any]:
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    subject.store.truncate(path, at, answer.set_result)
    return answer


async def test_a_tail_that_moves_on_is_read_anew(subject: Subject) -> None:
    await subject.made("s", body=b"one,")
    for _ in range(3):
        assert (await subject.read("s")).data == b"one,"

    await subject.appended("s", b"two,")

    assert (await subject.read("s")).data == b"one,two,"


async def test_forks_read_the_chunks_of_their_source(subject: Subject) -> None:
    await subject.made("source", body=b"x" * 10_000)
    await subject.fork("one", "source")
    await subject.fork("two", "source", Offset(1, 10_000))
    threads = Counted(subject)

    for path in ("source", "one", "two", "one"):
        assert (await subject.read(path, bytes_max=4_000)).data == b"x" * 4_000

    assert threads.count == 2
    assert stats(subject)["hits_total"] == 2


async def test_streams_that_are_read_once_put_nothing_out(subject: Subject) -> None:
    bound(subject, 64_000)
    await subject.made("hot", body=b"h" * 4_000)
    await subject.made("long", body=b"l" * 400_000)
    for _ in range(2):
        await subject.content("hot")
    kept = stats(subject)["bytes"]

    assert await subject.content("long", bytes_max=4_000) == b"l" * 400_000

    assert kept == 4_000 + ENTRY_BYTES
    assert stats(subject)["bytes"] == kept
    threads = Counted(subject)
    await subject.content("hot")
    assert threads.count == 0


async def test_the_memory_is_bounded_and_what_was_used_last_stays(subject: Subject) -> None:
    bound(subject, 40_000)
    await subject.made("hot", body=b"h" * 4_000)
    await subject.made("long", body=b"l" * 100_000)
    await subject.made("huge", body=b"H" * 6_000)

    for _ in range(2):
        await subject.content("hot")
    threads = Counted(subject)
    for at in range(0, 100_000, 4_000):
        for _ in range(3):
            await subject.read("long", Offset(0, at), bytes_max=4_000)
            await subject.content("hot")
        assert stats(subject)["bytes"] <= 40_000

    assert threads.count == 2 * 25
    before = stats(subject)["bytes"]
    for _ in range(3):
        await subject.content("huge")  # more than an eighth of all
    assert stats(subject)["bytes"] == before > 30_000


async def test_with_no_memory_every_reader_reads(subject: Subject) -> None:
    bound(subject, 0)
    await subject.made("s", body=b"s" * 100)
    threads = Counted(subject)

    for _ in range(3):
        await subject.read("s")

    assert threads.count == 3
    assert stats(subject)["bytes"] == 0


async def test_a_reader_that_leaves_takes_nothing_from_the_others(subject: Subject) -> None:
    await subject.made("s", body=b"s" * 100)
    info = await subject.info("s")
    threads = Counted(subject)
    tasks = [
        asyncio.create_task(cast(Any, subject.store.read(info, START, bytes_max=50)))
        for _ in range(3)
    ]
    await asyncio.sleep(0)

    tasks[0].cancel()

    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert [cast(Chunk, chunk).data for chunk in found[1:]] == [b"s" * 50] * 2
    assert threads.count == 1


# Reads with memory and without, under everything that changes streams

PATHS = ("a", "b", "c")
STEPS = st.one_of(
    st.tuples(st.just("append"), st.sampled_from(PATHS), st.integers(1, 40)),
    st.tuples(st.just("truncate"), st.sampled_from(PATHS), st.integers(0, 50)),
    st.tuples(st.just("delete"), st.sampled_from(PATHS), st.just(0)),
    st.tuples(st.just("fork"), st.sampled_from(PATHS), st.integers(0, 50)),
    st.tuples(st.just("purge"), st.just("a"), st.just(0)),
    st.tuples(st.just("read"), st.sampled_from(PATHS), st.integers(1, 3)),
)


@pytest.mark.parametrize("engine", sorted(ENGINES))
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    steps=st.lists(STEPS, min_size=10, max_size=40),
    json=st.booleans(),
    bytes_max=st.sampled_from([1, 7, 50, 100]),
    memory=st.sampled_from([9 * ENTRY_BYTES, 1 << 20]),
)
def test_reads_give_what_they_give_without_memory(
    steps: list[tuple[str, str, int]], json: bool, bytes_max: int, memory: int, engine: str
) -> None:
    """Every read of any stream, at any offset given out so far, is answered as without memory."""
    asyncio.run(_compare(steps, json, bytes_max, memory, engine))


async def _compare(
    steps: list[tuple[str, str, int]], json: bool, bytes_max: int, memory: int, engine: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        clock = SimClock()
        subject = Subject(ENGINES[engine](Path(folder) / "data", clock), clock)
        bound(subject, memory)
        world = World(subject, "application/json" if json else "text/plain", bytes_max)
        try:
            for number, (step, path, value) in enumerate(steps):
                await getattr(world, step)(path, value, number)
                await world.compare()
        finally:
            await subject.close()


class World:
    """Three paths that streams come to and go from, and every offset that was given out."""

    def __init__(self, subject: Subject, media_type: str, bytes_max: int) -> None:
        self.subject = subject
        self.media_type = media_type
        self.bytes_max = bytes_max
        self.offsets: dict[str, dict[Offset, None]] = {path: {START: None} for path in PATHS}

    async def append(self, path: str, size: int, number: int) -> None:
        if not isinstance(await self.subject.look(path), StreamInfo):
            await self.subject.create(path, self.media_type)
        text = (b"%d " % number * size)[:size]
        body = b'["%b","%b"]' % (text, text[:3]) if "json" in self.media_type else text
        outcome = await self.subject.append(path, body, self.media_type)
        if isinstance(outcome, Appended):
            self.offsets[path][outcome.tail] = None

    async def truncate(self, path: str, value: int, _number: int) -> None:
        offsets = [*self.offsets[path]]
        await answered(truncating(self.subject, path, offsets[value % len(offsets)]))

    async def delete(self, path: str, _value: int, _number: int) -> None:
        await self.subject.delete(path)

    async def fork(self, path: str, value: int, _number: int) -> None:
        source = PATHS[value % len(PATHS)]
        offsets = [*self.offsets[source]]
        outcome = await self.subject.fork(path, source, offsets[value % len(offsets)])
        if isinstance(outcome, Created):
            self.offsets[path].update(self.offsets[source])

    async def purge(self, _path: str, _value: int, _number: int) -> None:
        self.subject.clock.advance(8 * DAY_MS)
        await Upkeep(self.subject.kept, self.subject.clock).purge()

    async def read(self, path: str, times: int, _number: int) -> None:
        """Some readers at once, from the beginning to the end."""
        if not isinstance(await self.subject.look(path), StreamInfo):
            return
        read = [self.subject.content(path, bytes_max=self.bytes_max) for _ in range(times)]
        assert len(set(await asyncio.gather(*read))) == 1

    async def compare(self) -> None:
        store = cast(Any, self.subject.store)
        plain = ChunkCache(store.readers, bytes_max=0)
        for path in PATHS:
            info = await self.subject.look(path)
            if not isinstance(info, StreamInfo):
                continue
            for after in [*self.offsets[path]]:
                kept, store.chunks = store.chunks, plain
                expected = await store.read(info, after, bytes_max=self.bytes_max)
                store.chunks = kept
                found = await store.read(info, after, bytes_max=self.bytes_max)
                assert found == expected
                if isinstance(found, Chunk):
                    self.offsets[path][found.next] = None
