"""What a store promises a reader: committed state only, in bounded pieces, at places that exist."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fencepost.protocol.creates import Create
from fencepost.protocol.offsets import START, Offset
from fencepost.store.contract import BadOffset, Chunk, Missing, StreamInfo
from fencepost.store.postgres.store import PostgresStore
from fencepost.testing.clock import SimClock
from tests.contract.subject import ENGINES, Subject, answered

JSON = "application/json"


async def test_a_reader_does_not_see_what_is_not_committed(subject: Subject) -> None:
    await subject.made("s")

    answer = subject.appending("s", b"x")
    before = await subject.info("s")

    # PostgreSQL itself shows what is committed, and may do so before the answer has come back.
    assert before.tail == START or isinstance(subject.store, PostgresStore)
    await answered(answer)
    assert (await subject.info("s")).tail == Offset(1, 1)


async def test_a_reader_of_a_stream_being_created_waits_for_it(subject: Subject) -> None:
    creating = subject.ask(subject.store.create, Create("s"))

    info = await subject.info("s")

    assert creating.done()
    assert info.path == "s"


async def test_a_reader_of_a_stream_being_deleted_is_told_when_it_is_gone(
    subject: Subject,
) -> None:
    await subject.made("s")
    deleting = subject.ask(subject.store.delete, "s")

    assert await subject.look("s") == Missing()
    assert deleting.done()


async def test_a_chunk_never_reaches_past_the_tail_that_was_looked_at(subject: Subject) -> None:
    await subject.made("s", body=b"one")
    info = await subject.info("s")
    await subject.appended("s", b"two")

    chunk = await subject.store.read(info, START, bytes_max=100)

    assert isinstance(chunk, Chunk)
    assert (chunk.data, chunk.next, chunk.at_tail) == (b"one", Offset(1, 3), True)


async def test_a_read_at_the_tail_is_empty(subject: Subject) -> None:
    await subject.made("s", body=b"one")

    chunk = await subject.read("s", Offset(1, 3))

    assert isinstance(chunk, Chunk)
    assert (chunk.data, chunk.next, chunk.at_tail) == (b"", Offset(1, 3), True)


async def test_bytes_are_cut_at_the_limit_and_json_between_messages(subject: Subject) -> None:
    await subject.made("bytes", body=b"0123456789")
    await subject.made("json", JSON, body=b'["aaa","bbb","ccc"]')

    cut = await subject.read("bytes", bytes_max=4)
    between = await subject.read("json", bytes_max=12)

    assert (cut.data, cut.next, cut.at_tail) == (b"0123", Offset(0, 4), False)
    assert (between.data, between.next, between.at_tail) == (b'"aaa","bbb"', Offset(2, 10), False)


async def test_a_json_message_larger_than_the_limit_comes_whole(subject: Subject) -> None:
    await subject.made("s", JSON, body=b'["' + b"x" * 500 + b'",1]')

    chunk = await subject.read("s", bytes_max=10)

    assert chunk.data == b'"' + b"x" * 500 + b'"'
    assert chunk.next == Offset(1, 502)


@pytest.mark.parametrize(
    "made_up",
    [
        Offset(0, 1),
        Offset(1, 0),
        Offset(1, 1),
        Offset(2, 5),
        Offset(1, 4),
        Offset(3, 6),
        Offset(9, 9),
        Offset(1, 5),
        Offset(2, 2**53),
    ],
)
async def test_a_place_that_the_stream_does_not_have_is_an_error(
    subject: Subject, made_up: Offset
) -> None:
    """The stream's places are (0,0), (1,3), (2,5) and (3,6); JSON is never cut elsewhere."""
    await subject.made("s", JSON, body=b"[111,22]")
    await subject.append("s", b"3", JSON)

    outcome = await subject.read("s", made_up)

    if made_up == Offset(2, 5):
        assert outcome.data == b"3"
    elif made_up == Offset(3, 6):
        assert outcome.data == b""
    else:
        assert outcome == BadOffset()


async def test_bytes_of_every_value_come_back_as_they_were(subject: Subject) -> None:
    everything = bytes(range(256)) * 3
    await subject.made("s", "application/octet-stream", body=everything)
    for at in range(0, 256, 7):
        await subject.append("s", everything[at : at + 7], "application/octet-stream")

    expected = everything + b"".join(everything[at : at + 7] for at in range(0, 256, 7))
    assert await subject.content("s") == expected
    assert await subject.content("s", bytes_max=5) == expected


async def test_a_stream_read_after_its_deletion_is_missing(subject: Subject) -> None:
    await subject.made("s", body=b"x" * 100)
    info = await subject.info("s")
    await subject.delete("s")

    outcome = await subject.store.read(info, START, bytes_max=10)

    assert outcome == Missing() or (isinstance(outcome, Chunk) and outcome.data == b"x" * 10)


# Any content, any chunk size: a model of the whole is a list of payloads.

