"""What is sent for a row, and what an answer means for it."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.client.errors import ConnectionFailedError, FencepostError, OutcomeUnknownError
from fencepost.client.errors.answers import error_of
from fencepost.client.meshes import SendReceipt
from fencepost.outbox.delivery import (
    RowIds,
    attempt,
    body_of,
    encode_send,
    payload_of,
    read_send,
    row_of,
)
from fencepost.outbox.states import Failed, Rejected, Row, Stored
from fencepost.protocol.envelopes import Send, parse_send
from fencepost.protocol.fingerprints import Unsendable
from fencepost.testing import SimClock


def sent(data: bytes) -> Send:
    found = read_send(data, header_id=None, minted_id="minted")
    assert isinstance(found, Send), found
    return found


def a_row(data: bytes = b'{"kind":"topic","ref":"alerts","body":"hello"}') -> Row:
    return row_of(sent(data), mesh="shop", row_id="row-1", now_ms=1000)


BODIES = st.one_of(
    st.text().map(lambda text: {"body": text}),
    st.just({"body_base64": "aGVsbG8="}),
    st.recursive(
        st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ).map(lambda value: {"json": value}),
)


@given(BODIES, st.sampled_from(("now", "next", "low")), st.booleans())
def test_every_attempt_says_what_was_accepted(
    body: dict[str, Any], priority: str, spaced: bool
) -> None:
    """The server reads the same fingerprint out of an attempt as the outbox has stored."""
    fields = {"kind": "dm", "ref": "ann", "priority": priority, "meta": {"b": 1, "a": 2}, **body}
    row = a_row(json.dumps(fields, indent=2 if spaced else None).encode())

    found = parse_send(body_of(row, "ben"), header_id=None, minted_id="", principal=None)

    assert isinstance(found, Send)
    assert found.fingerprint == row.request_fingerprint
    assert (found.client_message_id, found.sender) == ("minted", "ben")
    assert body_of(row, "ben") == body_of(row, "ben")


def test_the_bytes_of_a_json_body_are_kept_as_they_came() -> None:
    send = sent(b'{"kind":"queue","ref":"jobs","json":{"a" :  1.0}}')

    assert b'"json":{"a" :  1.0}' in payload_of(send)


def test_an_attempt_names_no_sender_where_the_token_does() -> None:
    assert b"sender" not in body_of(a_row(), None)
    assert b'"sender":"ben"' in body_of(a_row(), "ben")


def test_a_python_value_becomes_a_send() -> None:
    more: dict[str, Any] = {"priority": None, "reply_to": None, "meta": None}

    row = a_row(encode_send("topic:orders", {"paid": 7}, id="paid-7", **more))

    assert (row.destination, row.client_message_id) == ("topic:orders", "paid-7")


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"sender": "eve"}, "sender_invalid"),
        ({"body": None}, "body_invalid"),
        ({"parts": [{"txn": "t", "part": "p"}]}, "body_invalid"),
        ({"ref": "a\0b"}, "ref_invalid"),
        ({"meta": {"a": float(2**60)}}, None),
        ({"meta": {"a": 2**60}}, "meta_number_invalid"),
        ({"surprise": 1}, "send_invalid"),
    ],
)
def test_what_a_server_would_refuse_is_refused_before_it_is_stored(
    more: dict[str, Any], code: str | None
) -> None:
    fields = {"kind": "topic", "ref": "alerts", "body": "hello", **more}
    if "parts" in more:
        del fields["body"]

    found = read_send(json.dumps(fields).encode(), header_id=None, minted_id="m")

    assert (found.code if isinstance(found, Unsendable) else None) == code


class Answering:
    """A way to a server that gives one answer."""

    def __init__(self, answer: SendReceipt | FencepostError) -> None:
        self.answer = answer

    async def send_encoded(self, data: bytes) -> SendReceipt:
        if isinstance(self.answer, FencepostError):
            raise self.answer
        return self.answer


def refusal(status: int, code: str = "whatever", **headers: str) -> FencepostError:
    body = msgspec.json.encode({"code": code, "detail": "because"})
    return error_of(status, {"content-type": "application/problem+json", **headers}, body)


def receipt(**more: Any) -> SendReceipt:
    return SendReceipt(broker_message_id="b-1", client_message_id="minted", history_id="1", **more)


@pytest.mark.parametrize(
    ("answer", "event"),
    [
        (receipt(duplicate=False), Stored("b-1")),
        (receipt(duplicate=True), Stored("b-1", duplicate=True)),
        (
            receipt(duplicate=True, history_available=False),
            Stored("b-1", duplicate=True, history_available=False),
        ),
        *((refusal(status), Failed) for status in (408, 425, 429, 500, 502, 503, 504, 507)),
        *((refusal(status), Rejected) for status in (400, 401, 403, 404, 409, 410, 413, 422)),
        (ConnectionFailedError("no route"), Failed),
        (OutcomeUnknownError("lost", cause=refusal(503)), Failed),
        (OutcomeUnknownError("lost", cause=ConnectionFailedError("broken", sent=True)), Failed),
    ],
)
async def test_an_answer_of_the_server_is_an_event(
    answer: SendReceipt | FencepostError, event: object
) -> None:
    found = await attempt(Answering(answer), a_row(), sender=None, clock=SimClock())

    assert found == event if isinstance(event, Stored) else type(found) is event


async def test_the_server_may_ask_to_wait() -> None:
    answer = Answering(OutcomeUnknownError("lost", cause=refusal(503, **{"retry-after": "7"})))

    found = await attempt(answer, a_row(), sender=None, clock=SimClock())

    assert isinstance(found, Failed)
    assert found.retry_after_ms == 7000


def test_ids_of_rows_sort_by_the_order_in_which_they_were_made() -> None:
    clock = SimClock()
    ids = RowIds(clock)
    made = [ids() for _ in range(100)]
    clock.jump(-3_600_000)
    made += [ids() for _ in range(100)]
    again = RowIds(clock, newest=made[-1])
    made += [again() for _ in range(100)]

    assert made == sorted(set(made))
    assert {len(one) for one in made} == {26}
