"""Sessions: frames, their order, and when a session ends."""

import json
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.features import (
    DEDUPE,
    FeatureRefused,
    Negotiated,
    Wishes,
    negotiate,
    offered,
    read_supported,
)
from fencepost.protocol.meshes import MeshSettings
from fencepost.protocol.sends import SendLimits
from fencepost.protocol.sessions import (
    DEFAULT_LIMITS,
    EXIT_CODES,
    NEW,
    NO_HELLO,
    OCCUPIED,
    REPLACED,
    SILENT,
    Ack,
    Answered,
    AskPing,
    ClientFrame,
    Close,
    Deliver,
    Hello,
    Ping,
    Pong,
    Quiet,
    Refused,
    SendFrame,
    Session,
    Welcome,
    ack_frame,
    answer_frame,
    answered,
    closed_for,
    decide_liveness,
    deliver_frame,
    hello_frame,
    parse_client_frame,
    parse_server_frame,
    ping_frame,
    pong_frame,
    receive,
    refused_frame,
    send_frame,
    welcome_frame,
)

WISHES = Wishes({DEDUPE: {"version": 2}}, {})
HELLO = Hello(WISHES, "ann")
SEND = SendFrame(b"1", b"{}")


def test_what_a_client_writes_the_server_reads() -> None:
    assert parse_client_frame(hello_frame(HELLO)) == HELLO
    assert parse_client_frame(hello_frame(Hello(WISHES))) == Hello(WISHES)
    again = Hello(WISHES, "ann", "daemon 1", 41)
    assert parse_client_frame(hello_frame(again)) == again
    assert parse_client_frame(send_frame(7, b'{"a": 1}')) == SendFrame(b"7", b'{"a": 1}')
    assert parse_client_frame(ack_frame(8, "token", 41)) == Ack(b"8", "token", 41)
    assert parse_client_frame(ping_frame(b"5")) == Ping(b"5")
    assert parse_client_frame(pong_frame(Ping(b'"x"'))) == Pong(b'"x"')


def test_what_the_server_writes_a_client_reads() -> None:
    supported = offered(MeshSettings(), SendLimits(), dedupes=True)
    agreed = negotiate(WISHES, supported)
    assert isinstance(agreed, Negotiated)

    welcome = parse_server_frame(welcome_frame(agreed))

    assert isinstance(welcome, Welcome)
    assert read_supported(welcome.body) == supported
    assert parse_server_frame(answer_frame(b"7", 201, {"duplicate": False})) == Answered(
        7, 201, {"duplicate": False}
    )
    assert parse_server_frame(answer_frame(b"8", 200)) == Answered(8, 200, None)
    assert parse_server_frame(deliver_frame('to"ken', [b'{"a":1}', b"2"])) == Deliver(
        'to"ken', [b'{"a":1}', b"2"]
    )
    assert parse_server_frame(refused_frame(OCCUPIED)) == Refused(
        OCCUPIED.kind, "", OCCUPIED.detail
    )
    assert parse_server_frame(ping_frame()) == Ping(b"0")


def test_the_id_of_a_frame_comes_back_as_it_was_written() -> None:
    frame = parse_client_frame(b'{"id": "a-\\u0031", "send": {}}')

    assert isinstance(frame, SendFrame)
    assert json.loads(answer_frame(frame.id, 200)) == {"id": "a-1", "status": 200}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"[]",
        b"{}",
        b'{"hello":{},"id":1}',
        b'{"hello":[]}',
        b'{"hello":{"member":7}}',
        b'{"hello":{"member":"a/b"}}',
        b'{"hello":{"want":{}}}',
        b'{"hello":{"worker":""}}',
        b'{"hello":{"worker":"' + b"w" * 257 + b'"}}',
        b'{"hello":{"worker":"a\\nb"}}',
        b'{"hello":{"after":-2}}',
        b'{"hello":{"after":"1"}}',
        b'{"hello":{"after":true}}',
        b'{"send":{}}',
        b'{"id":1}',
        b'{"id":-1,"send":{}}',
        b'{"id":1.5,"send":{}}',
        b'{"id":null,"send":{}}',
        b'{"id":1,"id":2,"send":{}}',
        b'{"id":"' + b"x" * 128 + b'","send":{}}',
        b'{"id":1,"ack":{}}',
        b'{"id":1,"ack":{"token":"t"}}',
        b'{"id":1,"ack":{"token":"t","at":"1"}}',
        b'{"id":1,"ack":{"token":"t","at":-2}}',
        b'{"id":1,"ack":{"token":"' + b"t" * 1025 + b'","at":1}}',
        b'{"ping":"' + b"x" * 125 + b'"}',
        b'{"ping":"\xff"}',
        b'{"jump":1}',
    ],
)
def test_what_is_no_frame_closes_the_session_with_a_reason(data: bytes) -> None:
    close = parse_client_frame(data)

    assert isinstance(close, Close)
    assert (close.code, close.kind) == (1007, "frame_invalid")
    assert close.detail