PAYLOADS = st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=6)
BATCHES = st.lists(
    st.lists(st.integers(0, 10**6) | st.text("aé\u20ac", max_size=6), min_size=1, max_size=5),
    min_size=1,
    max_size=5,
)


@st.composite
def histories(draw: st.DrawFn) -> tuple[bool, list[Any]]:
    """A kind of stream, its appends, and forks of forks: (place, sub-offset, further appends)."""
    is_json = draw(st.booleans())
    batches = BATCHES if is_json else PAYLOADS
    forks = draw(
        st.lists(
            st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), batches), min_size=0, max_size=3
        )
    )
    return is_json, [draw(batches), *forks]


@pytest.mark.parametrize("engine", sorted(ENGINES))
@given(
    history=histories(),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    made_up=st.lists(st.builds(Offset, st.integers(0, 12), st.integers(0, 60)), max_size=8),
)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_following_next_from_the_start_gives_the_whole_whatever_the_chunks(
    tmp_path_factory: pytest.TempPathFactory,
    engine: str,
    history: tuple[bool, list[Any]],
    sizes: list[int],
    made_up: list[Offset],
) -> None:
    """Forks of forks included: the chunks join to the content, every offset on the way is one to
    resume from, no chunk is larger than asked unless it is a single JSON message, and an offset
    that no reader can have come by is refused."""

    async def check() -> None:
        clock = SimClock()
        subject = Subject(ENGINES[engine](tmp_path_factory.mktemp("data"), clock), clock)
        try:
            await _build_and_check(subject, history, (sizes, made_up))
        finally:
            await subject.close()

    asyncio.run(check())


async def _build_and_check(
    subject: Subject, history: tuple[bool, list[Any]], probes: tuple[list[int], list[Offset]]
) -> None:
    is_json, (first, *forks) = history
    content_type = JSON if is_json else "application/octet-stream"
    await subject.made("0", content_type)
    rows = await _append_all(subject, "0", content_type, first)
    expected = [row for row, _ in rows]
    places = [START, *(place for _, place in rows)]
    await _check(subject, "0", is_json, expected, probes)
    for number, (where, inside, more) in enumerate(forks, 1):
        at = where % len(places)
        kept = expected[:at]
        length = len(expected[at]) if at < len(expected) else 0
        sub = inside % (length + 1)
        outcome = await subject.fork(str(number), str(number - 1), places[at], sub)
        if sub:
            kept.append(expected[at][:sub])
        tail = outcome.tail
        rows = await _append_all(subject, str(number), content_type, more)
        expected = kept + [row for row, _ in rows]
        places = places[: at + 1] + ([tail] if sub else []) + [place for _, place in rows]
        await _check(subject, str(number), is_json, expected, probes)


async def _append_all(
    subject: Subject, path: str, content_type: str, batches: list[Any]
) -> list[tuple[Any, Offset]]:
    done = []
    for batch in batches:
        body = batch if isinstance(batch, bytes) else json.dumps(batch, ensure_ascii=False).encode()
        outcome = await subject.append(path, body, content_type)
        done.append((batch, outcome.tail))
    return done


async def _check(
    subject: Subject,
    path: str,
    is_json: bool,
    expected: list[Any],
    probes: tuple[list[int], list[Offset]],
) -> None:
    sizes, made_up = probes
    info = await subject.info(path)
    flat = [message for batch in expected for message in batch] if is_json else b"".join(expected)
    assert len(flat) == (info.tail.messages if is_json else info.tail.bytes)
    # The smallest steps visit every place that there is.
    places = await _walk(subject, info, flat, bytes_max=1)
    for bytes_max in sizes:
        assert await _walk(subject, info, flat, bytes_max=bytes_max) <= places
    for offset in made_up:
        outcome = await subject.store.read(info, offset, bytes_max=100)
        assert isinstance(outcome, Chunk if offset in places else BadOffset), (offset, outcome)


async def _walk(subject: Subject, info: StreamInfo, flat: Any, *, bytes_max: int) -> set[Offset]:
    """Read the whole stream in steps of `bytes_max`; the places visited on the way."""
    whole: Any = [] if info.is_json else b""
    at, places = START, {START}
    while at != info.tail:
        chunk = await subject.store.read(info, at, bytes_max=bytes_max)
        assert isinstance(chunk, Chunk), (info.path, at, chunk)
        assert (chunk.start, chunk.info) == (at, info)
        assert at.bytes < chunk.next.bytes <= info.tail.bytes
        assert at.messages <= chunk.next.messages <= info.tail.messages
        piece: Any = json.loads(b"[%b]" % chunk.data) if info.is_json else chunk.data
        whole += piece
        size = chunk.next.bytes - at.bytes
        assert size <= bytes_max or (info.is_json and len(piece) == 1)
        at = chunk.next
        places.add(at)
    assert whole == flat
    return places
