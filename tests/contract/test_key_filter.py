"""Keys behind the embedded store's filter and its index, which is written later than the keys.

What was used is known, however it was used and wherever it stands.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import apsw
import pytest

from fencepost.protocol.appends import Appended, KeyReused, Replayed
from fencepost.protocol.commits import Committed
from fencepost.store.read.lists import keys
from fencepost.store.settings import SqliteSettings
from fencepost.store.sqlite.check import check
from fencepost.store.sqlite.maintain import SqliteUpkeep
from fencepost.store.sqlite.store import SqliteStore
from fencepost.store.write.keys import RecentKeys
from fencepost.testing.clock import SimClock
from tests.contract.conditional import ask_append, ask_commit, item
from tests.contract.subject import Subject
from tests.old_folders import make_older


class SlicingEngine:
    """The embedded store, carrying out every larger commit in slices."""

    def __init__(self, folder: Path, clock: SimClock) -> None:
        self.settings = SqliteSettings(folder=folder, commit_slice_appends=2)
        self._clock = clock
        self.store: SqliteStore | None = None

    def open(self) -> SqliteStore:
        self.store = SqliteStore(self.settings, self._clock)
        return self.store

    async def close(self) -> None:
        assert self.store is not None
        await self.store.close()


async def learn(subject: Subject, clock: SimClock) -> SqliteStore:
    store = subject.store
    assert isinstance(store, SqliteStore)
    await SqliteUpkeep(store, clock).learn_keys()
    assert store.keys.is_complete
    return store


async def index(store: SqliteStore, clock: SimClock) -> int:
    return await SqliteUpkeep(store, clock).index_keys(at_least=1)


async def listed(store: SqliteStore, limit: int) -> list[tuple[str | None, str]]:
    """Streams and keys of all pages of the list."""
    found = []
    after = (-1, "", "")
    while True:
        page = await store.readers.run(
            partial(keys, after=after, as_of_ms=None, owner=None, limit=limit)
        )
        found += [(key.stream, key.key) for key in page.entries]
        if page.next is None:
            return found
        stream, principal, key_ = page.next
        after = (int(stream), principal, key_)


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("reopened", [False, True])
async def test_a_used_key_is_recognized_behind_the_filter(
    tmp_path: Path, clock: SimClock, reopened: bool, indexed: bool
) -> None:
    subject = Subject(SlicingEngine(tmp_path, clock), clock)
    await subject.made("s")
    await ask_append(subject, "s", b"before", key="before")
    store = await learn(subject, clock)

    single = await ask_append(subject, "s", b"1", key="single")
    small = await ask_commit(subject, item("s", b"2", key="small"))
    paths = [f"many/{number}" for number in range(9)]
    many = [item(path, b"3", key=path, creates=True) for path in paths]
    large = await ask_commit(subject, *many, key="whole")
    assert isinstance(single, Appended)
    assert isinstance(small, Committed)
    assert isinstance(large, Committed)
    if indexed:
        assert await index(store, clock) == 13
    if reopened:
        await subject.reopen()
        store = await learn(subject, clock)

    assert len(store.keys.recent) == (0 if indexed else 13)
    assert store.keys.is_new((1, "", "never used"))
    for key, body in (("before", b"before"), ("single", b"1"), ("small", b"2")):
        assert isinstance(await ask_append(subject, "s", body, key=key), Replayed), key
        assert isinstance(await ask_append(subject, "s", b"other", key=key), KeyReused), key
    for path in paths:
        assert isinstance(await ask_append(subject, path, b"3", key=path), Replayed), path
    again = await ask_commit(subject, *many, key="whole")
    assert not isinstance(again, Committed)
    await subject.close()


async def test_keys_are_listed_in_one_order_whether_indexed_or_not(
    tmp_path: Path, clock: SimClock
) -> None:
    subject = Subject(SlicingEngine(tmp_path, clock), clock)
    store = await learn(subject, clock)
    await subject.made("s")
    for key in ("f", "b", "d"):
        await ask_append(subject, "s", b"1", key=key)
    await index(store, clock)
    for key in ("c", "a", "e"):
        await ask_append(subject, "s", b"1", key=key)

    pages = [await listed(store, limit) for limit in (1, 2, 5, 6, 99)]

    assert pages == [[("s", key) for key in "abcdef"]] * 5
    await subject.close()


async def test_a_key_used_after_others_were_swept_is_indexed_like_any(
    tmp_path: Path, clock: SimClock
) -> None:
    """Rows are numbered by the newest there is, so the numbers of swept keys come back."""
    engine = SlicingEngine(tmp_path, clock)
    engine.settings = replace(engine.settings, key_retention_s=60)
    subject = Subject(engine, clock)
    store = await learn(subject, clock)
    await subject.made("s")
    for key in ("a", "b", "c"):
        await ask_append(subject, "s", b"1", key=key)
    await index(store, clock)
    clock.advance(61_000)
    assert await SqliteUpkeep(store, clock).sweep_keys() == 3
    await ask_append(subject, "s", b"2", key="b")
    assert isinstance(await ask_append(subject, "s", b"3", key="c"), Appended)

    assert await index(store, clock) == 2

    assert isinstance(await ask_append(subject, "s", b"2", key="b"), Replayed)
    assert isinstance(await ask_append(subject, "s", b"1", key="c"), KeyReused)
    assert await listed(store, 9) == [("s", "b"), ("s", "c")]
    await subject.close()
    assert check(tmp_path).findings == []


async def test_a_key_swept_before_it_was_indexed_may_be_used_again(
    tmp_path: Path, clock: SimClock
) -> None:
    engine = SlicingEngine(tmp_path, clock)
    engine.settings = replace(engine.settings, key_retention_s=60)
    subject = Subject(engine, clock)
    store = await learn(subject, clock)
    await subject.made("s")
    await ask_append(subject, "s", b"1", key="a")
    clock.advance(61_000)
    await SqliteUpkeep(store, clock).sweep_keys()

    assert isinstance(await ask_append(subject, "s", b"2", key="a"), Appended)
    assert isinstance(await ask_append(subject, "s", b"2", key="a"), Replayed)
    await index(store, clock)
    assert isinstance(await ask_append(subject, "s", b"2", key="a"), Replayed)
    await subject.close()
    assert check(tmp_path).findings == []


@pytest.mark.parametrize("before_s", [0, 600, 30])
async def test_keys_go_when_their_time_is_over_however_long_older_ones_stay(
    tmp_path: Path, clock: SimClock, before_s: int
) -> None:
    """How long keys are kept was changed: each is kept as long as was said when it was used."""
    engine = SlicingEngine(tmp_path, clock)
    engine.settings = replace(engine.settings, key_retention_s=before_s)
    subject = Subject(engine, clock)
    await subject.made("s")
    await ask_append(subject, "s", b"1", key="older")
    engine.settings = replace(engine.settings, key_retention_s=60)
    await subject.reopen()
    store = await learn(subject, clock)
    await ask_append(subject, "s", b"2", key="newer")
    upkeep = SqliteUpkeep(store, clock)

    clock.advance(59_000)
    for _ in range(3):
        await upkeep.sweep_keys()
    assert [key for _, key in await listed(store, 9)] == ["newer", "older"][: 1 + (before_s != 30)]
    clock.advance(1_000)
    for _ in range(3):
        await upkeep.sweep_keys()

    assert [key for _, key in await listed(store, 9)] == (["older"] if before_s != 30 else [])
    await subject.close()


async def test_keys_of_a_deleted_stream_go_with_it_indexed_or_not(
    tmp_path: Path, clock: SimClock
) -> None:
    subject = Subject(SlicingEngine(tmp_path, clock), clock)
    store = await learn(subject, clock)
    for path in ("s", "t"):
        await subject.made(path)
        await ask_append(subject, path, b"1", key="indexed")
    await index(store, clock)
    for path in ("t", "s"):
        await ask_append(subject, path, b"1", key="recent")
    await subject.delete("s")
    clock.advance(store.settings.log_retention_ms)

    await SqliteUpkeep(store, clock).purge()

    assert await listed(store, 9) == [("t", "indexed"), ("t", "recent")]
    await ask_append(subject, "t", b"2", key="after")
    await index(store, clock)
    for key in ("indexed", "recent", "after"):
        assert not isinstance(await ask_append(subject, "t", b"other", key=key), Appended), key
    await subject.close()
    assert check(tmp_path).findings == []


async def test_keys_are_known_when_indexing_them_fails_and_indexed_when_it_does_not(
    tmp_path: Path, clock: SimClock
) -> None:
    subject = Subject(SlicingEngine(tmp_path, clock), clock)
    store = await learn(subject, clock)
    created = await subject.made("s")
    for key in ("a", "b"):
        await ask_append(subject, "s", key.encode(), key=key)
    stray = f"INSERT INTO key_places VALUES ({created.stream.id}, '', 'b', 4711)"
    await store.between_commits(lambda connection: connection.raw.execute(stray).fetchall())

    with pytest.raises(apsw.ConstraintError):
        await index(store, clock)
    await ask_append(subject, "s", b"c", key="c")

    for key in ("a", "b", "c"):
        assert isinstance(await ask_append(subject, "s", key.encode(), key=key), Replayed), key
    away = "DELETE FROM key_places WHERE id = 4711"
    await store.between_commits(lambda connection: connection.raw.execute(away).fetchall())
    assert await index(store, clock) == 3
    assert len(store.keys.recent) == 0
    for key in ("a", "b", "c"):
        assert isinstance(await ask_append(subject, "s", key.encode(), key=key), Replayed), key
    await subject.close()
    assert check(tmp_path).findings == []


async def test_two_keys_of_one_hash_are_told_apart(tmp_path: Path, clock: SimClock) -> None:
    """No streams have these numbers; in Python, minus one and minus two come to the same hash."""
    subject = Subject(SlicingEngine(tmp_path, clock), clock)
    store = await learn(subject, clock)
    places = [(-1, "", "k"), (-2, "", "k")]
    rows = [
        (*place, bytes([n]) * 16, 0, 0, 0, 0, 0, n, 0, 0, None) for n, place in enumerate(places)
    ]
    await store.between_commits(lambda connection: connection.execute_many("save_key", rows))
    recent = RecentKeys()
    recent.add(places, 2)
    assert hash(places[0]) == hash(places[1])

    found = [store.lookup("find_unindexed_key", place) for place in places]

    reader = partial(RecentKeys.find, recent)
    assert [await store.readers.run(partial(reader, place=place)) for place in places] == found
    assert [row[0][0] for row in found] == [bytes(16), b"\x01" * 16]
    await subject.close()


async def test_keys_of_a_folder_from_before_the_index_are_known(
    tmp_path: Path, clock: SimClock
) -> None:
    subject = Subject(SlicingEngine(tmp_path, clock), clock)
    await subject.made("s")
    for key in ("b", "a"):
        await ask_append(subject, "s", key.encode(), key=key)
    await ask_commit(subject, item("s", b"c"), key="whole")
    await subject.close()
    make_older(tmp_path, version=8)

    subject = Subject(SlicingEngine(tmp_path, clock), clock)

    store = await learn(subject, clock)
    assert [key for _, key in await listed(store, 9)] == ["whole", "a", "b"]
    for key in ("b", "a"):
        assert isinstance(await ask_append(subject, "s", key.encode(), key=key), Replayed)
        assert isinstance(await ask_append(subject, "s", b"other", key=key), KeyReused)
    assert not isinstance(await ask_commit(subject, item("s", b"c"), key="whole"), Committed)
    await subject.close()
    assert check(tmp_path).findings == []