def test_a_frame_that_is_too_large_closes_the_session() -> None:
    close = parse_client_frame(b" " * 11, replace(DEFAULT_LIMITS, frame_bytes_max=10))

    assert isinstance(close, Close)
    assert (close.code, close.kind) == (1009, "frame_too_large")


@given(st.binary(max_size=60) | st.sampled_from(["hello", "send", "ack", "id"]).map(str.encode))
def test_any_bytes_are_a_frame_or_a_close(data: bytes) -> None:
    """Neither side fails over what the other one sends."""
    for parsed in (parse_client_frame(data), parse_server_frame(data)):
        assert isinstance(parsed, tuple)


def test_the_hello_comes_first_and_once() -> None:
    early = receive(NEW, SEND)
    opened = receive(NEW, HELLO)
    assert isinstance(opened, Session)
    again = receive(opened, HELLO)

    assert isinstance(early, Close)
    assert isinstance(again, Close)
    assert early.code == again.code == 1002
    assert opened.phase == "open"


def test_a_ping_is_welcome_at_any_time() -> None:
    assert receive(NEW, Ping(b"1")) == NEW


FRAMES: st.SearchStrategy[ClientFrame | None] = st.sampled_from(
    [HELLO, SEND, Ack(b"2", "t", 1), Ping(b"1"), Pong(b"1"), None]
)


@given(st.lists(FRAMES, max_size=60))
def test_every_frame_that_wants_an_answer_is_counted(frames: list[ClientFrame | None]) -> None:
    """Whatever comes, and whenever answers (None) leave: the count is right."""
    session, waiting = NEW, 0
    for frame in frames:
        if frame is None:
            if waiting:
                session, waiting = answered(session), waiting - 1
            continue
        after = receive(session, frame)
        if isinstance(after, Close):
            assert after.code == 1002
            break
        session = after
        waiting += isinstance(frame, SendFrame | Ack)
        assert session.in_flight == waiting


@pytest.mark.parametrize(
    ("close", "code", "kind", "exit_code"),
    [
        (
            closed_for(FeatureRefused("feature_unavailable", "x", "no")),
            4010,
            "feature_unavailable",
            10,
        ),
        (
            closed_for(FeatureRefused("feature_param_invalid", "x", "no")),
            4011,
            "feature_param_invalid",
            11,
        ),
        (
            closed_for(FeatureRefused("feature_param_below_floor", "x", "no")),
            4012,
            "feature_param_below_floor",
            12,
        ),
        (REPLACED, 4003, "replaced_by_newer_connection", 13),
        (OCCUPIED, 4004, "member_already_connected", 14),
    ],
)
def test_each_reason_has_its_close_code_and_exit_code(
    close: Close, code: int, kind: str, exit_code: int
) -> None:
    assert (close.code, close.reason.decode(), EXIT_CODES[close.code]) == (code, kind, exit_code)
    said = msgspec.json.decode(refused_frame(close))["refused"]
    assert said == {"kind": kind, "feature": close.feature, "detail": close.detail}


def test_a_silent_client_is_asked_and_then_left() -> None:
    limits = replace(DEFAULT_LIMITS, hello_ms_max=10, ping_ms=20, pong_ms_max=30)

    def look(now_ms: int, pinged_ms: int | None = None, phase: str = "open") -> object:
        return decide_liveness(
            phase=phase,  # type: ignore[arg-type]
            opened_ms=100,
            heard_ms=200,
            pinged_ms=pinged_ms,
            now_ms=now_ms,
            limits=limits,
        )

    assert look(109, phase="hello") == Quiet(110)
    assert look(110, phase="hello") == NO_HELLO
    assert look(219) == Quiet(220)
    assert look(220) == AskPing()
    assert look(249, pinged_ms=220) == Quiet(250)
    assert look(250, pinged_ms=220) == SILENT
