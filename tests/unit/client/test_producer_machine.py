"""The producer's state machine, answer by answer."""

from __future__ import annotations

import pytest

from fencepost.client.errors import (
    FencepostError,
    OutcomeUnknownError,
    ProducerClosedError,
    ProducerFailedError,
    SequenceGapError,
    SequenceUsedError,
    StaleEpochError,
    StreamClosedError,
)
from fencepost.client.http import Response
from fencepost.client.producer.batches import PendingBatch
from fencepost.client.producer.machine import BATCH_MESSAGES_MAX
from fencepost.client.settings import ProducerSettings, Retries
from tests.unit.client.model import ModelServer, Session, Wired, unavailable

ONE_EACH = ProducerSettings(batch_bytes_max=1, retries=Retries(delay_seconds_max=1.0))


def opened(server: ModelServer | None = None) -> Session:
    """A session whose first message is stored; every message is a batch of its own."""
    session = Session(0, server or ModelServer(), settings=ONE_EACH)
    session.append()
    session.settle()
    return session


def test_the_first_batch_travels_alone_and_the_others_pipelined() -> None:
    session = Session(0, ModelServer(), settings=ONE_EACH)
    for _ in range(8):
        session.append()

    session.pump()
    assert len(session.to_server) == 1

    session.deliver_request()
    session.deliver_answer()
    session.pump()
    assert [wired.seq for wired in session.to_server] == [1, 2, 3, 4, 5]


def test_a_restarted_producer_opens_the_epoch_after_its_predecessors() -> None:
    server = ModelServer()
    for epoch in (0, 6):
        server.take(Wired(epoch, 0, None, b"[[-1,0]]"))

    session = opened(server)

    assert session.machine.last_acked is not None
    assert (session.machine.last_acked.epoch, session.machine.last_acked.seq) == (7, 0)
    assert session.acknowledged == [[0, 0]]


@pytest.mark.parametrize("content", [b"[[0,0]]", b"[[9,9]]"])
def test_a_predecessor_in_epoch_0_swallows_nothing_whatever_it_wrote(content: bytes) -> None:
    server = ModelServer()
    server.take(Wired(0, 0, None, content))

    session = opened(server)

    assert session.acknowledged == [[0, 0]]
    assert len(server.stored) == 2


def test_a_lost_answer_to_the_first_batch_is_recognised_by_its_key() -> None:
    session = Session(0, ModelServer(), settings=ONE_EACH)
    session.append()
    session.pump()
    session.deliver_request()
    session.lose()

    session.settle()

    assert session.server.stored == [[0, 0]]
    assert session.machine.last_acked is not None
    assert session.machine.last_acked.duplicate


def test_a_duplicate_on_the_first_transmission_is_an_error_and_the_data_is_kept() -> None:
    session = opened()
    session.server.take(Wired(0, 1, None, b"[[0,1]]"))

    session.append()
    session.settle()

    assert session.machine.failure is not None
    assert isinstance(session.machine.failure.cause, SequenceUsedError)
    assert session.machine.failure.cause.seq == 1
    assert session.refused == [[0, 1]]


def test_a_duplicate_with_other_bytes_is_an_error_even_when_sent_again() -> None:
    session = opened()
    session.append()
    session.pump()
    session.lose()
    session.server.take(Wired(0, 1, None, b"[[9,9]]"))

    session.settle()

    assert session.machine.failure is not None
    assert isinstance(session.machine.failure.cause, SequenceUsedError)


def test_going_on_with_a_saved_epoch_and_seq_takes_no_extra_round_trip() -> None:
    before = opened()
    saved = before.machine.last_acked
    assert saved is not None

    after = Session(1, before.server, epoch=saved.epoch, seq=saved.seq, settings=ONE_EACH)
    for _ in range(3):
        after.append()
    after.pump()
    assert [(wired.epoch, wired.seq) for wired in after.to_server] == [(0, 1), (0, 2), (0, 3)]

    after.settle()
    assert after.acknowledged == [[1, 0], [1, 1], [1, 2]]


def test_going_on_behind_what_the_server_has_is_an_error_not_a_loss() -> None:
    before = opened()
    before.append()
    before.settle()

    after = Session(1, before.server, epoch=0, seq=0, settings=ONE_EACH)
    after.append()
    after.settle()

    assert after.refused == [[1, 0]]
    assert after.machine.failure is not None
    assert isinstance(after.machine.failure.cause, SequenceUsedError)
    assert after.machine.failure.cause.last_seq == 1


def test_a_gap_among_its_own_batches_heals() -> None:
    session = opened()
    for _ in range(4):
        session.append()
    session.pump()
    session.to_server.popleft()
    session.to_client.append(unavailable())

    session.settle()

    assert session.machine.failure is None
    assert session.server.stored == [[0, index] for index in range(5)]


