"""Batches: what a JSON body is cut into, and that joining it back loses nothing."""

import hashlib
import json
import sys
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.batches import (
    DIGEST_BYTES,
    Batch,
    Malformed,
    TooMany,
    bytes_batch,
    cut,
    digest,
    holds_more_than,
    json_batch,
    json_batch_within,
    message_lengths,
)
from tests.unit.protocol.strategies import VALUES, bodies


def batch_of(body: bytes) -> Batch:
    batch = json_batch(body)
    assert isinstance(batch, Batch), batch
    return batch


def messages_of(batch: Batch) -> list[bytes]:
    """The raw messages, found by the stored lengths alone."""
    found, at = [], 0
    for length in lengths_of(batch):
        found.append(batch.data[at : at + length])
        at += length + 1
    return found


def lengths_of(batch: Batch) -> Iterable[int]:
    return message_lengths(batch.messages, len(batch.data), batch.lengths)


@given(bodies())
def test_a_json_body_holds_what_json_loads_sees(body: bytes) -> None:
    """One level of array is flattened; the messages are the values the standard library reads."""
    seen = json.loads(body)
    expected = seen if isinstance(seen, list) else [seen]

    batch = json_batch(body)

    if not expected:
        assert batch is None
        return
    assert isinstance(batch, Batch)
    assert json.loads(b"[%b]" % batch.data) == expected
    assert [json.loads(message) for message in messages_of(batch)] == expected
    assert batch.messages == len(expected)
    assert batch.size == sum(lengths_of(batch))
    assert batch.size == len(batch.data) - (batch.messages - 1)


@given(st.lists(VALUES, min_size=1, max_size=6), st.data())
def test_a_cut_holds_exactly_the_messages_asked_for(
    values: list[object], data: st.DataObject
) -> None:
    """Any run of messages of a batch parses to those messages, and its size leaves out commas."""
    batch = batch_of(json.dumps(values).encode())
    start = data.draw(st.integers(0, batch.messages - 1))
    stop = data.draw(st.integers(start + 1, batch.messages))

    part, size = cut(batch.data, batch.lengths, start, stop)

    assert json.loads(b"[%b]" % part) == values[start:stop]
    assert size == len(part) - (stop - start - 1)


@given(st.binary(max_size=64))
def test_any_bytes_are_json_for_us_only_if_they_are_for_the_standard_library(body: bytes) -> None:
    """No body is taken that another reader would refuse."""
    batch = json_batch(body)

    if isinstance(batch, Batch):
        json.loads(b"[%b]" % batch.data.decode().encode())


def test_a_message_keeps_the_bytes_that_the_client_sent() -> None:
    batch = batch_of(b' [ {"a" : 1.0 , "a":2}\n,\t"\\u00e9" , 1e2 ] ')

    assert messages_of(batch) == [b'{"a" : 1.0 , "a":2}', b'"\\u00e9"', b"1e2"]


def test_duplicate_keys_are_the_clients_own_business() -> None:
    batch = batch_of(b'{"a":1,"a":2}')

    assert batch == Batch(1, 13, b'{"a":1,"a":2}', None)


@pytest.mark.parametrize("body", [b"[]", b" [ ] ", b"\n[\t]\r\n"])
def test_an_empty_array_holds_no_message(body: bytes) -> None:
    assert json_batch(body) is None


def test_only_one_level_of_array_is_flattened() -> None:
    assert messages_of(batch_of(b"[[1,2],[3]]")) == [b"[1,2]", b"[3]"]
    assert messages_of(batch_of(b"[[[1]]]")) == [b"[[1]]"]
    assert messages_of(batch_of(b"[[]]")) == [b"[]"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"[",
        b"[1",
        b"[1,",
        b"[1,]",
        b"[,]",
        b"{]",
        b"[}",
        b'{"a"}',
        b'{"a":}',
        b"{'a':1}",
        b"{a:1}",
        b"nul",
        b"True",
        b"NaN",
        b"[NaN]",
        b"Infinity",
        b"-",
        b"01",
        b"1.",
        b".5",
        b"+1",
        b"0x10",
        b'"',
        b'"\n"',
        b'"\x00"',
        b'"\\x"',
        b'"\\u12"',
        b"1 2",
        b"[1] [2]",
        b"[1]]",
        b"{}{}",
        b"\xef\xbb\xbf[1]",
        b"// no\n1",
    ],
)
def test_a_malformed_body_is_refused_with_a_reason(body: bytes) -> None:
    outcome = json_batch(body)

    assert isinstance(outcome, Malformed)
    assert outcome.detail


