"""What the stream commands say: errors as sentences with an exit code, messages as lines."""

import io
import os
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fencepost
from fencepost.cli.append import checked_json, lines_of
from fencepost.cli.interrupts import Interrupts
from fencepost.cli.options import content_type_of
from fencepost.cli.render import (
    REFUSED,
    UNREACHABLE,
    CommandError,
    batch_line,
    code_of,
    message_line,
    printable,
    sentence_of,
)
from fencepost.client.errors.answers import error_of

URL = "http://h:1"


def all_errors(root: type[Exception] = fencepost.FencepostError) -> Iterator[type[Exception]]:
    for kind in root.__subclasses__():
        yield kind
        yield from all_errors(kind)


REFUSALS = sorted(
    {kind for kind in all_errors() if issubclass(kind, fencepost.ResponseError)},
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", REFUSALS, ids=lambda kind: kind.__name__)
def test_every_refusal_is_one_line_and_exits_with_1(kind: type[fencepost.ResponseError]) -> None:
    for detail in ("of the\nserver", "the server gave no reason"):
        error = kind(status=400, code="c", detail=detail, headers={}, problem={})
        said = sentence_of(error, URL)

        assert code_of(error) == REFUSED
        assert "\n" not in said
        assert "gave no reason" not in said


def test_what_to_do_next_is_part_of_the_sentence() -> None:
    moved = error_of(412, {"stream-next-offset": "7_7", "content-type": "json"}, TAIL_MOVED)
    assert "The tail is 7_7 now" in sentence_of(moved, URL)
    assert "--token" in sentence_of(error_of(401, {}, b""), URL)
    assert "fencepost create" in sentence_of(error_of(404, {}, b""), URL)


TAIL_MOVED = b'{"code": "tail_moved", "detail": "The tail is elsewhere."}'


def test_a_server_that_cannot_be_reached_exits_with_3_however_deep_the_reason_lies() -> None:
    away = fencepost.ConnectionFailedError("refused")
    unknown = fencepost.OutcomeUnknownError("may be stored", cause=away)
    failed = fencepost.ProducerFailedError("stopped", cause=unknown)

    for error in (away, unknown, failed, fencepost.RequestTimeoutError("late")):
        assert code_of(error) == UNREACHABLE
    assert "fencepost serve" in sentence_of(away, URL)
    assert "Read the stream" in sentence_of(failed, URL)
    assert code_of(fencepost.EpochContestedError("often")) == REFUSED


def test_another_web_server_is_no_server() -> None:
    page = error_of(404, {"content-type": "text/html;charset=utf-8"}, b"<!DOCTYPE HTML>\n<html>")

    assert code_of(page) == UNREACHABLE
    assert sentence_of(page, URL).startswith(f"what answers at {URL} is not a Fencepost server")


def test_text_from_elsewhere_does_not_command_the_terminal() -> None:
    assert printable("plain ü") == "plain ü"
    assert printable("\x1b[2Jgone\r\n") == "\\x1b[2Jgone\\r\\n"


def test_a_message_is_a_line_byte_for_byte_unless_it_spans_several() -> None:
    assert message_line(msgspec.Raw(b'{"a": 1.0}')) == b'{"a": 1.0}\n'
    assert message_line(msgspec.Raw(b'{"a":\n 1.0, "b": 1e400}')) == b'{"a":1.0,"b":1e400}\n'


def test_a_batch_for_programs_is_one_line_with_the_offset_to_go_on_from() -> None:
    messages = [msgspec.Raw(b"1"), msgspec.Raw(b"[\n]")]
    batch = fencepost.Batch(messages=messages, data=b"[1,[\n]]", offset="a", next_offset="b")
    raw = fencepost.Batch(messages=[b"\xff"], data=b"\xff", offset="a", next_offset="b")

    assert batch_line(batch, is_json=True) == (
        b'{"offset":"a","next_offset":"b","messages":[1,[]],"closed":false}\n'
    )
    assert b'"data_base64":"/w=="' in batch_line(raw, is_json=False)


@pytest.mark.parametrize("data", [b"", b"{", b"nope", b"1 2", b'"\xff"', b"[" * 100_000])
def test_what_is_not_json_is_refused_before_it_is_sent(data: bytes) -> None:
    with pytest.raises(CommandError, match=r"is not (JSON|UTF-8)"):
        checked_json(data)


def test_a_type_has_a_short_name_or_is_taken_as_it_is() -> None:
    assert content_type_of("json") == "application/json"
    assert content_type_of("text/csv; header=present") == "text/csv; header=present"
    with pytest.raises(CommandError, match="--type"):
        content_type_of("yaml")


@given(st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"")), max_size=20))
def test_lines_are_those_of_the_file(lines: list[bytes]) -> None:
    """Splitting what was joined gives the same lines; only an empty end is no line."""
    reading, writing = os.pipe()
    with open(reading, "rb") as source, open(writing, "wb") as pipe:
        pipe.write(b"\n".join(lines))
        pipe.close()
        taken: list[int] = []
        found = list(lines_of(source, lambda: None, taken.append, Interrupts()))

    expected = io.BytesIO(b"\n".join(lines)).read().split(b"\n")
    assert found == (expected[:-1] if not expected[-1] else expected)
    assert sum(map(len, found)) <= (taken[-1] if taken else 0)


def test_a_line_may_be_longer_than_one_read_and_a_pause_is_told() -> None:
    reading, writing = os.pipe()
    paused: list[bool] = []
    with open(reading, "rb") as source, open(writing, "wb", buffering=0) as pipe:

        def idle() -> None:
            paused.append(True)
            pipe.write(b"rt\nend\n")
            pipe.close()

        pipe.write(b"sta")
        found = list(lines_of(source, idle, lambda _: None, Interrupts()))

    assert found == [b"start", b"end"]
    assert paused == [True]