def test_a_real_gap_surfaces_once_and_every_message_is_reported() -> None:
    server = ModelServer()
    session = Session(0, server, epoch=0, seq=7, settings=ONE_EACH)
    for _ in range(7):
        session.append()
    session.settle()

    assert session.machine.failure is not None
    assert isinstance(session.machine.failure.cause, SequenceGapError)
    assert session.machine.failure.cause.expected == 0
    assert session.refused == [[0, index] for index in range(7)]


def test_a_fenced_producer_stops_and_says_so() -> None:
    session = opened()
    session.server.take(Wired(1, 0, None, b"[[9,9]]"))
    for _ in range(9):
        session.append()
    session.settle()

    assert session.machine.failure is not None
    assert isinstance(session.machine.failure.cause, StaleEpochError)
    assert session.machine.failure.cause.epoch == 1
    assert session.refused == [[0, index] for index in range(1, 10)]
    with pytest.raises(ProducerFailedError):
        session.append()


def test_a_closed_stream_ends_the_producer() -> None:
    session = opened()
    session.server.stream.closed = True
    session.append()
    session.settle()

    assert session.machine.failure is not None
    assert isinstance(session.machine.failure.cause, StreamClosedError)


def test_a_batch_that_nobody_answers_is_reported_as_unknown_after_its_time() -> None:
    session = opened()
    session.append()
    session.append()
    session.pump()
    session.machine.append([0, 3], session.now)

    session.now += 121.0
    session.pump()

    assert session.unknown[:2] == [[0, 1], [0, 2]]
    assert not session.machine.busy


def test_a_silent_connection_is_given_up() -> None:
    session = opened()
    session.append()
    session.pump()

    session.now += 31.0
    session.pump()

    assert not session.up
    session.settle()
    assert session.server.stored == [[0, 0], [0, 1]]


def test_an_unknown_answer_to_the_first_batch_of_a_plain_server_is_not_guessed() -> None:
    session = Session(0, ModelServer(), settings=ONE_EACH)
    session.append()
    session.pump()
    session.deliver_request()
    session.lose()
    session.now += 5.0
    session.pump()

    session.to_server.clear()
    session.to_client.append(Response(204, {"stream-next-offset": "1"}))
    session.deliver_answer()

    assert session.unknown == [[0, 0]]
    assert isinstance(session.machine.failure, ProducerFailedError)
    assert isinstance(session.machine.failure.cause, OutcomeUnknownError)


def test_expired_credentials_are_asked_for_once_more() -> None:
    settings = ProducerSettings(batch_bytes_max=1, renewable=True)
    session = Session(0, ModelServer(), settings=settings)
    session.append()
    session.pump()
    session.to_server.clear()
    session.to_client.append(Response(401, {}))
    session.deliver_answer()
    session.pump()

    assert session.machine.failure is None
    session.settle()
    assert session.server.stored == [[0, 0]]


def test_a_batch_is_sealed_by_bytes_by_count_and_lingers() -> None:
    session = Session(0, ModelServer(), settings=ProducerSettings(batch_bytes_max=19, linger=1.0))
    session.append()
    session.pump()
    assert not session.up

    session.append()
    session.append()
    session.pump()
    assert len(session.to_server) == 1
    session.deliver_request()
    session.deliver_answer()

    session.append()
    session.pump()
    assert not session.to_server
    assert session.machine.wake_at() == 1.0
    session.now += 1.0
    session.pump()
    assert len(session.to_server) == 1
    assert BATCH_MESSAGES_MAX <= 100_000


def test_what_cannot_be_encoded_leaves_nothing_behind() -> None:
    session = Session(0, ModelServer())
    session.append()
    with pytest.raises(TypeError):
        session.machine.append([1, {"deep": object()}], 0.0)
    session.append()
    session.settle()

    assert session.server.stored == [[0, 0], [0, 1]]


def test_a_batch_gives_its_data_back() -> None:
    json = PendingBatch(json=True, now=0.0)
    json.add({"a": [1, None]})
    json.add("text")
    plain = PendingBatch(json=False, now=0.0)
    plain.add(b"one")
    plain.add("zwei")

    assert json.body == b'[{"a":[1,null]},"text"]'
    assert json.messages == [{"a": [1, None]}, "text"]
    assert plain.body == b"onezwei"
    assert plain.messages == [b"one", b"zwei"]
    with pytest.raises(FencepostError):
        plain.add(b"")
    with pytest.raises(FencepostError):
        plain.add({"not": "bytes"})


def test_a_closed_producer_takes_nothing_more() -> None:
    session = opened()
    session.machine.close(0.0)

    with pytest.raises(ProducerClosedError):
        session.append()


@pytest.mark.parametrize("bad", [{"max_in_flight": 0}, {"linger": -1.0}])
def test_settings_that_make_no_sense_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"max_in_flight|linger"):
        ProducerSettings(**bad)  # type: ignore[arg-type]


def test_an_answer_that_no_request_waits_for_drops_the_connection() -> None:
    session = opened()

    session.machine.answered(Response(408, {}), now=1.0)

    assert session.machine.drop
    assert session.machine.failure is None
