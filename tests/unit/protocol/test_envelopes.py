"""The envelope of a send: what is understood, and what is written of it."""

import base64
import json
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.commits import Part
from fencepost.protocol.envelopes import Sealed, Send, parse_send, with_staged_body
from fencepost.protocol.fingerprints import Unsendable
from fencepost.protocol.offsets import Offset

PLAIN = {"kind": "topic", "ref": "alerts", "body": "hello", "client_message_id": "alert-17"}
GOLDEN = "732ac0065588670239d605eb525efd30389dcb985216d01cad4169dbcaf3dd79"


def parsed(
    data: bytes | dict[str, Any],
    *,
    header_id: str | None = None,
    principal: str | None = "ann",
) -> Send | Unsendable:
    body = json.dumps(data).encode() if isinstance(data, dict) else data
    return parse_send(body, header_id=header_id, minted_id="minted", principal=principal)


def good(data: bytes | dict[str, Any], **more: Any) -> Send:
    send = parsed(data, **more)
    assert isinstance(send, Send), send
    return send


def test_a_plain_send_has_the_golden_fingerprint() -> None:
    send = good(PLAIN)

    assert (send.client_message_id, send.sender, send.priority) == ("alert-17", "ann", "next")
    assert send.fingerprint.hex() == GOLDEN


def test_the_header_beats_the_body_and_an_id_is_minted_where_there_is_none() -> None:
    assert good(PLAIN, header_id="from-header").client_message_id == "from-header"
    assert good({**PLAIN, "client_message_id": "x"}).client_message_id == "x"
    assert good(b'{"kind":"dm","ref":"ann","body":""}').client_message_id == "minted"


def test_an_empty_id_is_not_replaced_by_a_minted_one() -> None:
    refused = parsed(PLAIN, header_id="")

    assert isinstance(refused, Unsendable)
    assert refused.code == "message_id_invalid"


def test_without_a_principal_the_body_names_the_sender() -> None:
    assert good({**PLAIN, "sender": "ben"}, principal=None).sender == "ben"


@pytest.mark.parametrize(
    ("principal", "fields"),
    [(None, {}), (None, {"sender": ""}), (None, {"sender": "a\0"}), ("ann", {"sender": "ben"})],
)
def test_a_sender_that_is_none_or_another_than_the_principal_is_refused(
    principal: str | None, fields: dict[str, str]
) -> None:
    refused = parsed({**PLAIN, **fields}, principal=principal)

    assert isinstance(refused, Unsendable)
    assert refused.code == "sender_invalid"


def test_the_form_of_a_body_does_not_change_the_fingerprint() -> None:
    text = good(b'{"kind":"topic","ref":"alerts","body":"[1, 2]"}')
    raw = good(b'{"kind":"topic","ref":"alerts","json":[1, 2]}')
    coded = base64.b64encode(b"[1, 2]").decode()
    binary = good({"kind": "topic", "ref": "alerts", "body_base64": coded})

    assert text.fingerprint == raw.fingerprint == binary.fingerprint
    assert text.body.size == raw.body.size == binary.body.size == 6


