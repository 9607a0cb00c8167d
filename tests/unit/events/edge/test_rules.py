"""The rules of idempotency at the edge, one call each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.events.edge.rules import (
    Answer,
    Claimed,
    Finished,
    KeyInvalid,
    NotKept,
    OtherRequest,
    Released,
    Replay,
    Running,
    Seen,
    Take,
    chosen_headers,
    decide_claim,
    decide_key,
    fingerprint_of,
    is_released_by,
    record_id,
)

ANSWER = Answer(201, (("location", "/orders/7"),), b"made")
RUNS = Claimed("tea", "owner", 1_000)
DONE = Finished("tea", 201, 5_000, ANSWER)


def test_a_key_without_a_record_is_free() -> None:
    assert decide_claim(None, "tea", now_ms=0) == Take(None)


def test_a_released_key_is_free() -> None:
    assert decide_claim(Seen(Released(), "v1", 0), "tea", now_ms=0) == Take("v1")


def test_a_duplicate_of_a_running_request_is_told_what_is_left_of_its_lease() -> None:
    assert decide_claim(Seen(RUNS, "v1", 400), "tea", now_ms=0) == Running(600)


def test_another_body_is_refused_while_the_first_request_runs() -> None:
    assert decide_claim(Seen(RUNS, "v1", 400), "coffee", now_ms=0) == OtherRequest()


@pytest.mark.parametrize("fingerprint", ["tea", "coffee"])
def test_a_claim_that_was_not_renewed_for_its_lease_frees_the_key(fingerprint: str) -> None:
    assert decide_claim(Seen(RUNS, "v1", 1_000), fingerprint, now_ms=0) == Take("v1")


def test_a_finished_request_is_replayed_until_it_expires() -> None:
    assert decide_claim(Seen(DONE, "v2", 0), "tea", now_ms=4_999) == Replay(ANSWER)
    assert decide_claim(Seen(DONE, "v2", 0), "tea", now_ms=5_000) == Take("v2")


def test_another_body_is_refused_until_the_answer_expires() -> None:
    assert decide_claim(Seen(DONE, "v2", 0), "coffee", now_ms=4_999) == OtherRequest()
    assert decide_claim(Seen(DONE, "v2", 0), "coffee", now_ms=5_000) == Take("v2")


def test_an_answer_that_was_not_kept_is_told_by_its_status() -> None:
    large = Finished("tea", 200, 5_000, None)

    assert decide_claim(Seen(large, "v2", 0), "tea", now_ms=0) == NotKept(200)


@pytest.mark.parametrize(
    ("status", "releases"), [(200, False), (404, False), (429, True), (500, True), (503, True)]
)
def test_failures_of_the_server_release_the_key(status: int, releases: bool) -> None:
    assert is_released_by(status, frozenset({429})) is releases


@pytest.mark.parametrize(
    ("values", "required", "key"),
    [
        ([], False, None),
        ([], True, KeyInvalid("missing")),
        ([b"a"], True, "a"),
        ([b' "a-b" '], False, '"a-b"'),
        ([b"a", b"a"], False, KeyInvalid("repeated")),
        ([b""], False, KeyInvalid("malformed")),
        ([b"a b"], False, KeyInvalid("malformed")),
        ([b"\xe9"], False, KeyInvalid("malformed")),
        ([b"x" * 255], False, "x" * 255),
        ([b"x" * 256], False, KeyInvalid("malformed")),
    ],
)
def test_a_key_is_one_header_of_visible_characters(
    values: list[bytes], required: bool, key: str | KeyInvalid | None
) -> None:
    assert decide_key(values, required=required) == key


parts = st.tuples(
    st.text(max_size=3), st.sampled_from(["POST", "PATCH"]), st.binary(max_size=3), st.text("ab")
)


@given(parts, parts)
def test_records_are_one_only_if_principal_method_path_and_key_are(
    one: tuple[str, str, bytes, str], other: tuple[str, str, bytes, str]
) -> None:
    """No two scopes share a record, however their parts are cut."""
    assert (record_id(*one) == record_id(*other)) == (one == other)


@given(st.binary(max_size=3), st.binary(max_size=3), st.binary(max_size=3), st.binary(max_size=3))
def test_fingerprints_are_one_only_if_query_and_body_are(
    query: bytes, body: bytes, other_query: bytes, other_body: bytes
) -> None:
    """A byte that moves from the query into the body makes another request."""
    same = (query, body) == (other_query, other_body)

    assert (fingerprint_of(query, body) == fingerprint_of(other_query, other_body)) == same


def test_only_chosen_headers_and_those_of_the_body_are_kept() -> None:
    headers = [
        (b"Content-Type", b"text/plain"),
        (b"Location", b"/orders/7"),
        (b"Set-Cookie", b"session=secret"),
    ]

    kept = chosen_headers(headers, frozenset({"location"}))

    assert kept == (("content-type", "text/plain"), ("location", "/orders/7"))
