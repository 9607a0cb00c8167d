"""Heads that repeat are read without the parser, and exactly as the parser reads them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.http import heads, parser
from fencepost.http.heads import RepeatedHead
from fencepost.http.parser import RequestReader
from fencepost.http.settings import HttpSettings
from fencepost.http.wire import is_spaced
from tests.unit.http import test_refusals
from tests.unit.http.reading import ParserAlone, both_ways, new_front, read

SETTINGS = HttpSettings(
    target_bytes_max=100,
    header_bytes_max=400,
    header_count_max=12,
    body_bytes_max=1000,
    open_body_bytes_max=500,
)
FRONT = new_front(SETTINGS)


def append(
    seq: object = 0,
    body: bytes = b"hello",
    *more: bytes,
    target: bytes = b"/v1/stream/a",
    length: bytes | None = None,
) -> bytes:
    """An append by a producer, with more header lines behind its own."""
    size = b"%d" % len(body) if length is None else length
    lines = (
        b"POST " + target + b" HTTP/1.1",
        b"Host: test",
        b"Content-Type: text/plain",
        b"Producer-Id: p",
        b"Producer-Epoch: 0",
        b"Producer-Seq: " + (seq if isinstance(seq, bytes) else b"%d" % int(str(seq))),
        b"Content-Length: " + size,
        *more,
    )
    return b"\r\n".join((*lines, b"", b"")) + body


def repeated(pieces: list[bytes]) -> int:
    """How many requests of these are read without the parser; all must be read alike."""
    before = FRONT.counters.heads_repeated
    short, general = both_ways(FRONT, pieces)
    assert short == general
    return FRONT.counters.heads_repeated - before


def test_the_third_request_with_a_head_and_all_after_it_need_no_parser() -> None:
    assert repeated([append(seq) for seq in range(10)]) == 8


def test_requests_that_come_in_one_piece_repeat_the_head_as_well() -> None:
    first = [append(0), append(1)]

    assert repeated([*first, append(2) + append(3) + append(4)]) == 3
    assert repeated([*first, append(2) + append(3) + append(4)[:-1], append(4)[-1:]]) == 2


def test_the_path_the_key_and_the_length_may_differ() -> None:
    pieces = [
        append(
            seq,
            b"x" * seq * 10,
            b"Idempotency-Key: order-%d" % seq,
            b'If-Match: "%d"' % seq,
            target=b"/v1/stream/orders/%d?q=%d" % (seq, seq),
        )
        for seq in range(12)
    ]

    assert repeated(pieces) == 10


class Unsearched(bytes):
    """Bytes in which no value may be looked for."""

    def find(self, *_args: object) -> int:
        raise AssertionError("a value was looked for")


def test_the_next_number_of_a_producer_is_read_by_one_comparison() -> None:
    head = RepeatedHead.of(append(8), 0, HttpSettings())
    assert head is not None
    for seq in (8, 9):
        assert head.read(append(seq), 0) is not None

    for seq in range(10, 102):
        found = head.read(Unsearched(append(seq, b"world")), 0)

        assert found is not None
        assert found[2][b"producer-seq"] == b"%d" % seq
        assert found[3] == b"world"
    with pytest.raises(AssertionError, match="looked for"):
        head.read(Unsearched(append(200)), 0)


def test_a_head_that_was_expected_before_another_length_came_is_not_mixed_with_it() -> None:
    sizes = {9: b"longer!", 5: b"longer!", 6: b"longer!"}
    pieces = [append(seq, sizes.get(seq, b"hello")) for seq in (0, 1, 2, 3, 9, 4, 5, 6, 7)]

    assert repeated(pieces) == 7


def test_a_head_that_was_expected_before_another_target_came_is_not_taken_for_it() -> None:
    other = append(3, target=b"/v1/stream/b", length=b"+5")

    repeated([append(0), append(1), append(2), append(3), other, append(4), append(5)])
    head = RepeatedHead.of(append(0), 0, HttpSettings())
    assert head is not None
    for seq in (0, 1, 2):
        head.read(append(seq), 0)
    assert head.read(other, 0) is None  # and the head has turned to its target
    found = head.read(append(3), 0)
    assert found is not None
    assert found[0] == b"/v1/stream/a"


STEPS = st.tuples(
    st.sampled_from([1, 1, 1, 0, 2, -3]),
    st.sampled_from([b"hello", b"hello", b"longer!"]),
    st.sampled_from([b"/v1/stream/a"] * 5 + [b"/v1/stream/b"]),
)


@given(st.lists(STEPS, min_size=10, max_size=30))
def test_numbers_that_mostly_follow_each_other_are_read_alike_both_ways(
    steps: list[tuple[int, bytes, bytes]],
) -> None:
    """The number grows by one but for some times, and so do lengths and paths stay the same."""
    seq, pieces = 90, []
    for step, body, target in steps:
        seq = max(seq + step, 0)
        pieces.append(append(seq, body, target=target))

    repeated(pieces)


@pytest.mark.parametrize(
    "line",
    [b"Authorization: Bearer b", b"Origin: http://a", b"X: 1", b"Stream-Closed: true"],
)
def test_a_request_with_another_header_line_goes_through_the_parser(line: bytes) -> None:
    pieces = [append(0), append(1), append(2), append(3, b"hello", line), append(4)]

    assert repeated(pieces) == 2


@pytest.mark.parametrize(
    "more",
    [b"Expect: 100-continue", b"Connection: close", b"Connection: keep-alive", b"Upgrade: h2c"],
)
def test_what_changes_how_a_connection_goes_on_is_never_kept(more: bytes) -> None:
    assert repeated([append(seq, b"hello", more) for seq in range(6)]) == 0


def test_a_head_that_takes_long_to_take_apart_is_not_kept() -> None:
    lines = [b"X-%d: 1" % number for number in range(3_000)]

    assert RepeatedHead.of(b"-" + append(1, b"", *lines[:1_000]), 1, HttpSettings()) is not None
    assert RepeatedHead.of(append(1, b"", *lines), 0, HttpSettings()) is None


SPACED = append(2).replace(b" HTTP", b"  HTTP")


@pytest.mark.parametrize("empty", [b"", b"\r\n", b"\r\n\r\n", b"\r\n\r\n\r\n\r\n"])
@pytest.mark.parametrize("body", [b"", b"a b " * 60, b"  " * 120])
def test_empty_lines_between_requests_hide_no_doubled_space(empty: bytes, body: bytes) -> None:
    good = [empty + append(seq, body) for seq in range(10)]
    for pieces in (good, [b"".join(good)]):
        assert len(read(ParserAlone, FRONT, pieces).requests) == 10
    spaced = read(ParserAlone, FRONT, [b"".join((*good, empty, SPACED))])

    assert len(spaced.requests) == 10
    assert spaced.end[0] == 400


def test_a_long_piece_of_bodies_in_chunks_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[bytes] = []

    def searched(piece: bytes, method: bytes, target: bytes) -> bool:
        searches.append(target)
        return is_spaced(piece, method, target)

    monkeypatch.setattr(parser, "is_spaced", searched)
    head = append(0, b"", target=b"/v1/stream/%d").replace(b"Content-Length: 0", b"%b")
    one = head % (1, b"Transfer-Encoding: chunked") + b"1\r\nx\r\n0\r\n\r\n"

    assert len(read(ParserAlone, FRONT, [one * 100]).requests) == 100
    assert not searches
    # With doubled spaces in it each request line is looked for.
    assert read(ParserAlone, FRONT, [one * 100 + SPACED]).end[0] == 400
    assert searches


def test_nothing_is_taken_behind_the_last_request() -> None:
    last = append(3, b"hello", b"Connection: close")
    pieces = [append(0), append(1), append(2), last + append(4)]

    assert repeated(pieces) == 1
    assert len(read(RequestReader, FRONT, pieces).requests) == 4


def test_a_draining_server_takes_no_request_that_repeats() -> None:
    front = new_front(SETTINGS)
    front.draining = True

    short, general = both_ways(front, [append(0), append(1)])

    assert short == general == ([], ("stopped",))


VALUES = {
    "a sign": append(b"+3"),
    "a negative number": append(b"-3"),
    "no number": append(b""),
    "a space behind it": append(b"3 "),
    "two spaces before it": append(b" 3"),
    "a tab before it": append(b"\t3"),
    "a word": append(b"three"),
    "many digits": append(b"9" * 40),
    "zeros in front": append(b"0003"),
    "a line feed in it": append(b"3\nX: y"),
    "a carriage return in it": append(b"3\rX: y"),
    "a line in it": append(b"3\r\nX: y"),
    "a NUL in it": append(b"3\0"),
    "a length with zeros": append(3, length=b"005"),
    "a length too short": append(3, length=b"4"),
    "a length too long": append(3, length=b"6"),
    "a length that hides a request": append(3, append(4), length=b"0"),
    "a length and a coding": append(3, b"0\r\n\r\n", b"Transfer-Encoding: chunked", length=b"5"),
    "two lengths": append(3, b"hello", b"Content-Length: 5"),
    "two numbers": append(3, b"hello", b"Producer-Seq: 4"),
    "a length beyond 64 bits": append(3, length=b"18446744073709551621"),
    "a body that needs a sender": append(3, b"x" * 501),
    "a body beyond the limit": append(3, b"x" * 1001),
    "a target beyond the limit": append(3, target=b"/" + b"x" * 100),
    "a target with a space": append(3, target=b"/v1/stream/a b"),
    "a target with a fragment": append(3, target=b"/v1/stream/a#b"),
    "an empty target": append(3, target=b""),
    "a star": append(3, target=b"*"),
    "a whole URL": append(3, target=b"http://other/v1/stream/a"),
    "a target of other bytes": append(3, target=b"/v1/stream/\xff"),
    "a tab in the target": append(3, target=b"/v1/stream/a\tb"),
    "two spaces": append(3).replace(b"POST ", b"POST  "),
    "two spaces at the end": append(3).replace(b" HTTP", b"  HTTP"),
    "an older version": append(3).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "a later version": append(3).replace(b"HTTP/1.1", b"HTTP/1.2"),
    "an empty line before it": b"\r\n" + append(3),
    "a colon with a space before it": append(3).replace(b"Seq:", b"Seq :"),
    "a folded line": append(3).replace(b"Producer-Id", b" Producer-Id"),
    "another case": append(3).replace(b"Producer-Seq", b"producer-seq"),
    "line feeds alone": append(3).replace(b"\r\n", b"\n"),
    "a chunked body": b"POST /v1/stream/a HTTP/1.1\r\nHost: test\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "headers beyond the limit": append(3, b"hello", b"X: " + b"y" * 500),
    **{f"refused: {name}": shape for name, shape in test_refusals.AMBIGUOUS_LENGTH.items()},
}


@pytest.mark.parametrize("shape", VALUES.values(), ids=VALUES)
def test_no_shape_is_read_otherwise_behind_a_head_that_repeats(shape: bytes) -> None:
    """Behind three good requests, with another one after it, whole, and cut in many places."""
    first, data = [append(0), append(1), append(2)], shape + append(9)

    repeated([*first, data])
    for at in range(1, len(data), 11):
        repeated([*first, data[:at], data[at:]])
    repeated([*first, *(data[at : at + 1] for at in range(len(data)))])


def test_requests_cut_at_any_byte_are_read_alike() -> None:
    first, data = [append(0), append(1), append(2)], append(3) + append(4, b"") + append(5)

    for at in range(1, len(data)):
        repeated([*first, data[:at], data[at:]])


def test_an_idempotency_key_of_any_bytes_is_read_as_the_parser_reads_it() -> None:
    for byte in range(256):
        keyed = append(3, b"hello", b"Idempotency-Key: a%cb" % byte)
        first = [append(seq, b"hello", b"Idempotency-Key: a") for seq in range(3)]
        repeated([*first, keyed, append(4)])


TOKENS = st.one_of(
    st.sampled_from([b"a", b"b-2", b"", b"a b", b"\xff", b"x" * 300, b"a\r\nX: y", b'"7"']),
    st.binary(max_size=6),
)
APPENDS = st.builds(
    lambda seq, size, lines, target, length: append(
        seq, b"x" * size, *lines, target=target, length=length
    ),
    st.one_of(st.integers(0, 10**17), st.binary(max_size=4)),
    st.sampled_from([0, 1, 5, 499, 500, 501]),
    st.lists(
        st.builds(
            lambda name, value: name + b": " + value,
            st.sampled_from([b"Idempotency-Key", b"If-Match", b"X-A", b"Expect", b"Connection"]),
            TOKENS,
        ),
        max_size=2,
    ),
    st.sampled_from([b"/v1/stream/a", b"/v1/stream/b?x=1", b"/%41", b"*", b"/a#b", b"http://h/a"]),
    st.one_of(st.none(), st.sampled_from([b"0", b"05", b"5", b"+5", b"5 "])),
)


@given(
    st.lists(APPENDS, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=3, max_size=10),
)
def test_all_requests_are_read_alike_both_ways(
    kinds: list[bytes], order: list[tuple[int, bool]]
) -> None:
    """A few kinds of requests follow each other in any order, apart or in one piece."""
    pieces = [b""]
    for kind, joined in order:
        data = kinds[kind % len(kinds)]
        if joined:
            pieces[-1] += data
        else:
            pieces.append(data)

    repeated(pieces)


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads whose values are taken as they come."""
    monkeypatch.setattr(heads, "_VALUE", re.compile(b".*", re.DOTALL))
    monkeypatch.setattr(heads, "_TARGET", re.compile(b".*", re.DOTALL))


@pytest.mark.usefixtures("careless")
@pytest.mark.parametrize(
    "shape",
    [
        append(3, target=b"/v1/stream/a#b"),
        append(3, b"hello", b"Idempotency-Key: a\nX: y"),
        append(3, b"hello", b"Idempotency-Key:  a"),
    ],
)
def test_without_the_look_at_values_some_would_be_read_otherwise(shape: bytes) -> None:
    more = [b"Idempotency-Key: a"] if b"Idempotency" in shape else []
    pieces = [append(0, b"hello", *more), append(1, b"hello", *more), shape]

    assert read(RequestReader, FRONT, pieces) != read(ParserAlone, FRONT, pieces)
