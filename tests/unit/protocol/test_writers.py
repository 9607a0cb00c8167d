"""The rules of writers: runs fence each other, and a batch is published once."""

from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.writers import (
    BatchDone,
    Writer,
    WriterBatch,
    WriterFenced,
    WriterHeld,
    WriterMissing,
    WriterOpen,
    WriterOpened,
    WriterQueryChanged,
    decide_writer_batch,
    decide_writer_open,
)

OPEN = WriterOpen("orders", "q1")
KNOWN = Writer("orders", "", "q1", 3, 7, "seven", 100, 200)


def batch(number: int, digest: str | None = "d", *, epoch: int = 3) -> WriterBatch:
    return WriterBatch("orders", "q1", epoch, number, digest)


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
    assert decide_writer_batch(anns, batch(8)._replace(principal="ben"), now_ms=1) == WriterHeld()
    opened = decide_writer_open(anns, OPEN._replace(principal="ben", overrides=True), now_ms=1)
    assert isinstance(opened, WriterOpened)
    assert opened.writer.principal == "ann"


def test_the_next_batch_is_published_in_the_current_run_alone() -> None:
    assert decide_writer_batch(KNOWN, batch(8, "eight"), now_ms=300) == KNOWN._replace(
        batch=8, digest="eight", updated_ms=300
    )
    assert decide_writer_batch(KNOWN, batch(8, epoch=2), now_ms=300) == WriterFenced(3)
    assert decide_writer_batch(KNOWN, batch(8, epoch=4), now_ms=300) == WriterFenced(3)


def test_nothing_is_published_for_an_unknown_writer_or_another_query() -> None:
    other = batch(8)._replace(query="q2")

    assert decide_writer_batch(None, batch(0), now_ms=1) == WriterMissing()
    assert decide_writer_batch(KNOWN, other, now_ms=1) == WriterQueryChanged("q1", 7)


def test_the_last_batch_again_is_done_and_its_digest_compared() -> None:
    assert decide_writer_batch(KNOWN, batch(7, "seven"), now_ms=1) == BatchDone(7, True)
    assert decide_writer_batch(KNOWN, batch(7, "other"), now_ms=1) == BatchDone(7, False)
    assert decide_writer_batch(KNOWN, batch(7, None), now_ms=1) == BatchDone(7, None)


def test_an_older_batch_is_done_and_nobody_knows_its_digest() -> None:
    assert decide_writer_batch(KNOWN, batch(6, "seven"), now_ms=1) == BatchDone(7, None)


def test_batches_may_be_left_out() -> None:
    outcome = decide_writer_batch(KNOWN, batch(70), now_ms=1)

    assert isinstance(outcome, Writer)
    assert outcome.batch == 70


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
    published: list[int] = []
    for at, (what, epoch, number) in enumerate(taken):
        if what == "open":
            opened = decide_writer_open(current, OPEN, now_ms=at)
            assert isinstance(opened, WriterOpened)
            assert opened.writer.epoch == (0 if current is None else current.epoch) + 1
            current = opened.writer
            continue
        outcome = decide_writer_batch(current, batch(number, str(at), epoch=epoch), now_ms=at)
        if isinstance(outcome, Writer):
            assert current is not None
            assert epoch == current.epoch == outcome.epoch
            published.append(number)
            current = outcome
        elif isinstance(outcome, BatchDone):
            assert outcome.batch == published[-1] >= number
            assert outcome.matches in ((None,) if number < published[-1] else (False,))

    assert published == sorted(set(published))
    assert (published[-1] if published else None) == (None if current is None else current.batch)
