"""The rules of the global log: selections, bounds, splits."""

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.globs import Glob, literal_prefix, parse_glob
from fencepost.protocol.logs import (
    NOTHING,
    POSITION_MAX,
    ROW_BYTES,
    End,
    LogRow,
    Part,
    Selection,
    Stretch,
    Weight,
    bounded_end,
    even_splits,
    fitting,
    fitting_in_row,
    messages_of,
    parse_instant_ms,
    parse_part,
    parse_position,
    text_range,
    up_to,
)

BUCKET = 8


def glob(text: str) -> Glob:
    parsed = parse_glob(text)
    assert isinstance(parsed, Glob)
    return parsed


def row(position: int, *sizes: int) -> LogRow:
    lengths = None if len(sizes) == 1 else array("I", sizes).tobytes()
    return LogRow(position, len(sizes), sum(sizes), lengths)


@pytest.mark.parametrize(
    ("text", "position"),
    [("0", 0), ("17", 17), (str(POSITION_MAX), POSITION_MAX)],
)
def test_a_position_is_a_plain_whole_number(text: str, position: int) -> None:
    assert parse_position(text) == position


@pytest.mark.parametrize(
    "text", ["", "-1", "+1", "01", "1.0", "1e3", " 1", "1 ", "٣", "x", str(POSITION_MAX + 1)]
)
def test_anything_else_is_no_position(text: str) -> None:
    assert parse_position(text) is None


def test_a_part_names_its_share_of_all() -> None:
    assert parse_part("2/3", parts_max=8) == Part(2, 3)
    assert parse_part("0/1", parts_max=8) == Part(0, 1)


@pytest.mark.parametrize("text", ["", "1", "3/3", "1/0", "-1/2", "1/9", "a/b", "1/2/3", "01/2"])
def test_a_part_outside_its_share_is_none(text: str) -> None:
    assert parse_part(text, parts_max=8) is None


@pytest.mark.parametrize(
    ("text", "instant_ms"),
    [
        ("1700000000123", 1_700_000_000_123),
        ("1970-01-01T00:00:01Z", 1_000),
        ("1970-01-01t00:00:01.999999z", 1_999),
        ("1970-01-01T01:00:00.5+01:00", 500),
        ("1969-12-31T23:59:59.250Z", -750),
    ],
)
def test_a_time_is_milliseconds_or_rfc_3339(text: str, instant_ms: int) -> None:
    assert parse_instant_ms(text) == instant_ms


@pytest.mark.parametrize(
    "text", ["", "yesterday", "2024-01-01", "2024-13-01T00:00:00Z", "2024-01-01T00:00:00", "-5"]
)
def test_anything_else_is_no_time(text: str) -> None:
    assert parse_instant_ms(text) is None


def test_a_selection_takes_its_paths_its_patterns_and_its_part_only() -> None:
    selection = Selection(["a"], [glob("b/*")], Part(1, 2))

    assert selection.takes(1, "a")
    assert selection.takes(3, "b/x")
    assert not selection.takes(2, "a")
    assert not selection.takes(1, "b")
    assert not selection.takes(1, "c")


def test_a_selection_of_nothing_in_particular_takes_everything() -> None:
    assert Selection().takes(7, "whatever")
    assert Selection(part=Part(0, 2)).takes(8, "whatever")
    assert not Selection(part=Part(0, 2)).takes(7, "whatever")


@pytest.mark.parametrize(
    ("pattern", "prefix"),
    [("a/b", "a/b"), ("a/b*", "a/b"), ("a/*/c", "a/"), ("a/**", "a"), ("**", ""), ("*x", "")],
)
def test_a_pattern_tells_what_its_matches_begin_with(pattern: str, prefix: str) -> None:
    assert literal_prefix(glob(pattern)) == prefix


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(), st.text())
def test_every_text_with_a_prefix_lies_in_its_range(prefix: str, rest: str, other: str) -> None:
    """A text is in the range of a prefix exactly when it begins with it."""
    first, last = text_range(prefix)
    for text in (prefix + rest, other):
        within = first <= text and (last is None or text < last)
        assert within == text.startswith(prefix)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 400)), max_size=30),
    st.integers(1, 40),
    st.integers(0, 4000),
)
def test_rows_fit_whole_up_to_both_bounds(
    rows: list[tuple[int, int]], messages_max: int, bytes_max: int
) -> None:
    """As many rows fit as their sums stay within the bounds, and not one more."""
    counts = [count for count, _ in rows]
    sizes = [size for _, size in rows]

    taken = fitting(counts, sizes, messages_max=messages_max, bytes_max=bytes_max)

    def within(number: int) -> bool:
        messages = sum(counts[:number])
        return messages <= messages_max and sum(sizes[:number]) + ROW_BYTES * messages <= bytes_max

    assert taken == 0 or within(taken)
    assert taken == len(rows) or not within(taken + 1)


def test_part_of_an_append_that_is_too_large_is_taken_but_never_nothing() -> None:
    batch = row(10, 50, 50, 50)

    assert fitting_in_row(batch, 10, messages_max=2, bytes_max=10**6) == (2, 100)
    assert fitting_in_row(batch, 11, messages_max=9, bytes_max=10**6) == (2, 100)
    assert fitting_in_row(batch, 10, messages_max=9, bytes_max=1) == (1, 50)


def test_messages_of_rows_are_cut_to_the_asked_positions() -> None:
    rows = [row(0, 1, 2, 3), row(3, 4), row(4, 5, 6)]

    assert list(messages_of(rows, 1, 4)) == [(1, 2), (2, 3), (3, 4), (4, 5)]


