"""The ledger: a cache that may forget what is on disk, and nothing else."""

from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from fencepost.protocol.appends import Append, Appended, ProducerTuple, decide_append
from fencepost.protocol.batches import bytes_batch, digest
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.streams import Lifetime, Stream
from fencepost.store.records import REMOVED
from fencepost.store.sql import SchemaTooNewError
from fencepost.store.sqlite.connection import LedgerWriter, SqliteConnection, connect
from fencepost.store.sqlite.migrate import migrate
from fencepost.store.write.ledger import Ledger
from fencepost.store.write.ledger_group import Entry, LedgerGroup
from fencepost.store.write.loader import DiskLoader

STREAMS_MAX = 8
PRODUCERS_MAX = 4


class Book:
    """A ledger and a database; commits are made by hand, so that a test can stop between."""

    def __init__(self, file: Path, *, rows_behind_max: int = 0) -> None:
        self.writer = LedgerWriter(SqliteConnection(connect(file)), rows_behind_max)
        migrate(self.writer.connection.raw)
        self.lookups = SqliteConnection(connect(file, readonly=True))
        self.ledger = Ledger(
            DiskLoader(self.lookups, self.writer.behind),
            streams_max=STREAMS_MAX,
            producers_max=PRODUCERS_MAX,
        )
        self.group = self.ledger.new_group()

    def add(self, path: str, *, lifetime: Lifetime | None = None) -> Entry:
        stream = Stream(
            self.ledger.next_stream,
            path,
            "text/plain",
            created_ms=0,
            lifetime=lifetime or Lifetime(),
        )
        return self.ledger.add(self.group, stream)

    def append(self, entry: Entry, body: bytes, producer: ProducerTuple | None = None) -> Appended:
        request = Append(
            entry.stream.path,
            bytes_batch(body),
            "text/plain",
            producer=producer,
            digest=digest("text/plain", False, body),
        )
        known = None if producer is None else self.ledger.find_producer(entry, producer.id)
        outcome = decide_append(
            entry.stream, known, request, position=self.ledger.next_position, now_ms=0
        )
        assert isinstance(outcome, Appended)
        self.ledger.apply(self.group, entry, request, outcome, known, 0)
        return outcome

    def seal(self) -> LedgerGroup:
        """Close the open group and begin another, as the group commit does."""
        sealed = self.group
        self.ledger.seal(sealed)
        self.group = self.ledger.new_group()
        return sealed

    def commit(self, sealed: LedgerGroup | None = None) -> None:
        sealed = sealed or self.seal()
        self.writer.write(sealed)
        self.writer.commit()
        self.writer.behind.committed(sealed)
        self.ledger.committed(sealed)

    def find(self, path: str) -> Entry:
        entry = self.ledger.find(path)
        assert entry is not None
        return entry


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Book]:
    made = Book(tmp_path / "ledger.db")
    yield made
    made.lookups.close()
    made.writer.connection.close()


def test_what_is_not_on_disk_yet_is_never_dropped(book: Book) -> None:
    for number in range(5 * STREAMS_MAX):
        book.append(book.add(f"s{number}"), b"x")

    assert book.ledger.cached_count == 5 * STREAMS_MAX
    for number in range(5 * STREAMS_MAX):
        assert book.find(f"s{number}").stream.tail == Offset(1, 1)


def test_what_is_in_a_sealed_group_is_not_dropped_before_its_commit(book: Book) -> None:
    for number in range(STREAMS_MAX):
        book.append(book.add(f"s{number}"), b"x")
    sealed = book.seal()

    for number in range(STREAMS_MAX, 3 * STREAMS_MAX):
        book.add(f"s{number}")

    for number in range(STREAMS_MAX):
        assert book.find(f"s{number}").stream.tail == Offset(1, 1)
    book.commit(sealed)


def test_streams_on_disk_make_room_for_others(book: Book) -> None:
    for number in range(3 * STREAMS_MAX):
        book.append(book.add(f"s{number}"), b"%d" % number)
        book.commit()

    assert book.ledger.cached_count <= STREAMS_MAX
    for number in range(3 * STREAMS_MAX):
        entry = book.find(f"s{number}")
        assert entry.stream.tail == Offset(1, len(str(number)))
        assert entry.view is not None
        assert entry.view.tail == entry.stream.tail
    assert book.ledger.cached_count <= STREAMS_MAX


