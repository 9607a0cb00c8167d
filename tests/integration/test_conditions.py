"""Conditions, duplicates and keys over HTTP: which answer wins, and what each of them says."""

import itertools
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.engines import engine as engine
from tests.integration.raw import Connection, code_of
from tests.serving import ServerProcess
from tests.unit.http.rawhttp import Reply

ROOT = "/v1/stream/"
JSON = "application/json"
TEXT = "text/plain"
START = "0000000000000000_0000000000000000"

_names = itertools.count()


@pytest.fixture
def wire(server_process: ServerProcess) -> Iterator[Connection]:
    with Connection(server_process.port) as connection:
        yield connection


def fresh() -> str:
    """A path that no other test uses."""
    return f"conditions/{next(_names)}"


def make(wire: Connection, path: str, content_type: str = TEXT) -> None:
    assert wire.ask("PUT", ROOT + path, f"Content-Type: {content_type}").status == 201


def append(
    wire: Connection,
    path: str,
    body: bytes = b"x",
    *,
    content_type: str = TEXT,
    producer: tuple[str, int, int] | None = None,
    **headers: str,
) -> Reply:
    """A POST; the keyword `if_match` becomes the header If-Match."""
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body:
        lines.append(f"Content-Type: {content_type}")
    if producer is not None:
        name, epoch, seq = producer
        lines += [f"Producer-Id: {name}", f"Producer-Epoch: {epoch}", f"Producer-Seq: {seq}"]
    return wire.ask("POST", ROOT + path, *lines, body=body)


def tail_of(wire: Connection, path: str) -> str:
    return wire.ask("HEAD", ROOT + path).headers["stream-next-offset"]


def content(wire: Connection, path: str) -> bytes:
    return wire.ask("GET", f"{ROOT}{path}?offset=-1").body


# What wins over what


class Violation(NamedTuple):
    """Something wrong with a request, and the answer that it alone gets."""

    name: str
    headers: dict[str, str]
    status: int
    code: str


MAX = 2**53 - 1
# In the order of the table. "syntax" and "exists" stand for what comes before any state.
VIOLATIONS = [
    Violation("syntax", {"Stream-Seq": ""}, 400, "header_invalid"),
    Violation("exists", {"path": "none"}, 404, "stream_not_found"),
    Violation("key", {"Idempotency-Key": "used"}, 409, "idempotency_key_reused"),
    Violation("stale", {"Producer-Epoch": "4"}, 403, "producer_epoch_stale"),
    Violation("duplicate", {"Producer-Seq": "1"}, 204, ""),
    Violation("closed", {"path": "closed"}, 409, "stream_closed"),
    Violation("type", {"Content-Type": "text/html"}, 409, "content_type_mismatch"),
    Violation("gap", {"Producer-Seq": "9"}, 409, "producer_sequence_gap"),
    Violation("producer", {"Producer-If": "5.7"}, 412, "producer_moved"),
    Violation("tail", {"If-Match": f'"{START}"'}, 412, "tail_moved"),
    Violation("empty", {"If-None-Match": "*"}, 412, "tail_moved"),
    Violation("seq", {"Stream-Seq": "a"}, 409, "stream_seq_regression"),
]


def can_meet(first: Violation, second: Violation) -> bool:
    """Whether one request can violate both; If-None-Match on a missing stream violates nothing."""
    apart = ({"tail", "empty"}, {"exists", "empty"})
    return not set(first.headers) & set(second.headers) and {first.name, second.name} not in apart


PAIRS = [(one, other) for one, other in combinations(VIOLATIONS, 2) if can_meet(one, other)]


@pytest.fixture(scope="module")
def places(server_process: ServerProcess) -> dict[str, str]:
    """An open and a closed stream in the same state: a producer at 5.1, a key, a Stream-Seq."""
    made = {"none": "conditions/never-made"}
    with Connection(server_process.port) as wire:
        for kind in ("open", "closed"):
            path = made[kind] = f"conditions/table-{kind}"
            make(wire, path)
            append(wire, path, b"0", producer=("p", 5, 0), Stream_Seq="m")
            append(wire, path, b"1", producer=("p", 5, 1))
            append(wire, path, b"2", Idempotency_Key="used")
            if kind == "closed":
                append(wire, path, b"", Stream_Closed="true")
    return made


