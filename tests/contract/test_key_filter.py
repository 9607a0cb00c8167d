"""Keys behind the embedded store's filter: what was used is known, however it was used."""

from pathlib import Path

import pytest

from fencepost.protocol.appends import Appended, KeyReused, Replayed
from fencepost.protocol.commits import Committed
from fencepost.store.sqlite.settings import SqliteSettings
from fencepost.store.sqlite.store import SqliteStore
from fencepost.store.sqlite.upkeep import SqliteUpkeep
from fencepost.testing.clock import SimClock
from tests.contract.conditional import ask_append, ask_commit, item
from tests.contract.subject import Subject


class SlicingEngine:
    """The embedded store, carrying out every larger commit in slices."""

    def __init__(self, folder: Path, clock: SimClock) -> None:
        self._settings = SqliteSettings(folder=folder, commit_slice_appends=2)
        self._clock = clock
        self.store: SqliteStore | None = None

    def open(self) -> SqliteStore:
        self.store = SqliteStore(self._settings, self._clock)
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


@pytest.mark.parametrize("reopened", [False, True])
async def test_a_used_key_is_recognized_behind_the_filter(
    tmp_path: Path, clock: SimClock, reopened: bool
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
    if reopened:
        await subject.reopen()
        store = await learn(subject, clock)

    assert store.keys.is_new((1, "", "never used"))
    for key, body in (("before", b"before"), ("single", b"1"), ("small", b"2")):
        assert isinstance(await ask_append(subject, "s", body, key=key), Replayed), key
        assert isinstance(await ask_append(subject, "s", b"other", key=key), KeyReused), key
    for path in paths:
        assert isinstance(await ask_append(subject, path, b"3", key=path), Replayed), path
    again = await ask_commit(subject, *many, key="whole")
    assert not isinstance(again, Committed)
    await subject.close()
