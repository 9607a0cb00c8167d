"""What is written behind the commits: a piece with each, never an older value over a newer one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fencepost.protocol.appends import Append, Appended, ProducerTuple, decide_append
from fencepost.protocol.batches import bytes_batch
from fencepost.protocol.offsets import Offset
from fencepost.store.write.behind import PIECE_ROWS_EACH, PIECE_ROWS_MIN, Behind
from fencepost.store.write.loader import DiskLoader
from tests.unit.store.test_ledger import Book

ROWS_MAX = 40


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Book]:
    made = Book(tmp_path / "ledger.db", rows_behind_max=ROWS_MAX)
    yield made
    made.lookups.close()
    made.writer.connection.close()


def behind_of(book: Book) -> Behind:
    return book.writer.behind


def stored_tail(book: Book, path: str) -> Offset:
    """The tail in the row of a stream."""
    query = "SELECT tail_messages, tail_bytes FROM streams WHERE path = ?"
    [(messages, size)] = book.lookups.raw.execute(query, (path,)).fetchall()
    return Offset(int(str(messages)), int(str(size)))


def stored_seq(book: Book, producer_id: str) -> int:
    rows = book.lookups.raw.execute("SELECT seq FROM producers WHERE id = ?", (producer_id,))
    [(seq,)] = rows.fetchall()
    return int(str(seq))


def outstanding(book: Book) -> int:
    """Rows of the log that the tables may not say."""
    query = "SELECT count(*) FROM log WHERE position >= (SELECT written_to FROM behind)"
    [(count,)] = book.lookups.raw.execute(query).fetchall()
    return int(str(count))


def reload(book: Book) -> None:
    """What another server would know, that was started now."""
    behind_of(book).load(book.lookups)
    book.ledger.reset()


def write(book: Book, paths: list[str], seq: int) -> None:
    """One group with an append to each of these streams, by a producer of its own."""
    for path in paths:
        book.append(book.find(path), b"x", ProducerTuple(f"of {path}", 1, seq))
    book.commit()


def test_tails_and_batches_come_into_the_tables_when_enough_rows_have_come(book: Book) -> None:
    paths = [f"s{number}" for number in range(10)]
    for path in paths:
        book.add(path)
    book.commit()

    for seq in range(4):
        write(book, paths, seq)

    assert [stored_tail(book, path) for path in paths] == [Offset(0, 0)] * 10, "as they were made"
    assert [stored_seq(book, f"of {path}") for path in paths] == [0] * 10, "they were new then"
    write(book, paths, 4)
    assert [stored_tail(book, path) for path in paths] == [Offset(4, 4)] * 10
    assert [stored_seq(book, f"of {path}") for path in paths] == [3] * 10
    assert outstanding(book) == 10, "only the group that wrote the others"


def test_what_is_outstanding_is_bounded_and_so_is_what_a_group_writes(book: Book) -> None:
    paths = [f"s{number}" for number in range(200)]
    for path in paths:
        book.add(path)
    book.commit()
    for seq in range(30):
        for at in range(0, 200, 20):
            before = book.writer.connection.raw.total_changes()

            write(book, paths[at : at + 20], seq)

            assert outstanding(book) <= 2 * ROWS_MAX + 20
            written = book.writer.connection.raw.total_changes() - before
            # Its log rows and the counters; new streams and producers; and the piece.
            assert written <= 20 + 1 + 40 + PIECE_ROWS_MIN + PIECE_ROWS_EACH * 20

    for path in paths:
        assert book.find(path).stream.tail == Offset(30, 30)
    known = {path: book.ledger.find_producer(book.find(path), f"of {path}") for path in paths}
    reload(book)
    assert {
        path: book.ledger.find_producer(book.find(path), f"of {path}") for path in paths
    } == known
    assert {book.find(path).stream.tail for path in paths} == {Offset(30, 30)}


def test_a_row_that_is_written_whole_is_not_written_over_by_what_was_behind(book: Book) -> None:
    """Closed while its tail waits to be written, and while its piece is due."""
    paths = [f"s{number}" for number in range(100)]
    for path in paths:
        book.add(path)
    book.commit()
    write(book, paths, 0)
    write(book, paths, 1)  # enough rows: from here on they are written
    entry = book.find("s99")
    request = Append("s99", bytes_batch(b"end"), "text/plain", closes=True)
    outcome = decide_append(
        entry.stream, None, request, position=book.ledger.next_position, now_ms=0
    )
    assert isinstance(outcome, Appended)
    book.ledger.apply(book.group, entry, request, outcome, None, 0)
    book.append(book.find("s98"), b"y", ProducerTuple("of s98", 2, 0))
    book.commit()

    for seq in range(2, 6):
        write(book, paths[:90], seq)

    assert stored_tail(book, "s99") == Offset(3, 5)
    assert stored_seq(book, "of s98") == 0
    reload(book)
    assert book.find("s99").stream.closed
    producer = book.ledger.find_producer(book.find("s98"), "of s98")
    assert producer is not None
    assert (producer.epoch, producer.seq) == (2, 0)


def test_a_new_epoch_hides_batches_of_the_one_before(book: Book) -> None:
    book.add("s")
    book.commit()
    for seq in range(3):
        write(book, ["s"], seq)
    book.append(book.find("s"), b"x", ProducerTuple("of s", 5, 0))
    book.commit()

    reload(book)

    producer = book.ledger.find_producer(book.find("s"), "of s")
    assert producer is not None
    assert (producer.epoch, producer.seq) == (5, 0)


def test_a_failed_group_leaves_what_is_behind_as_it_was(book: Book) -> None:
    paths = [f"s{number}" for number in range(100)]
    for path in paths:
        book.add(path)
    book.commit()
    write(book, paths, 0)
    write(book, paths, 1)
    for seq in range(2, 7):
        for path in paths[:20]:
            book.append(book.find(path), b"lost", ProducerTuple(f"of {path}", 1, seq))
        book.writer.write(book.seal())
        book.writer.rollback()
        reload(book)
        book.group = book.ledger.new_group()

        write(book, paths[:20], seq)

    assert {book.find(path).stream.tail for path in paths[:20]} == {Offset(7, 7)}
    assert {book.find(path).stream.tail for path in paths[20:]} == {Offset(2, 2)}
    assert stored_tail(book, "s99") == Offset(2, 2), "its piece came again"


def test_all_of_it_can_be_written_at_once(book: Book) -> None:
    paths = ["b", "a"]
    for path in paths:
        book.add(path)
    book.commit()
    write(book, paths, 0)
    write(book, paths, 1)
    assert behind_of(book)

    book.writer.write_behind()

    assert not behind_of(book)
    assert outstanding(book) == 0
    assert [stored_tail(book, path) for path in paths] == [Offset(2, 2)] * 2
    reload(book)
    assert not behind_of(book)


def test_a_group_that_writes_all_there_is_leaves_nothing_outstanding(book: Book) -> None:
    book.add("s")
    book.commit()
    entry = book.find("s")
    book.ledger.mark(book.group, entry, 1)
    book.ledger.touch(book.group, entry)
    book.commit()

    assert outstanding(book) == 0


def test_a_loader_without_any_knows_the_rows_alone(book: Book) -> None:
    """It is what makes the difference: without it a ledger would decide on older tails."""
    book.add("s")
    book.commit()
    write(book, ["s"], 0)
    write(book, ["s"], 1)

    row = DiskLoader(book.lookups).stream("s")
    newest = DiskLoader(book.lookups, behind_of(book)).stream("s")

    assert row is not None
    assert newest is not None
    assert (row[9:11], newest[9:11]) == ((0, 0), (2, 2))