def spoilt(wire: Connection, places: dict[str, str], *violations: Violation) -> Reply:
    headers = {
        "Content-Type": TEXT,
        "Producer-Id": "p",
        "Producer-Epoch": "5",
        "Producer-Seq": "2",
        "path": "open",
    }
    for violation in violations:
        headers |= violation.headers
    path = places[headers.pop("path")]
    lines = [f"{name}: {value}" for name, value in headers.items()]
    return wire.ask("POST", ROOT + path, *lines, body=b"something else")


@pytest.mark.parametrize("violation", VIOLATIONS, ids=lambda violation: violation.name)
def test_each_violation_has_its_own_answer(
    wire: Connection, places: dict[str, str], violation: Violation
) -> None:
    reply = spoilt(wire, places, violation)

    assert reply.status == violation.status
    if violation.code:
        assert code_of(reply) == violation.code


@pytest.mark.parametrize(
    ("earlier", "later"), PAIRS, ids=[f"{one.name}+{other.name}" for one, other in PAIRS]
)
def test_of_two_violations_the_earlier_in_the_table_is_answered(
    wire: Connection, places: dict[str, str], earlier: Violation, later: Violation
) -> None:
    before = [content(wire, places[kind]) for kind in ("open", "closed")]

    reply = spoilt(wire, places, earlier, later)

    assert reply.status == earlier.status
    if earlier.code:
        assert code_of(reply) == earlier.code
    assert [content(wire, places[kind]) for kind in ("open", "closed")] == before


# If-Match, If-None-Match, Stream-Auto-Create


def test_a_failed_precondition_tells_the_tail_and_the_version(wire: Connection) -> None:
    path = fresh()
    make(wire, path, JSON)
    tail = append(wire, path, b"[1,2,3]", content_type=JSON).headers["stream-next-offset"]

    refused = append(wire, path, b"4", content_type=JSON, If_Match=f'"{START}"')

    assert (refused.status, code_of(refused)) == (412, "tail_moved")
    assert refused.headers["stream-next-offset"] == tail
    assert refused.headers["stream-version"] == "2"
    accepted = append(wire, path, b"4", content_type=JSON, If_Match=f'"{tail}"')
    assert accepted.status == 204
    assert accepted.headers["stream-version"] == "3"


def test_the_start_may_be_named_as_minus_one(wire: Connection) -> None:
    path = fresh()
    make(wire, path)

    assert append(wire, path, If_Match='"-1"').status == 204
    assert append(wire, path, If_Match='"-1"').status == 412
    assert append(wire, path, If_Match="*").status == 204


def test_an_empty_stream_has_version_minus_one(wire: Connection) -> None:
    path = fresh()
    make(wire, path)
    elsewhere = "0000000000000001_0000000000000001"

    refused = append(wire, path, If_Match=f'"{elsewhere}"')

    assert refused.headers["stream-version"] == "-1"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"If-Match": START}, "if_match_invalid"),
        ({"If-Match": f'W/"{START}"'}, "if_match_invalid"),
        ({"If-Match": f'"{START}", "{START}"'}, "if_match_invalid"),
        ({"If-Match": '"now"'}, "if_match_invalid"),
        ({"If-Match": '""'}, "if_match_invalid"),
        ({"If-Match": '"1_2"'}, "if_match_invalid"),
        ({"If-None-Match": '"etag"'}, "if_none_match_invalid"),
        ({"If-None-Match": "*, *"}, "if_none_match_invalid"),
        ({"If-Match": "*", "If-None-Match": "*"}, "precondition_conflict"),
        ({"Producer-If": "0.0"}, "producer_headers_incomplete"),
        ({"Idempotency-Key": ""}, "idempotency_key_invalid"),
        ({"Idempotency-Key": "k" * 257}, "header_too_long"),
    ],
)
def test_a_malformed_condition_is_refused_by_name(
    wire: Connection, headers: dict[str, str], code: str
) -> None:
    lines = [f"{name}: {value}" for name, value in headers.items()]

    reply = wire.ask("POST", ROOT + fresh(), "Content-Type: text/plain", *lines, body=b"x")

    assert (reply.status, code_of(reply)) == (400, code)


@pytest.mark.parametrize("value", ["5", "5.", ".0", "5.0.0", "-1.0", "5.00", "5,0", f"{MAX + 1}.0"])
def test_a_malformed_producer_if_is_refused(wire: Connection, value: str) -> None:
    reply = append(wire, fresh(), producer=("p", 6, 0), Producer_If=value)

    assert reply.status == 400
    assert code_of(reply) in ("producer_if_invalid", "header_invalid")


