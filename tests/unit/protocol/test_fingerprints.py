"""The canonical form of a send and its fingerprint."""

import json
from hashlib import sha256
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.fingerprints import (
    INTEGER_MAX,
    META_BYTES_MAX,
    Unsendable,
    canonical_meta,
    fingerprint,
    prefix,
    refuse_fields,
    refuse_id,
)

GOLDEN = "732ac0065588670239d605eb525efd30389dcb985216d01cad4169dbcaf3dd79"

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-INTEGER_MAX, INTEGER_MAX)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
)
# Both sides of the surrogates, where the orders of UTF-16 and UTF-8 part.
KEYS = st.text(max_size=4) | st.text("a\x7fé\ud7ff\ue000\uffff\U00010000\U0010ffff", max_size=3)
METAS = st.dictionaries(
    KEYS,
    st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
        max_leaves=10,
    ),
    max_size=5,
)


def of(
    *,
    kind: str = "topic",
    ref: str = "alerts",
    reply_to: str = "",
    priority: str = "next",
    meta: bytes = b"{}",
    body: bytes = b"hello",
) -> bytes:
    """The fingerprint of a send of which a test says only what matters to it."""
    canonical = canonical_meta(meta)
    assert isinstance(canonical, bytes)
    return fingerprint(
        kind=kind,
        ref=ref,
        reply_to=reply_to,
        priority=priority,
        meta=canonical,
        body_sha256=sha256(body).digest(),
    )


def test_the_golden_value_of_the_contract() -> None:
    assert of().hex() == GOLDEN
    assert prefix(of()) == "732ac00655886702"


def test_the_fingerprint_hashes_the_seven_fields_with_a_zero_byte_between_them() -> None:
    body = sha256(b"hello").hexdigest().encode()
    written = b"1\0dm\0ann\0m1.2\0low\0" + b'{"a":1}' + b"\0" + body

    found = of(kind="dm", ref="ann", reply_to="m1.2", priority="low", meta=b'{ "a" : 1.0 }')

    assert found == sha256(written).digest()


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "queue"},
        {"ref": "alert"},
        {"reply_to": "m1.1"},
        {"priority": "now"},
        {"meta": b'{"a":1}'},
        {"body": b"hello "},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_each_field_changed_alone_changes_the_fingerprint(changed: dict[str, Any]) -> None:
    assert of(**changed) != of()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b'{"a":1,"b":2}', b'{ "b": 2, "a": 1 }'),
        (b"{}", b""),
        (b"{}", b"{ }"),
        (b'{"a":1}', b'{"a":1.0}'),
        (b'{"a":100}', b'{"a":1e2}'),
        (b'{"a":0}', b'{"a":-0.0}'),
        (b'{"a":"\xc3\xa9"}', b'{"\\u0061":"\\u00e9"}'),
    ],
)
def test_the_spelling_of_meta_makes_no_difference(one: bytes, other: bytes) -> None:
    assert of(meta=one) == of(meta=other)


@given(METAS, st.booleans(), st.sampled_from([None, 1]))
def test_the_fast_path_writes_what_the_library_writes(
    meta: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    """However meta is spelled, its canonical form is the one of the library for RFC 8785."""
    sent = json.dumps(meta, ensure_ascii=ascii_only, indent=indent).encode()

    canonical = canonical_meta(sent)

    assert canonical == (rfc8785.dumps(meta) if meta else b"")


@given(METAS)
def test_the_canonical_form_is_its_own_canonical_form(meta: dict[str, Any]) -> None:
    """Canonical bytes that are sent as meta come out unchanged, so a stored meta can be sent again.

    A float beyond the integers is written without a fraction, as an integer that may not be sent.
    """
    once = canonical_meta(json.dumps(meta).encode())
    assert isinstance(once, bytes)

    again = canonical_meta(once)

    assert again == once or (isinstance(again, Unsendable) and again.code == "meta_number_invalid")


@pytest.mark.parametrize(
    ("meta", "code"),
    [
        (b"nil", "meta_invalid"),
        (b'{"a":NaN}', "meta_invalid"),
        (b'{"a":Infinity}', "meta_invalid"),
        (b'{"a":"\\udc00"}', "meta_invalid"),
        (b'{"a":"\xc0"}', "meta_invalid"),
        (b"null", "meta_not_object"),
        (b"[1]", "meta_not_object"),
        (b'{"a":9007199254740992}', "meta_number_invalid"),
        (b'{"a":[{"b":-9007199254740992}]}', "meta_number_invalid"),
        (b'{"a":1e400}', "meta_number_invalid"),
        (b'{"a":1,"a":1}', "meta_duplicate_key"),
        (b'{"a":1,"\\u0061":1}', "meta_duplicate_key"),
        (b'{"a":' + b"[" * 32 + b"]" * 32 + b"}", "meta_too_deep"),
        (b'{"a":"' + b"x" * META_BYTES_MAX + b'"}', "meta_too_large"),
    ],
)
def test_meta_that_two_programs_could_read_differently_is_refused(meta: bytes, code: str) -> None:
    refused = canonical_meta(meta)

    assert isinstance(refused, Unsendable)
    assert refused.code == code


def test_the_largest_integers_are_taken() -> None:
    meta = b'{"a":[9007199254740991,-9007199254740991]}'

    assert canonical_meta(meta) == meta


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        (("mail", "ann", "", "next"), "kind_invalid"),
        (("dm", "", "", "next"), "ref_invalid"),
        (("dm", "a\0b", "", "next"), "ref_invalid"),
        (("dm", "ann\n", "", "next"), "ref_invalid"),
        (("dm", "a/b", "", "next"), "ref_invalid"),
        (("dm", "x" * 65, "", "next"), "ref_invalid"),
        (("dm", "ann", "a\0b", "next"), "reply_to_invalid"),
        (("dm", "ann", "\x7f", "next"), "reply_to_invalid"),
        (("dm", "ann", "x" * 257, "next"), "reply_to_invalid"),
        (("dm", "ann", "", "soon"), "priority_invalid"),
    ],
)
def test_each_bad_field_has_a_code_of_its_own(fields: tuple[str, str, str, str], code: str) -> None:
    refused = refuse_fields(*fields)

    assert refused is not None
    assert refused.code == code


def test_good_fields_are_taken() -> None:
    assert refuse_fields("queue", "mail-out.v2_eu", "m17.42", "low") is None


@pytest.mark.parametrize("bad", ["", "a\0", "\x1f", "\x7f", "\ud800", "x" * 257, "é" * 129])
def test_a_bad_id_is_refused(bad: str) -> None:
    refused = refuse_id(bad)

    assert refused is not None
    assert refused.code == "message_id_invalid"


@pytest.mark.parametrize("good", ["a", "alert-17", "x" * 256, "é" * 128, " "])
def test_a_good_id_is_taken(good: str) -> None:
    assert refuse_id(good) is None
