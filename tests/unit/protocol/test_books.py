"""The rule of books: what closed ones let in, what an append does to them, and which group lags."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.appends import Append, Appended, Conditions, TailMoved, decide_append
from fencepost.protocol.batches import json_batch
from fencepost.protocol.books import (
    NOW,
    BooksChange,
    BooksClosed,
    BooksRequest,
    CutInvalid,
    decide_books,
    group_lags,
    takes_source,
    target_lags,
)
from fencepost.protocol.commits import Commit, CommitItem, Committed, describe_commit
from fencepost.protocol.groups import Group, GroupSettings
from fencepost.protocol.leases import Target
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.streams import JSON, Stream

State = Literal["close", "open"]


def stream_at(messages: int, first: int = 0, *, closed_at: int | None = None) -> Stream:
    """A stream of messages of one byte each."""
    stream = Stream(1, "a", JSON, created_ms=0, tail=Offset(messages, messages))
    stream.first = Offset(first, first)
    stream.books_closed_at = closed_at
    return stream


def asking(data: bool, books: BooksRequest | None, **conditions: Any) -> Append:
    batch = json_batch(b"[1]") if data else None
    assert batch is None or not isinstance(batch, str)
    return Append("a", batch, JSON, conditions=Conditions(books=books, **conditions))  # type: ignore[arg-type]


class Model:
    """The books of one stream in the plainest words there are: a list, two numbers, a flag."""

    def __init__(self) -> None:
        self.messages = self.first = 0
        self.closed = False

    def expects(
        self, data: bool, state: State | None, cut: int | Literal["now"] | None, tail: int | None
    ) -> str:
        """What an append comes to, by name; the model moves on if it is accepted."""
        if self.closed:
            opens = state == "open" and tail is not None
            only_cuts = state is None and not data and cut is not None
            if not opens and not only_cuts:
                return "BooksClosed"
        if tail is not None and tail != self.messages:
            return "TailMoved"
        place = self.messages if cut == "now" else cut
        if place is not None and place > self.messages:
            return "CutInvalid"
        if place is not None:
            self.first = max(self.first, place)
        self.messages += data
        if state is not None:
            self.closed = state == "close"
        return "Appended"


STEPS = st.lists(
    st.tuples(
        st.booleans(),
        st.sampled_from([None, "close", "open"]),
        st.sampled_from([None, "now", 0, 1, 2, 3, 4]),
        st.sampled_from([None, 0, 1, 2, 3]),
    ),
    max_size=12,
)


@given(STEPS)
def test_a_stream_and_its_books_follow_the_model(steps: list[Any]) -> None:
    """Whatever is sent, the rule accepts, refuses and changes what the plain model says."""
    model, stream = Model(), stream_at(0)
    for data, state, cut, tail in steps:
        before = cut if cut in (None, NOW) else Offset(cut, cut)
        books = None if state is None and cut is None else BooksRequest(state, before)
        if books is None and not data:
            continue
        if_match = None if tail is None else Offset(tail, tail)
        request = asking(data, books, if_match=if_match)

        outcome = decide_append(stream, None, request, position=100, now_ms=0)

        assert type(outcome).__name__ == model.expects(data, state, cut, tail)
        if isinstance(outcome, Appended):
            stream.tail = outcome.tail
            if outcome.books is not None:
                stream.first = outcome.books.first or stream.first
                stream.books_closed_at = 7 if outcome.books.closed else None
        found = (stream.tail.messages, stream.first.messages, stream.books_closed)
        assert found == (model.messages, model.first, model.closed)


@pytest.mark.parametrize("if_match", [None, "*"])
def test_books_are_not_opened_by_an_append_that_names_no_tail(
    if_match: Literal["*"] | None,
) -> None:
    request = asking(True, BooksRequest("open"), if_match=if_match)

    outcome = decide_append(stream_at(2, closed_at=5), None, request, position=9, now_ms=0)

    assert outcome == BooksClosed(Offset(2, 2))


def test_books_are_opened_by_version_too() -> None:
    stream = stream_at(2, closed_at=5)
    right = asking(True, BooksRequest("open"), if_match=1)
    wrong = asking(True, BooksRequest("open"), if_match=2)

    opened = decide_append(stream, None, right, position=9, now_ms=0)

    assert isinstance(opened, Appended)
    assert opened.books == BooksChange(closed=False, closes=False, first=None, retires=False)
    assert decide_append(stream, None, wrong, position=9, now_ms=0) == TailMoved(Offset(2, 2))


def test_an_append_without_data_has_the_position_before_it() -> None:
    request = asking(False, BooksRequest("close"))

    outcome = decide_append(stream_at(2), None, request, position=9, now_ms=0)

    assert isinstance(outcome, Appended)
    assert (outcome.position, outcome.start, outcome.tail) == (8, Offset(2, 2), Offset(2, 2))
    assert outcome.books == BooksChange(closed=True, closes=True, first=None, retires=False)
    commit = Commit((CommitItem(request),))
    assert b'"books":"closed"' in describe_commit(commit, Committed((outcome,)))


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("state", [None, "open"])
@pytest.mark.parametrize("data", [False, True])
def test_only_a_bare_cut_of_everything_with_closed_books_retires(
    closed: bool, state: State | None, data: bool
) -> None:
    place = Offset(3, 3)
    given_places: list[Offset | Literal["now"]] = [NOW, Offset(2, 2)]

    for before in given_places:
        request = BooksRequest(state, before)
        change = decide_books(request, closed=closed, first=START, start=place, has_data=data)

        assert isinstance(change, BooksChange)
        assert change.retires == (closed and state is None and not data and before == NOW)
        assert change.first == (place if before == NOW else before)


def test_a_cut_behind_the_beginning_of_the_append_is_refused() -> None:
    request = BooksRequest(truncate_before=Offset(4, 4))

    change = decide_books(request, closed=False, first=START, start=Offset(3, 3), has_data=True)

    assert change == CutInvalid(Offset(3, 3))


# Groups that lag


def group_of(*sources: str, watermark: int = -1, name: str = "g") -> Group:
    return Group(1, name, GroupSettings(sources=sources), -1, watermark, 0)


def test_a_group_lags_until_its_watermark_passes_the_last_event() -> None:
    for watermark in range(-1, 8):
        group = group_of("orders/*", watermark=watermark)
        assert group_lags(group, "orders/1", 5) == (watermark < 5)
        assert not group_lags(group, "bills/1", 5)
    assert not group_lags(group_of("**"), "orders/1", -1), "a stream without events"


def test_the_servers_own_streams_are_sources_of_meshes_alone() -> None:
    assert not takes_source(group_of("**"), "__mesh/m/q")
    assert takes_source(group_of("**", name="mesh:m:queue:q"), "__mesh/m/q")


@given(
    at=st.integers(-1, 9),
    work=st.sets(st.integers(0, 9)),
    last=st.integers(-1, 9),
    source=st.sampled_from(["a/b", "a/*", "**", "a/c", "*/c"]),
)
def test_a_target_lags_exactly_while_an_event_up_to_the_last_waits(
    at: int, work: set[int], last: int, source: str
) -> None:
    """`waits_from` is the first event behind `at`, so no waiting event is missed."""
    waiting = sorted(position for position in work if position > at)
    row = Target("t", source, at=at, work_to=max(work, default=-1))
    row = row._replace(waits_from=waiting[0] if waiting else at + 1)
    matches = source in ("a/b", "a/*", "**")

    assert target_lags(row, "a/b", last) == (matches and any(p <= last for p in waiting))