def test_a_close_again_tells_where_the_stream_ended(wire: Connection) -> None:
    path = fresh()
    make(wire, path)
    append(wire, path)

    closed, again = (append(wire, path, b"", Stream_Closed="true") for _ in range(2))

    for name in ("stream-next-offset", "stream-version", "stream-closed"):
        assert again.headers[name] == closed.headers[name]
    assert again.status == closed.status == 204


def test_an_append_makes_its_stream_when_told_to(wire: Connection) -> None:
    path = fresh()
    kind = "text/plain; charset=utf-8"
    assert append(wire, path, Stream_Auto_Create="false").status == 404

    made = append(wire, path, b"first", content_type=kind, Stream_Auto_Create="true")

    assert made.status == 204
    assert made.headers["stream-version"] == "0"
    assert wire.ask("HEAD", ROOT + path).headers["content-type"] == kind
    assert append(wire, path, b"second", Stream_Auto_Create="true").status == 204
    assert content(wire, path) == b"firstsecond"


def test_a_close_without_a_body_may_make_a_stream_of_a_type(wire: Connection) -> None:
    path = fresh()
    headers = ("Stream-Closed: true", "Stream-Auto-Create: true")

    without = wire.ask("POST", ROOT + path, *headers)
    with_type = wire.ask("POST", ROOT + path, *headers, "Content-Type: text/plain")

    assert (without.status, code_of(without)) == (400, "content_type_missing")
    assert with_type.status == 204
    assert with_type.headers["stream-closed"] == "true"
    assert tail_of(wire, path) == START


def test_one_request_may_carry_every_condition_and_its_retry_is_a_duplicate(
    wire: Connection,
) -> None:
    path = fresh()
    make(wire, path)
    append(wire, path, b"claim", producer=("p", 0, 0), Stream_Seq="1")
    tail = tail_of(wire, path)

    def everything() -> Reply:
        return append(
            wire,
            path,
            b"all",
            producer=("p", 1, 0),
            If_Match=f'"{tail}"',
            Producer_If="0.0",
            Producer_Strict="true",
            Stream_Seq="2",
            Stream_Closed="true",
            Stream_Auto_Create="true",
            Idempotency_Key="k",
        )

    first, again = everything(), everything()

    assert first.status == 200
    assert first.headers["stream-closed"] == "true"
    assert (again.status, again.headers["idempotency-replayed"]) == (200, "true")
    assert again.headers["stream-offset"] == tail
    for name in ("stream-next-offset", "stream-version", "stream-position", "stream-closed"):
        assert again.headers[name] == first.headers[name]
    assert content(wire, path) == b"claimall"


# What a duplicate says


def test_a_duplicate_says_where_the_original_is_and_whether_it_is_the_same(
    wire: Connection,
) -> None:
    path = fresh()
    make(wire, path)
    first = append(wire, path, b"mine", producer=("task", 0, 0))
    append(wire, path, b"beat", producer=("task", 0, 1))

    same = append(wire, path, b"mine", producer=("task", 0, 0))
    other = append(wire, path, b"hers", producer=("task", 0, 0))
    strict = append(wire, path, b"hers", producer=("task", 0, 0), Producer_Strict="true")

    assert first.status == 200
    assert (same.status, other.status) == (204, 204)
    assert (same.headers["producer-match"], other.headers["producer-match"]) == ("true", "false")
    assert same.headers["stream-offset"] == other.headers["stream-offset"] == START
    assert (same.headers["producer-epoch"], same.headers["producer-seq"]) == ("0", "1")
    assert (strict.status, code_of(strict)) == (409, "producer_content_mismatch")
    assert strict.headers["stream-offset"] == START


