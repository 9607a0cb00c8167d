"""The rules of writers: runs fence each other, and a batch is published once."""

from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.writers import (
    BatchDone,
    BatchRefusal,
    NextBatch,
    PositionRange,
    PublishedBatch,
    Writer,
    WriterBatch,
    WriterFenced,
    WriterHeld,
    WriterHistoryGone,
    WriterMissing,
    WriterOpen,
    WriterOpened,
    WriterQueryChanged,
    WriterRangeMismatch,
    decide_writer_batch,
    decide_writer_open,
)

OPEN = WriterOpen("orders", "q1")
KNOWN = Writer("orders", "", "q1", 3, 7, "seven", 100, 200)


def batch(number: int, digest: str | None = "d", *, epoch: int = 3) -> WriterBatch:
    return WriterBatch("orders", "q1", epoch, number, digest)


def decided(
    current: Writer | None,
    request: WriterBatch,
    *,
    now_ms: int,
    published: PublishedBatch | None = None,
) -> NextBatch | BatchDone | BatchRefusal:
    return decide_writer_batch(current, request, published=published, now_ms=now_ms)


def test_the_first_run_has_epoch_one_and_no_batch() -> None:
    outcome = decide_writer_open(None, OPEN, now_ms=5)

    assert outcome == WriterOpened(Writer("orders", "", "q1", 1, None, None, 5, 5))


def test_every_further_run_raises_the_epoch_and_keeps_the_batch() -> None:
    outcome = decide_writer_open(KNOWN, OPEN, now_ms=300)

    assert outcome == WriterOpened(KNOWN._replace(epoch=4, opened_ms=300, updated_ms=300))


def test_another_query_is_refused_and_told_how_far_the_known_one_came() -> None:
    outcome = decide_writer_open(KNOWN, OPEN._replace(query="q2"), now_ms=300)

    assert outcome == WriterQueryChanged("q1", 7)


def test_another_query_that_may_be_new_begins_anew_in_a_higher_epoch() -> None:
    outcome = decide_writer_open(KNOWN, OPEN._replace(query="q2", allow_new=True), now_ms=300)

    assert outcome == WriterOpened(Writer("orders", "", "q2", 4, None, None, 300, 300))


def test_the_known_query_loses_nothing_when_it_says_that_it_may_be_new() -> None:
    outcome = decide_writer_open(KNOWN, OPEN._replace(allow_new=True), now_ms=300)

    assert isinstance(outcome, WriterOpened)
    assert outcome.writer.batch == 7


def test_a_writer_is_its_principals_and_an_administrators() -> None:
    anns = KNOWN._replace(principal="ann")

    assert decide_writer_open(anns, OPEN._replace(principal="ben"), now_ms=1) == WriterHeld()
    assert decided(anns, batch(8)._replace(principal="ben"), now_ms=1) == WriterHeld()
    opened = decide_writer_open(anns, OPEN._replace(principal="ben", overrides=True), now_ms=1)
    assert isinstance(opened, WriterOpened)
    assert opened.writer.principal == "ann"


def test_the_next_batch_is_published_in_the_current_run_alone() -> None:
    assert decided(KNOWN, batch(8, "eight"), now_ms=300) == NextBatch(
        KNOWN._replace(batch=8, digest="eight", updated_ms=300),
        PublishedBatch(8, None, "eight", 300),
    )
    assert decided(KNOWN, batch(8, epoch=2), now_ms=300) == WriterFenced(3)
    assert decided(KNOWN, batch(8, epoch=4), now_ms=300) == WriterFenced(3)


def test_nothing_is_published_for_an_unknown_writer_or_another_query() -> None:
    other = batch(8)._replace(query="q2")

    assert decided(None, batch(0), now_ms=1) == WriterMissing()
    assert decided(KNOWN, other, now_ms=1) == WriterQueryChanged("q1", 7)


def test_the_last_batch_again_is_done_and_its_digest_compared() -> None:
    assert decided(KNOWN, batch(7, "seven"), now_ms=1) == BatchDone(7, True)
    assert decided(KNOWN, batch(7, "other"), now_ms=1) == BatchDone(7, False)
    assert decided(KNOWN, batch(7, None), now_ms=1) == BatchDone(7, None)


def test_an_older_batch_is_compared_with_its_row_of_the_history() -> None:
    known = PublishedBatch(5, None, "five", 100)

    assert decided(KNOWN, batch(5, "five"), published=known, now_ms=1) == BatchDone(7, True)
    assert decided(KNOWN, batch(5, "other"), published=known, now_ms=1) == BatchDone(7, False)


def test_a_batch_that_the_history_does_not_hold_is_refused() -> None:
    """Calling it done could lose its rows: it may be another one than was published."""
    assert decided(KNOWN, batch(6, "seven"), now_ms=1) == WriterHistoryGone(7)


def test_a_batch_from_other_positions_is_refused_with_both_ranges() -> None:
    read = PositionRange(100, 200)
    known = PublishedBatch(5, read, "five", 100)
    more = batch(5, "five")._replace(range=PositionRange(100, 400))
    same = batch(5, "five")._replace(range=read)

    refused = decided(KNOWN, more, published=known, now_ms=1)

    assert refused == WriterRangeMismatch(5, read, PositionRange(100, 400))
    assert decided(KNOWN, same, published=known, now_ms=1) == BatchDone(7, True, read)
    assert decided(KNOWN, batch(5, "x"), published=known, now_ms=1) == BatchDone(7, False, read)


def test_a_range_says_nothing_about_a_batch_that_was_published_without_one() -> None:
    known = PublishedBatch(7, None, "seven", 100)
    asked = batch(7, "other")._replace(range=PositionRange(None, 9))

    assert decided(KNOWN, asked, published=known, now_ms=1) == BatchDone(7, False)


def test_batches_may_be_left_out() -> None:
    outcome = decided(KNOWN, batch(70), now_ms=1)

    assert isinstance(outcome, NextBatch)
    assert outcome.writer.batch == outcome.published.batch == 70


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Opens, and commits of batches by runs that may be over."""
    step = st.tuples(st.sampled_from(("open", "commit")), st.integers(1, 4), st.integers(0, 5))
    return draw(st.lists(step, max_size=40))


@given(steps())
def test_whatever_happens_each_batch_is_published_once_in_order_by_the_run_of_its_time(
    taken: list[tuple[str, int, int]],
) -> None:
    """Published numbers only grow, and each is published in the newest epoch that was opened."""
    current: Writer | None = None
    published: dict[int, PublishedBatch] = {}
    for at, (what, epoch, number) in enumerate(taken):
        if what == "open":
            opened = decide_writer_open(current, OPEN, now_ms=at)
            assert isinstance(opened, WriterOpened)
            assert opened.writer.epoch == (0 if current is None else current.epoch) + 1
            current = opened.writer
            continue
        asked = batch(number, str(at), epoch=epoch)
        outcome = decided(current, asked, published=published.get(number), now_ms=at)
        if isinstance(outcome, NextBatch):
            assert current is not None
            assert epoch == current.epoch == outcome.writer.epoch
            assert number not in published
            published[number] = outcome.published
            current = outcome.writer
        elif isinstance(outcome, BatchDone):
            assert outcome.batch == list(published)[-1]
            assert outcome.matches is False
        elif isinstance(outcome, WriterHistoryGone):
            assert number not in published

    assert list(published) == sorted(published)
    last = list(published)[-1] if published else None
    assert last == (None if current is None else current.batch)