class ListScale:
    """Weighs rows that are simply in a list."""

    def __init__(self, rows: Sequence[LogRow], low: int, until: int) -> None:
        self._rows = rows
        self._low = low
        self._until = until

    def _within(self, stretch: Stretch) -> list[LogRow]:
        first = stretch.first
        if first == self._low:
            first = min((r.position for r in self._rows if _ends(r) >= first), default=first)
        return [r for r in self._rows if first <= r.position <= stretch.last]

    def messages(self, stretch: Stretch) -> list[tuple[int, int]]:
        return list(messages_of(self._within(stretch), self._low, self._until))

    def last_position(self, stretch: Stretch) -> int:
        ends = [min(_ends(r), self._until) for r in self._within(stretch)]
        return max([stretch.last, *ends])

    def stretches(self) -> list[Stretch]:
        found = []
        for bucket in range(self._until // BUCKET + 1):
            first = max(bucket * BUCKET, self._low)
            last = min(bucket * BUCKET + BUCKET - 1, self._until)
            if first <= last:
                sizes = [size for _, size in self.messages(Stretch(first, last, NOTHING))]
                found.append(Stretch(first, last, Weight(len(sizes), sum(sizes))))
        return found


def _ends(row: LogRow) -> int:
    return row.position + row.messages - 1


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[LogRow], int, int]:
    """Rows with gaps and batches between them, and a range that may cut into both."""
    rows: list[LogRow] = []
    at = draw(st.integers(0, 5))
    for sizes in draw(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=12), min_size=1)):
        rows.append(row(at, *sizes))
        at += len(sizes) + draw(st.sampled_from([0, 0, 0, 1, 7]))
    low = draw(st.integers(0, at))
    return rows, low, draw(st.integers(low, at))


@given(logs(), st.none() | st.integers(1, 40), st.none() | st.integers(1, 3000))
def test_a_bounded_read_ends_exactly_where_the_bound_is(
    log: tuple[list[LogRow], int, int], rows_max: int | None, bytes_max: int | None
) -> None:
    """What lies up to the end is within the bounds, and one message more would not be."""
    rows, low, until = log
    scale = ListScale(rows, low, until)

    end = bounded_end(scale.stretches(), scale, until=until, rows_max=rows_max, bytes_max=bytes_max)

    everything = list(messages_of(rows, low, until))
    taken = [size for position, size in everything if position <= end.position]
    assert end.weight == Weight(len(taken), sum(taken))
    if len(taken) > 1:
        assert rows_max is None or len(taken) <= rows_max
        assert bytes_max is None or sum(taken) <= bytes_max
    if len(taken) == len(everything):
        assert end.position == until or end.position < until
    else:
        assert taken, "a read always gets on"
        more = [*taken, everything[len(taken)][1]]
        assert (rows_max is not None and len(more) > rows_max) or (
            bytes_max is not None and sum(more) > bytes_max
        )


@given(logs(), st.integers(1, 12), st.none() | st.integers(1, 40))
def test_splits_cover_the_range_exactly_and_weigh_what_they_say(
    log: tuple[list[LogRow], int, int], parts: int, rows_max: int | None
) -> None:
    """Ranges join without gap or overlap, and none costs more than its share and one message."""
    rows, low, until = log
    scale = ListScale(rows, low, until)
    stretches = scale.stretches()
    end = bounded_end(stretches, scale, until=until, rows_max=rows_max, bytes_max=None)

    splits = even_splits(up_to(stretches, end), scale, after=low - 1, end=end, parts=parts)

    assert len(splits) <= parts
    at = low - 1
    for split in splits:
        assert split.after == at
        assert split.until > split.after
        at = split.until
        sizes = [size for _, size in messages_of(rows, split.after + 1, split.until)]
        assert split.weight == Weight(len(sizes), sum(sizes))
    assert at == max(end.position, low - 1)
    share = end.weight.cost / parts
    largest = max((size for _, size in messages_of(rows, low, until)), default=0) + ROW_BYTES
    assert all(split.weight.cost <= share + largest for split in splits)


def test_many_stretches_to_a_part_are_split_at_their_ends() -> None:
    rows = [row(position, 10) for position in range(BUCKET * 300)]
    scale = ListScale(rows, 0, len(rows) - 1)
    total = Weight(len(rows), 10 * len(rows))

    splits = even_splits(scale.stretches(), scale, after=-1, end=End(len(rows) - 1, total), parts=3)

    assert [split.weight.rows for split in splits] == [BUCKET * 100] * 3
    assert [split.until % BUCKET for split in splits] == [BUCKET - 1] * 3


@given(
    st.lists(st.sampled_from(["a", "a/b", "ab", "b", "\U0010ffff"]), max_size=4),
    st.lists(st.sampled_from(["a/**", "a/*", "ab*", "b/c/*", "*", "\U0010ffff*"]), max_size=4),
    st.sampled_from(["a", "a/b", "ab", "abc", "b", "b/c/d", "c", "\U0010ffff", "\U0010ffffx"]),
)
def test_ranges_of_paths_are_apart_and_hold_every_wanted_path(
    paths: list[str], globs: list[str], path: str
) -> None:
    """However names and patterns overlap, a wanted path lies in exactly one range."""
    selection = Selection(paths, map(glob, globs))

    ranges = selection.path_ranges()
    holding = [one for one in ranges if one[0] <= path and (one[1] is None or path < one[1])]

    if selection.by_path and selection.takes_path(path):
        assert len(holding) == 1
    assert len(holding) <= 1
    assert ranges == sorted(ranges, key=lambda one: one[0])