def test_duplicates_say_the_same_after_a_kill(tmp_path: Path) -> None:
    """Seq 0 and the last sixteen are compared, those between are only known to be duplicates."""
    asked = [(n, body) for n in range(30) for body in (b"[%d,%d]" % (n, n), b"-1")]

    def answers(wire: Connection) -> list[tuple[int, str | None, str | None]]:
        told = []
        for n, body in asked:
            reply = append(wire, "s", body, content_type=JSON, producer=("p", 0, n))
            headers = reply.headers
            told.append((reply.status, headers.get("stream-offset"), headers.get("producer-match")))
        return told

    with ServerProcess(tmp_path / "data") as server:
        with Connection(server.port) as wire:
            make(wire, "s", JSON)
            for n in range(30):
                append(wire, "s", b"[%d,%d]" % (n, n), content_type=JSON, producer=("p", 0, n))
            append(wire, "s", b"", Stream_Closed="true")
            before = answers(wire)
        server.kill()
        server.restart()
        with Connection(server.port) as wire:
            assert answers(wire) == before
    known = [before[2 * n][2] for n in range(30)]
    assert known == ["true"] + [None] * 13 + ["true"] * 16
    assert [before[2 * n + 1][2] for n in (0, 1, 13, 14, 29)] == [
        "false",
        None,
        None,
        "false",
        "false",
    ]


def test_a_producer_that_moved_tells_where_it_is(wire: Connection) -> None:
    path = fresh()
    make(wire, path)
    unknown = append(wire, path, producer=("p", 1, 0), Producer_If="0.0")
    append(wire, path, producer=("p", 3, 0))
    append(wire, path, producer=("p", 3, 1))

    moved = append(wire, path, producer=("p", 4, 0), Producer_If="3.0")

    assert (unknown.status, code_of(unknown)) == (412, "producer_moved")
    assert "producer-epoch" not in unknown.headers
    assert (moved.status, code_of(moved)) == (412, "producer_moved")
    assert (moved.headers["producer-epoch"], moved.headers["producer-seq"]) == ("3", "1")
    assert append(wire, path, producer=("p", 4, 0), Producer_If="3.1").status == 200


# Keys


def test_the_status_table_of_keys(wire: Connection) -> None:
    path = fresh()
    make(wire, path)

    def keyed(body: bytes, key: str, producer: tuple[str, int, int] | None = None) -> Reply:
        return append(wire, path, body, producer=producer, Idempotency_Key=key)

    first = keyed(b"a", "k1")
    again = keyed(b"a", "k1")
    other = keyed(b"b", "k1")
    with_producer = keyed(b"c", "k2", ("p", 0, 0))
    with_producer_again = keyed(b"c", "k2", ("p", 0, 0))
    without_it = keyed(b"c", "k2")
    next_one = keyed(b"c", "k2", ("p", 0, 1))
    other_again = keyed(b"d", "k2", ("p", 0, 0))
    key_lost = keyed(b"c", "k3", ("p", 0, 0))
    contradiction = keyed(b"d", "k3", ("p", 0, 0))

    assert (first.status, "idempotency-replayed" in first.headers) == (204, False)
    assert (again.status, again.headers["idempotency-replayed"]) == (200, "true")
    assert again.headers["stream-offset"] == START
    assert (other.status, code_of(other)) == (409, "idempotency_key_reused")
    assert with_producer.status == 200
    assert (with_producer_again.status, without_it.status) == (200, 200)
    assert with_producer_again.headers["idempotency-replayed"] == "true"
    assert (next_one.status, code_of(next_one)) == (409, "idempotency_key_conflict")
    assert (other_again.status, code_of(other_again)) == (409, "idempotency_key_reused")
    assert (key_lost.status, key_lost.headers["producer-match"]) == (204, "true")
    assert (contradiction.status, code_of(contradiction)) == (409, "idempotency_key_conflict")
    assert content(wire, path) == b"ac"


def test_a_new_incarnation_knows_no_keys(wire: Connection) -> None:
    path = fresh()
    for body in (b"old", b"new"):
        made = append(wire, path, body, Idempotency_Key="k", Stream_Auto_Create="true")
        assert (made.status, "idempotency-replayed" in made.headers) == (204, False)
        assert content(wire, path) == body
        assert wire.ask("DELETE", ROOT + path).status == 204


def test_a_replay_gives_the_first_answer_whatever_happened_since(wire: Connection) -> None:
    path = fresh()
    make(wire, path, JSON)
    first = append(wire, path, b"[1,2]", content_type=JSON, Idempotency_Key="k")
    append(wire, path, b"3", content_type=JSON)
    append(wire, path, b"", Stream_Closed="true")

    again = append(wire, path, b"[1, 2]", content_type=JSON, Idempotency_Key="k")

    assert again.status == 200
    for name in ("stream-next-offset", "stream-version", "stream-position"):
        assert again.headers[name] == first.headers[name]
    assert "stream-closed" not in again.headers