def test_a_stream_changed_again_after_its_commit_is_not_dropped(book: Book) -> None:
    entry = book.add("s")
    book.commit()
    book.append(entry, b"x")

    for number in range(3 * STREAMS_MAX):
        book.add(f"other{number}")

    assert book.find("s") is entry


def test_producers_kept_in_memory_are_bounded_and_none_is_forgotten(book: Book) -> None:
    entry = book.add("s")
    for number in range(5 * PRODUCERS_MAX):
        book.append(entry, b"x", ProducerTuple(f"p{number}", 1, 0))
        book.commit()

    assert len(entry.producers) <= PRODUCERS_MAX
    for number in range(5 * PRODUCERS_MAX):
        producer = book.ledger.find_producer(entry, f"p{number}")
        assert producer is not None
        assert (producer.epoch, producer.seq) == (1, 0)


def test_a_producer_not_on_disk_yet_is_never_dropped(book: Book) -> None:
    entry = book.add("s")
    for number in range(2 * PRODUCERS_MAX):
        book.append(entry, b"x", ProducerTuple(f"p{number}", 1, 0))
    sealed = book.seal()  # under way, and not on disk before the last line
    for number in range(2 * PRODUCERS_MAX, 5 * PRODUCERS_MAX):
        book.append(entry, b"x", ProducerTuple(f"p{number}", 1, 0))

    for number in range(5 * PRODUCERS_MAX):
        producer = book.ledger.find_producer(entry, f"p{number}")
        assert producer is not None, f"p{number}"
    book.commit(sealed)


def test_unknown_producers_do_not_fill_the_memory(book: Book) -> None:
    entry = book.add("s")
    book.commit()

    for number in range(20 * PRODUCERS_MAX):
        assert book.ledger.find_producer(entry, f"p{number}") is None

    assert len(entry.producers) <= PRODUCERS_MAX


def test_a_reset_goes_back_to_what_is_on_disk(book: Book) -> None:
    entry = book.add("s")
    book.append(entry, b"one", ProducerTuple("p", 0, 0))
    book.commit()
    position, stream_id = book.ledger.next_position, book.ledger.next_stream
    book.append(entry, b"two", ProducerTuple("p", 0, 1))
    book.add("other")
    book.ledger.remove(book.group, entry, REMOVED)

    book.ledger.reset()
    book.group = book.ledger.new_group()

    again = book.find("s")
    producer = book.ledger.find_producer(again, "p")
    assert again.stream.tail == Offset(1, 3)
    assert producer is not None
    assert producer.seq == 0
    assert book.ledger.find("other") is None
    assert (book.ledger.next_position, book.ledger.next_stream) == (position, stream_id)


def test_the_ledger_works_on_after_a_reset(book: Book) -> None:
    book.append(book.add("lost"), b"x")
    book.ledger.reset()
    book.group = book.ledger.new_group()

    book.append(book.add("kept"), b"y")
    assert not book.ledger.is_settled("kept")
    book.commit()

    assert book.ledger.is_settled("kept")
    assert book.ledger.find("lost") is None
    assert book.find("kept").stream.tail == Offset(1, 1)


def test_a_reader_sees_the_committed_tail_only(book: Book) -> None:
    def seen(entry: Entry) -> Offset | None:
        return None if entry.view is None else entry.view.tail

    entry = book.add("s")
    assert seen(entry) is None
    book.commit()
    book.append(entry, b"x")
    assert seen(entry) == START

    book.commit()

    assert seen(entry) == Offset(1, 1)


def test_what_is_decided_after_the_seal_is_not_shown_with_the_sealed_group(book: Book) -> None:
    entry = book.add("s")
    book.append(entry, b"one")
    sealed = book.seal()
    book.append(entry, b"two")

    book.commit(sealed)

    assert entry.view is not None
    assert entry.view.tail == Offset(1, 3)
    book.commit()
    assert entry.view.tail == Offset(2, 6)


def test_a_path_is_settled_when_its_creation_and_its_end_are_on_disk(book: Book) -> None:
    entry = book.add("s")
    assert not book.ledger.is_settled("s")
    book.commit()
    assert book.ledger.is_settled("s")
    book.append(entry, b"x")
    assert book.ledger.is_settled("s")
    book.ledger.remove(book.group, entry, REMOVED)
    assert not book.ledger.is_settled("s")
    book.commit()

    assert book.ledger.is_settled("s")
    assert book.ledger.find("s") is None


