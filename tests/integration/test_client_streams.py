"""The client against a real server: streams, conditions, reading, following, lists and errors."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

import fencepost
from fencepost import Client, Producing, Stream
from tests.serving import ServerProcess

BYTES = "application/octet-stream"


@pytest.fixture(name="client")
def _client(server_process: ServerProcess) -> Client:
    return fencepost.connect(server_process.url)


@pytest.fixture(autouse=True)
def _closed_after(client: Client) -> object:
    yield
    client.close()


@pytest.fixture(name="orders")
def _orders(client: Client, request: pytest.FixtureRequest) -> Stream:
    return client.create(f"orders/{request.node.name}")


def test_what_is_appended_is_read_back(orders: Stream) -> None:
    first = orders.append({"order": 1})
    orders.append_many([{"order": 2}, {"order": 3}])
    orders.append([4, 5])

    assert orders.read().messages() == [{"order": 1}, {"order": 2}, {"order": 3}, [4, 5]]
    assert orders.read(offset=first.next_offset).messages()[0] == {"order": 2}
    assert orders.read().bytes() == b'[{"order":1},{"order":2},{"order":3},[4,5]]'
    assert first.version == 0
    assert first.position is not None


def test_messages_can_be_typed(orders: Stream) -> None:
    class Order(msgspec.Struct):
        order: int

    orders.append(Order(7))

    assert orders.read(type=Order).messages() == [Order(7)]


def test_bytes_and_text_come_back_as_they_were(client: Client) -> None:
    every_byte = bytes(range(256))
    raw = client.create("kinds/bytes", content_type=BYTES, messages=[every_byte])
    raw.append(every_byte)
    text = client.create("kinds/text", content_type="text/plain; charset=utf-8")
    text.append("grüße\r\n")
    text.append("welt")

    assert raw.read().bytes() == every_byte * 2
    assert text.read().text() == "grüße\r\nwelt"
    assert "".join(text.read()) == "grüße\r\nwelt"
    with pytest.raises(fencepost.FencepostError, match="takes bytes or text"):
        raw.append({"not": "bytes"})


def test_a_long_stream_is_read_in_batches_and_resumed_from_an_offset(orders: Stream) -> None:
    for start in range(0, 40, 10):
        orders.append_many([{"n": n, "pad": "x" * 100_000} for n in range(start, start + 10)])

    reading = orders.read()
    batches = list(reading.batches())
    assert len(batches) > 1
    assert [m["n"] for batch in batches for m in batch.messages] == list(range(40))

    again = orders.read(offset=batches[0].next_offset)
    assert next(again)["n"] == len(batches[0].messages)
    assert again.offset == batches[0].next_offset


def test_creating_again_is_fine_and_otherwise_is_not(client: Client) -> None:
    expires = datetime.now(UTC) + timedelta(hours=1)
    client.create("made", ttl_seconds=60)
    client.create("made", ttl_seconds=60)
    other = client.create("other", expires_at=expires)

    assert client.stream("made").head().ttl_seconds == 60
    found = other.head().expires_at
    assert found is not None
    assert abs(found - expires) < timedelta(seconds=1)
    with pytest.raises(fencepost.StreamExistsError):
        client.create("made", content_type=BYTES)
    with pytest.raises(fencepost.FencepostError, match="time zone"):
        client.create("naive", expires_at=datetime(2030, 1, 1))


def test_closing_ends_writing_and_is_seen_by_readers(orders: Stream) -> None:
    orders.append(1)
    orders.append(2, close=True)

    assert orders.close().closed
    assert orders.head().closed
    with pytest.raises(fencepost.StreamClosedError) as refused:
        orders.append(3)
    assert refused.value.next_offset == orders.head().next_offset
    assert list(orders.follow()) == [1, 2]


def test_what_is_deleted_is_gone(client: Client, orders: Stream) -> None:
    orders.delete()

    with pytest.raises(fencepost.StreamNotFoundError):
        orders.read().messages()
    with pytest.raises(fencepost.StreamNotFoundError):
        orders.delete()
    with pytest.raises(fencepost.StreamNotFoundError) as never:
        client.stream("never").append(1)
    assert f"request {never.value.request_id}" in str(never.value)
    assert never.value.request_id is not None


def test_a_fork_goes_its_own_way(orders: Stream) -> None:
    at = orders.append(1).next_offset
    orders.append(2)

    fork = orders.fork(orders.path + "-fork", offset=at)
    fork.append(3)

    assert fork.read().messages() == [1, 3]
    assert orders.read().messages() == [1, 2]
    orders.delete()
    with pytest.raises(fencepost.StreamDeletedError):
        orders.head()


def test_truncation_moves_the_beginning(orders: Stream) -> None:
    at = orders.append(1).next_offset
    orders.append(2)

    assert orders.truncate(before=at).first_offset == at
    assert orders.read(offset=at).messages() == [2]


def test_conditions_are_met_or_say_what_is(client: Client, orders: Stream) -> None:
    tail = orders.append(1).next_offset

    after = orders.append(2, if_match=tail).next_offset
    with pytest.raises(fencepost.TailMovedError) as moved:
        orders.append(3, if_match=tail)
    assert (moved.value.next_offset, moved.value.version) == (after, 1)
    with pytest.raises(fencepost.TailMovedError):
        orders.append(3, if_none_match="*")
    with pytest.raises(fencepost.StreamNotFoundError):
        client.stream("conditions/absent").append(1, if_match="*")

    made = client.stream("conditions/made")
    made.append(1, if_none_match="*")
    client.stream("conditions/auto").append(1, auto_create=True)
    assert made.read().messages() == [1]

    orders.append(4, stream_seq="b")
    with pytest.raises(fencepost.StreamSeqError):
        orders.append(4, stream_seq="a")


def test_keys_give_the_first_answer_again(orders: Stream) -> None:
    first = orders.append({"pay": 1}, key="invoice-7")
    again = orders.append({"pay": 1}, key="invoice-7")

    assert not first.duplicate
    assert again.duplicate
    assert again.next_offset == first.next_offset
    with pytest.raises(fencepost.KeyReusedError):
        orders.append({"pay": 2}, key="invoice-7")
    assert orders.read().messages() == [{"pay": 1}]


def test_producer_numbers_can_be_used_by_hand(orders: Stream) -> None:
    mine = Producing("task:1", 0, 0)
    claimed = orders.append({"claim": "a"}, producer=mine)
    again = orders.append({"claim": "a"}, producer=mine)
    other = orders.append({"claim": "b"}, producer=mine)

    assert (claimed.duplicate, claimed.epoch, claimed.seq) == (False, 0, 0)
    assert (again.duplicate, again.matches) == (True, True)
    assert (other.duplicate, other.matches) == (True, False)
    with pytest.raises(fencepost.ContentMismatchError):
        orders.append({"claim": "b"}, producer=mine, strict=True)
    with pytest.raises(fencepost.ProducerMovedError) as moved:
        orders.append({"x": 1}, producer=Producing("task:1", 1, 0), producer_if=(0, 3))
    assert (moved.value.epoch, moved.value.seq) == (0, 0)
    orders.append({"x": 1}, producer=Producing("task:1", 1, 0), producer_if=(0, 0))
    with pytest.raises(fencepost.StaleEpochError) as stale:
        orders.append({"claim": "a"}, producer=Producing("task:1", 0, 1))
    assert stale.value.epoch == 1
    with pytest.raises(fencepost.SequenceGapError) as gap:
        orders.append(1, producer=Producing("task:1", 1, 5))
    assert (gap.value.expected, gap.value.received) == (1, 5)


def test_a_commit_is_all_or_nothing(client: Client, orders: Stream) -> None:
    other = client.create("commit/other", content_type="text/plain")
    appends = [
        fencepost.CommitAppend(stream=orders.path, messages=[1, 2]),
        fencepost.CommitAppend(stream=other.path, messages=["a"], content_type="text/plain"),
    ]

    done = client.commit(appends, key="commit-1")
    again = client.commit(appends, key="commit-1")
    assert [append.stream for append in done.appends] == [orders.path, other.path]
    assert not done.duplicate
    assert again.duplicate

    with pytest.raises(fencepost.StreamNotFoundError) as refused:
        client.commit(
            [
                fencepost.CommitAppend(stream=orders.path, messages=[3]),
                fencepost.CommitAppend(stream="commit/absent", messages=[3]),
            ]
        )
    assert refused.value.item == 1
    assert orders.read().messages() == [1, 2]
    assert other.read().text() == "a"


def test_staged_parts_become_visible_with_their_commit(client: Client, orders: Stream) -> None:
    client.stage("txn-1", "part-0", [1, 2], chunk=0)
    again = client.stage("txn-1", "part-0", [1, 2], chunk=0)
    client.stage("txn-1", "part-0", [3], chunk=1)
    assert again.duplicate
    with pytest.raises(fencepost.PartError):
        client.stage("txn-1", "part-0", [9], chunk=0)
    assert orders.read().messages() == []

    client.commit([fencepost.CommitAppend(stream=orders.path, parts=[("txn-1", "part-0")])])

    assert orders.read().messages() == [1, 2, 3]


def test_lists_go_through_all_pages(client: Client) -> None:
    for number in range(120):
        client.create(f"listed/{number:03}").append(number, key=f"listed-{number}")
    with client.stream("listed/000").producer("lister") as producer:
        producer.append(1)

    assert [info.path for info in client.streams(match="listed/*")] == [
        f"listed/{number:03}" for number in range(120)
    ]
    (listed,) = client.producers(stream="listed/000")
    assert (listed.id, listed.epoch, listed.seq) == ("lister", 0, 0)
    keys = {info.key for info in iter(client.keys())}
    assert {f"listed-{number}" for number in range(120)} <= keys


def test_the_log_has_everything_in_one_order(client: Client) -> None:
    before = client.log_head()
    first, second = client.create("logged/a"), client.create("logged/b")
    for number in range(25):
        (first if number % 2 else second).append(number)
    second.delete()

    entries = list(client.log(after=before, match="logged/*", page_rows=7))
    data = [entry for entry in entries if entry.marker is None]
    assert [entry.data for entry in data] == list(range(25))
    assert [entry.position for entry in entries] == sorted(entry.position for entry in entries)
    assert [entry.marker for entry in entries if entry.marker] == ["deleted"]

    plan = client.plan(after=before, rows_max=10, parts=2, match="logged/*")
    assert plan.rows == 10
    assert plan.splits[0].after == before
    assert plan.splits[-1].until == plan.until
    bounded = client.log(after=before, until=plan.until, match="logged/*")
    assert [entry.data for entry in bounded] == list(range(10))


def test_the_log_is_read_by_events_and_newest_first(client: Client) -> None:
    before = client.log_head()
    stream = client.create("logged/events")
    for number in range(12):
        name = "Paid" if number % 3 else "Ordered"
        stream.append({"name": name, "data": number, "meta": {"correlation": f"c{number % 2}"}})

    def numbers(**selection: Any) -> list[int]:
        reading = client.log(after=before, match="logged/events", page_rows=4, **selection)
        return [entry.data["data"] for entry in reading]

    assert numbers(names="Ordered") == [0, 3, 6, 9]
    assert numbers(names=["Ordered", "Paid"]) == list(range(12))
    assert numbers(correlation="c1", names="Ordered") == [3, 9]
    assert numbers(order="desc") == list(range(12))[::-1]
    assert numbers(order="desc", names="Ordered") == [9, 6, 3, 0]
    with pytest.raises(ValueError, match="newest first"):
        client.log(order="desc", follow=True)


def test_the_log_can_be_followed(client: Client) -> None:
    stream = client.create("logged/live")
    stream.append({"early": True})
    following = client.log(after=client.log_head(), streams=["logged/live"], follow=True)
    writer = threading.Thread(target=lambda: stream.append({"late": True}))
    writer.start()

    assert next(following).data == {"late": True}
    writer.join()


@pytest.mark.parametrize("live", ["sse", "long-poll"])
def test_a_follower_gets_the_past_then_the_present_then_the_end(
    orders: Stream, live: fencepost.client.reading.Live
) -> None:
    orders.append_many([0, 1, 2])
    turns = threading.Semaphore(0)

    def write() -> None:
        for number in range(3, 8):
            turns.acquire()
            orders.append(number)
        turns.acquire()
        orders.close()

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    for message in orders.follow(live=live):
        seen.append(message)
        if message >= 2:
            turns.release()
    writer.join()

    assert seen == list(range(8))


def test_following_from_now_skips_the_past(orders: Stream) -> None:
    orders.append("old")
    with orders.follow(offset="now", live="long-poll") as following:
        seen: list[str] = []
        reader = threading.Thread(target=lambda: seen.append(next(following)))
        reader.start()
        # `now` is where the stream ends when the reader first asks: until it has, this is the past.
        while not seen:
            orders.append("new")
        reader.join()
        assert seen == ["new"]


def test_bytes_and_text_can_be_followed_exactly(client: Client) -> None:
    for name, kind, pieces in (
        ("followed/bytes", BYTES, [bytes(range(256)), b"\r\n\r"]),
        ("followed/text", "text/plain", ["a\r\nb\r", "\n ä"]),
    ):
        stream = client.create(name, content_type=kind)
        for piece in pieces:
            stream.append(piece)
        stream.close()
        whole = pieces[0] + pieces[1]  # type: ignore[operator]
        expected = whole if isinstance(whole, bytes) else whole.encode()
        assert stream.follow().bytes() == expected


def test_a_follower_survives_a_restart_of_the_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with (
        ServerProcess(tmp_path_factory.mktemp("restarted")) as server,
        fencepost.connect(server.url) as client,
        client.create("orders").follow() as following,
    ):
        orders = client.stream("orders")
        orders.append(1)
        assert next(following) == 1
        server.kill()
        server.restart()
        orders.append(2)
        assert next(following) == 2


def test_impatience_ends_a_follower_whose_server_is_gone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with ServerProcess(tmp_path_factory.mktemp("gone")) as server:
        retries = fencepost.Retries(attempts_max=2, delay_seconds_max=0.01)
        with fencepost.connect(server.url, retries=retries) as client:
            orders = client.create("orders")
            orders.append(1)
            following = orders.follow(patience=0.05)
            assert next(following) == 1
            server.kill()
            with pytest.raises(fencepost.ConnectionFailedError):
                next(following)
        server.restart()


def test_long_messages_go_through_in_both_directions(orders: Stream) -> None:
    large = "x" * 3_000_000
    orders.append(large)

    assert orders.read().messages() == [large]
    assert next(orders.follow(live="sse")) == large


def test_what_is_too_large_is_said_to_be(orders: Stream) -> None:
    with pytest.raises(fencepost.TooLargeError, match="body_too_large"):
        orders.append("x" * 17_000_000)


def test_bad_input_is_named(client: Client, orders: Stream) -> None:
    with pytest.raises(fencepost.BadRequestError, match="offset_invalid"):
        orders.read(offset="nonsense").messages()
    with pytest.raises(fencepost.BadRequestError, match="path_invalid"):
        client.create("a//b")
    with pytest.raises(fencepost.ContentTypeMismatchError):
        client.stream(orders.path, content_type="text/plain").append("x")
    with pytest.raises(fencepost.FencepostError, match="line end"):
        orders.append(1, key="two\r\nlines")


def test_paths_of_any_script_reach_their_stream(client: Client) -> None:
    for path in ("größe/früh", "a b/c?d#e", "100%/x+y", "日本/語"):
        client.create(path).append(path)
        assert client.stream(path).read().messages() == [path]