def test_json_is_compared_by_its_bytes_as_sent() -> None:
    spaced = good(b'{"kind":"topic","ref":"alerts","json":[1, 2]}')
    dense = good(b'{"kind":"topic","ref":"alerts","json":[1,2]}')

    assert spaced.fingerprint != dense.fingerprint


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "send_invalid"),
        (b"[]", "send_invalid"),
        (b'{"kind":"dm","ref":"ann","body":"","to":"x"}', "send_invalid"),
        (b'{"kind":"dm","kind":"dm","ref":"ann","body":""}', "send_invalid"),
        (b'{"kind":1,"ref":"ann","body":""}', "send_invalid"),
        (b'{"kind":"dm","ref":"ann","body":"\xff"}', "send_invalid"),
        (b'{"ref":"ann","body":""}', "kind_invalid"),
        (b'{"kind":"dm","body":""}', "ref_invalid"),
        (b'{"kind":"dm","ref":"a\\u0000b","body":""}', "ref_invalid"),
        (b'{"kind":"dm","ref":"ann","body":"","reply_to":"\\n"}', "reply_to_invalid"),
        (b'{"kind":"dm","ref":"ann","body":"","priority":"soon"}', "priority_invalid"),
        (b'{"kind":"dm","ref":"ann","body":"","meta":[]}', "meta_not_object"),
        (b'{"kind":"dm","ref":"ann","body":"","meta":null}', "meta_not_object"),
        (b'{"kind":"dm","ref":"ann","body":"","meta":{"a":1,"a":2}}', "meta_duplicate_key"),
        (b'{"kind":"dm","ref":"ann"}', "body_invalid"),
        (b'{"kind":"dm","ref":"ann","body":"","json":1}', "body_invalid"),
        (b'{"kind":"dm","ref":"ann","body":7}', "body_invalid"),
        (b'{"kind":"dm","ref":"ann","body_base64":"?"}', "body_invalid"),
        (b'{"kind":"dm","ref":"ann","body_base64":"\xc3\xa9"}', "body_invalid"),
        (b'{"kind":"dm","ref":"ann","parts":[]}', "body_invalid"),
        (b'{"kind":"dm","ref":"ann","parts":["a"]}', "body_invalid"),
        (b'{"kind":"dm","ref":"ann","body":"","client_message_id":""}', "message_id_invalid"),
    ],
)
def test_each_fault_has_its_code(data: bytes, code: str) -> None:
    refused = parsed(data)

    assert isinstance(refused, Unsendable)
    assert refused.code == code


def test_a_staged_body_gets_its_fingerprint_when_it_was_read() -> None:
    staged = good(b'{"kind":"topic","ref":"alerts","parts":[{"txn":"t","part":"p"}]}')
    assert staged.body.parts == (Part("t", "p"),)
    assert staged.fingerprint == b""

    read = with_staged_body(staged, size=5, body_sha256=sha256(b"hello").digest())

    assert read.fingerprint.hex() == GOLDEN
    assert read.body.size == 5


def sealed(send: Send) -> Sealed:
    return Sealed(send, "m7.3", "__mesh/shop/topic/alerts", Offset(3, 90), 1000, True)


@given(
    st.one_of(
        st.text().map(lambda text: {"body": text}),
        st.binary().map(lambda data: {"body_base64": base64.b64encode(data).decode()}),
        st.recursive(
            st.none() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=5
        ).map(lambda value: {"json": value}),
    ),
    st.dictionaries(st.text(max_size=4), st.integers(-5, 5), max_size=3),
)
def test_a_message_holds_what_was_sent_and_can_be_sent_again(
    body: dict[str, Any], meta: dict[str, int]
) -> None:
    """A message is JSON with the body as it was sent; sent again, it has the same fingerprint."""
    send = good({"kind": "topic", "ref": "alerts", "meta": meta, **body})

    message = json.loads(sealed(send).message())

    assert message["fingerprint"] == send.fingerprint.hex()
    assert {name: message[name] for name in body} == body
    assert message.get("meta", {}) == meta
    again = good(
        b'{"kind":"topic","ref":"alerts","meta":%b,"%b":%b}'
        % (send.meta or b"{}", send.body.form.encode(), send.body.sent)
    )
    assert again.fingerprint == send.fingerprint


def test_an_inbox_entry_has_a_small_body_and_says_where_a_large_one_lies() -> None:
    small, large = good({**PLAIN, "body": "x" * 4096}), good({**PLAIN, "body": "x" * 4097})

    assert json.loads(sealed(small).delivery(4096)) == {
        "broker_message_id": "m7.3",
        "client_message_id": "alert-17",
        "sender": "ann",
        "kind": "topic",
        "ref": "alerts",
        "priority": "next",
        "sent_ms": 1000,
        "body": "x" * 4096,
    }
    entry = json.loads(sealed(large).delivery(4096))
    assert "body" not in entry
    assert entry["body_at"] == {
        "stream": "__mesh/shop/topic/alerts",
        "offset": "0000000000000003_0000000000000090",
        "bytes": 4097,
    }