def test_a_window_slid_within_the_slack_is_not_written(book: Book) -> None:
    entry = book.add("s", lifetime=Lifetime(ttl_s=80))

    assert not book.ledger.slide(entry, 10_000)
    assert book.ledger.slide(entry, 10_001)
    assert not book.ledger.slide(entry, 10_002)


def test_a_database_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    connection = connect(tmp_path / "new.db")
    migrate(connection)
    connection.pragma("user_version", 10_000)

    with pytest.raises(SchemaTooNewError, match="10000"):
        migrate(connection)
    connection.close()


def test_a_migrated_database_stays_as_it_is(tmp_path: Path) -> None:
    connection: apsw.Connection = connect(tmp_path / "again.db")
    migrate(connection)
    before = connection.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()

    migrate(connection)

    after = connection.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()
    assert after == before
    assert connection.pragma("auto_vacuum") == 2
    assert connection.pragma("synchronous") == 2
    assert connection.pragma("journal_mode") == "wal"
    connection.close()


# What a group writes of streams and producers that are on disk


def test_of_a_stream_that_only_got_messages_only_the_tail_is_written(book: Book) -> None:
    entry = book.add("s", lifetime=Lifetime(ttl_s=3600))
    book.append(entry, b"x")
    book.commit()
    book.append(entry, b"yz")
    sealed = book.seal()

    assert (len(sealed.moves), sealed.updates, sealed.inserts) == (1, [], [])
    book.commit(sealed)
    before = vars_of(entry)
    book.ledger.reset()
    assert vars_of(book.find("s")) == before
    assert book.find("s").stream.tail == Offset(2, 3)


def test_the_whole_row_is_written_when_more_than_the_tail_changed(book: Book) -> None:
    entry = book.add("s")
    book.commit()
    book.append(entry, b"x")
    request = Append("s", bytes_batch(b"y"), "text/plain", closes=True, seq="9")
    outcome = decide_append(
        entry.stream, None, request, position=book.ledger.next_position, now_ms=0
    )
    assert isinstance(outcome, Appended)
    book.ledger.apply(book.group, entry, request, outcome, None, 0)
    sealed = book.seal()

    assert (len(sealed.updates), sealed.moves) == (1, [])
    book.commit(sealed)
    book.ledger.reset()
    found = book.find("s").stream
    assert (found.tail, found.closed, found.seq) == (Offset(2, 2), True, "9")


def test_a_producer_is_the_same_from_disk_after_batches_and_epochs(book: Book) -> None:
    entry = book.add("s")
    for epoch, seq in [(1, 0), (1, 1), (1, 2), (3, 0), (3, 1)]:
        book.append(entry, b"x", ProducerTuple("p", epoch, seq))
        if epoch == 1:
            book.append(entry, b"x", ProducerTuple("q", 1, seq))
        if seq != 1:
            book.commit()
    book.commit()
    known = book.ledger.find_producer(entry, "p"), book.ledger.find_producer(entry, "q")

    book.ledger.reset()

    entry = book.find("s")
    assert (book.ledger.find_producer(entry, "p"), book.ledger.find_producer(entry, "q")) == known


def test_a_producer_whose_row_is_gone_is_written_whole(book: Book) -> None:
    """An update of no row would lose it, and let its retries in again."""
    entry = book.add("s")
    for producer_id in "pq":
        book.append(entry, b"x", ProducerTuple(producer_id, 1, 0))
    book.commit()
    book.writer.connection.raw.execute("DELETE FROM producers WHERE id = 'p'")
    for producer_id in "pq":
        book.append(entry, b"y", ProducerTuple(producer_id, 1, 1))
    book.commit()
    known = book.ledger.find_producer(entry, "p"), book.ledger.find_producer(entry, "q")

    book.writer.write_behind()
    book.ledger.reset()

    entry = book.find("s")
    assert (book.ledger.find_producer(entry, "p"), book.ledger.find_producer(entry, "q")) == known


def vars_of(entry: Entry) -> dict[str, object]:
    """What a stream is, but for when it was last touched: what is stored errs to a later time."""
    stream = entry.stream
    names = [name for name in stream.__slots__ if name != "touched_ms"]
    return {name: getattr(stream, name) for name in names} | {"until": entry.stored_deadline_ms}