@pytest.mark.parametrize(
    "body",
    [
        b'"\xff"',
        b'["ok","\xc3"]',
        b'"\xc3\x28"',
        b'"\xed\xa0\x80"',
        b'"\xf5\x80\x80\x80"',
        b"\xfe1",
    ],
)
def test_a_body_that_is_not_utf_8_is_refused(body: bytes) -> None:
    outcome = json_batch(body)

    assert isinstance(outcome, Malformed)
    assert "UTF-8" in outcome.detail


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_deep_nesting_is_refused_and_does_not_end_the_process(opening: bytes) -> None:
    depth = 200 * sys.getrecursionlimit()

    outcome = json_batch(opening * depth)

    assert isinstance(outcome, Malformed)


@given(st.binary(min_size=1, max_size=64))
def test_a_byte_body_is_one_message_whatever_it_holds(body: bytes) -> None:
    """Bytes are neither looked at nor changed."""
    batch = bytes_batch(body)

    assert batch == Batch(1, len(body), body, None)
    assert list(lengths_of(batch)) == [len(body)]


BODY_DIGEST = st.tuples(st.sampled_from(["text/plain", "text/plainx", ""]), st.booleans())


@given(BODY_DIGEST, st.binary(max_size=8), BODY_DIGEST, st.binary(max_size=8))
def test_a_digest_tells_requests_apart_by_type_close_flag_and_bytes(
    one: tuple[str, bool], data: bytes, other: tuple[str, bool], more: bytes
) -> None:
    """Digests are equal exactly when all three parts are."""
    same = (one, data) == (other, more)

    assert (digest(*one, data) == digest(*other, more)) == same
    assert len(digest(*one, data)) == DIGEST_BYTES


@pytest.mark.parametrize("size", [0, 100, 4095, 4096, 4097, 65_536])
def test_a_digest_is_made_alike_whatever_the_size(size: int) -> None:
    """It is compared with those on disk, so how it is made must not change what it is."""
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]

    expected = hashlib.sha256(b"1text/plain\0" + data).digest()[:DIGEST_BYTES]

    assert digest("text/plain", True, data) == expected


@pytest.mark.parametrize(
    ("body", "holds_more"),
    [
        (b"[1,2]", False),
        (b"[1,2,3]", True),
        (b" [ 1 , 2 , 3 ] ", True),
        (b"[[1,2,3],[4,5,6]]", False),
        (b'["a,b,c,d"]', False),
        (b'{"a": [1,2,3,4]}', False),
        (b"[%b,1,2]" % (b"9" * 5000), True),
        (b"[1,2,", False),
        (b"[1,,,,]", False),
        (b'[1,2,"\xff"]', True),
    ],
)
def test_too_many_messages_are_counted_without_splitting_them(
    body: bytes, holds_more: bool
) -> None:
    """What is not JSON is left to the parser, which stops no later than the count would."""
    assert holds_more_than(body, 2) is holds_more


@pytest.mark.parametrize("messages", [1_000, 1_001])
def test_only_a_body_that_holds_no_more_messages_than_it_may_is_split(
    messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The split is one call, and no other thread runs during it."""
    split = []

    def noted(body: bytes) -> Batch | Malformed | None:
        split.append(body)
        return json_batch(body)

    monkeypatch.setattr("fencepost.protocol.batches.json_batch", noted)
    body = b"[" + b",".join([b"1"] * messages) + b"]"

    found = json_batch_within(body, messages_max=1_000, depth_max=64)

    assert isinstance(found, TooMany) == (messages > 1_000)
    assert bool(split) == (messages <= 1_000)
