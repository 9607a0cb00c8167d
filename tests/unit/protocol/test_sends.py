"""Deciding sends: the order of the checks, the answers, and a model of a mesh."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fencepost.protocol.envelopes import Send, parse_send
from fencepost.protocol.fingerprints import Kind, Unsendable
from fencepost.protocol.meshes import DAY_MS, Mesh, MeshSettings, destination_path, inbox_path
from fencepost.protocol.offsets import Offset
from fencepost.protocol.rates import Bucket, Rate, TooFast
from fencepost.protocol.sends import (
    DEFAULT_LIMITS,
    DedupeRow,
    Destination,
    DestinationNotFound,
    IdReused,
    MeshNotFound,
    Origin,
    Repeated,
    SendFacts,
    SendKey,
    SendOutcome,
    SendTooLarge,
    Sent,
    answer_item,
    answer_send,
    batch_body,
    decide_send,
    split_batch,
)

MESH = Mesh(1, "shop", MeshSettings(dedupe_retention_days=7), 0)
HERE = Destination(7, Offset(3, 90), ("__mesh/shop/inbox/ann", "__mesh/shop/inbox/ben"))
PREFIX = "732ac00655886702"


def a_send(**fields: Any) -> Send:
    sender = fields.pop("sender", "ann")
    body = {"kind": "topic", "ref": "alerts", "body": "hello", "client_message_id": "alert-17"}
    send = parse_send(
        json.dumps({**body, **fields}).encode(), header_id=None, minted_id="-", principal=sender
    )
    assert isinstance(send, Send), send
    return send


def stored(send: Send | None = None, **facts: Any) -> DedupeRow:
    outcome = decide_send(SendFacts(MESH, destination=HERE, **facts), send or a_send(), now_ms=1000)
    assert isinstance(outcome, Sent)
    assert outcome.row is not None
    return outcome.row


def test_a_first_send_is_stored_with_its_row_and_a_delivery_for_each_recipient() -> None:
    outcome = decide_send(SendFacts(MESH, destination=HERE), a_send(), now_ms=1000)

    assert isinstance(outcome, Sent)
    assert outcome.row == DedupeRow(
        mesh="shop",
        sender="ann",
        client_message_id="alert-17",
        broker_message_id="m7.3",
        fingerprint=a_send().fingerprint,
        kind="topic",
        ref="alerts",
        stream_id=7,
        offset=Offset(3, 90),
        first_seen_ms=1000,
        expires_ms=1000 + 7 * DAY_MS,
    )
    assert outcome.recipients == HERE.recipients
    assert outcome.delivery is not None
    assert json.loads(outcome.delivery)["body"] == "hello"
    assert answer_send(outcome) == (
        201,
        None,
        {
            "broker_message_id": "m7.3",
            "client_message_id": "alert-17",
            "history_id": "0000000000000003_0000000000000090",
            "duplicate": False,
        },
    )


def test_a_permanent_row_has_no_end() -> None:
    mesh = msgspec.structs.replace(MESH, settings=MeshSettings(dedupe_mode="permanent"))

    outcome = decide_send(SendFacts(mesh, destination=HERE), a_send(), now_ms=1000)

    assert isinstance(outcome, Sent)
    assert outcome.row is not None
    assert outcome.row.expires_ms is None
    assert not outcome.row.is_due(2**60)


def test_a_row_is_due_at_its_end_and_not_one_tick_before() -> None:
    row = stored()
    assert row.expires_ms is not None

    assert not row.is_due(row.expires_ms - 1)
    assert row.is_due(row.expires_ms)


def test_a_direct_message_is_its_own_delivery() -> None:
    facts = SendFacts(MESH, destination=Destination(9, Offset(0, 0)))

    outcome = decide_send(facts, a_send(kind="dm", ref="ann", body="x" * 5000), now_ms=1000)

    assert isinstance(outcome, Sent)
    assert outcome.delivery is None
    assert outcome.recipients == ()
    assert json.loads(outcome.message)["body"] == "x" * 5000


def test_the_same_send_again_is_answered_with_the_original_ids() -> None:
    row = stored()
    facts = SendFacts(MESH, row, Origin(7, Offset(3, 90)), HERE)

    answer = answer_send(decide_send(facts, a_send(), now_ms=5000))

    assert answer == (
        200,
        None,
        {
            "broker_message_id": "m7.3",
            "client_message_id": "alert-17",
            "history_id": "0000000000000003_0000000000000090",
            "duplicate": True,
            "history_available": True,
            "first_seen_at": "1970-01-01T00:00:01.000Z",
        },
    )


def test_another_message_under_a_used_id_is_refused() -> None:
    facts = SendFacts(MESH, stored(), None, HERE)

    answer = answer_send(decide_send(facts, a_send(body="all is well"), now_ms=5000))

    assert (answer.status, answer.code) == (409, "idempotency_key_reused")
    assert answer.fields["client_message_id"] == "alert-17"
    assert answer.fields["conflict"] == "request_fingerprint_mismatch"
    assert answer.fields["broker_fingerprint_prefix"] == PREFIX


@pytest.mark.parametrize(
    ("origin", "available"),
    [
        (Origin(7, Offset(0, 0)), True),
        (Origin(7, Offset(3, 90)), True),
        (Origin(7, Offset(4, 95)), False),
        (Origin(8, Offset(0, 0)), False),
        (None, False),
    ],
)
def test_history_is_available_while_the_stream_lives_and_begins_before_the_message(
    origin: Origin | None, available: bool
) -> None:
    outcome = decide_send(SendFacts(MESH, stored(), origin, HERE), a_send(), now_ms=5000)

    assert isinstance(outcome, Repeated)
    assert outcome.history_available == available


FULL = {"rate": Rate(1, 1), "bucket": Bucket(0.0, 5000)}


def test_the_retry_of_a_stored_message_is_answered_whatever_has_changed_since() -> None:
    """The limiter is empty, the destination is gone, the limits are lower: still 200."""
    facts = SendFacts(MESH, stored(), None, None, Rate(1, 1), Bucket(0.0, 5000))

    outcome = decide_send(
        facts, a_send(), now_ms=5000, limits=replace(DEFAULT_LIMITS, inline_bytes_max=1)
    )

    assert isinstance(outcome, Repeated)


def test_size_is_looked_at_before_rate_and_rate_before_the_destination() -> None:
    facts = SendFacts(MESH, None, None, None, Rate(1, 1), Bucket(0.0, 5000))
    small = replace(DEFAULT_LIMITS, inline_bytes_max=4)

    too_large = decide_send(facts, a_send(), now_ms=5000, limits=small)
    too_fast = decide_send(facts, a_send(), now_ms=5000)
    nowhere = decide_send(facts, a_send(), now_ms=6000)

    assert too_large == SendTooLarge("inline_bytes", 4, 5)
    assert too_fast == TooFast("sends_per_s", 1000)
    assert nowhere == DestinationNotFound("topic", "alerts")


def test_only_a_stored_send_spends_rate() -> None:
    facts = SendFacts(MESH, destination=HERE, rate=Rate(1, 2), bucket=Bucket(1.0, 1000))

    outcome = decide_send(facts, a_send(), now_ms=1000)

    assert isinstance(outcome, Sent)
    assert outcome.bucket == Bucket(0.0, 1000)


def test_a_topic_with_too_many_members_is_refused() -> None:
    crowd = Destination(7, Offset(0, 0), ["__mesh/shop/inbox/ann"] * 3)

    outcome = decide_send(
        SendFacts(MESH, destination=crowd),
        a_send(),
        now_ms=0,
        limits=replace(DEFAULT_LIMITS, recipients_max=2),
    )

    answer = answer_send(outcome)
    assert (answer.status, answer.code, answer.fields["limit"]) == (
        413,
        "limit_exceeded",
        "recipients_max",
    )


def test_without_a_mesh_nothing_is_decided() -> None:
    outcome = decide_send(SendFacts(None, stored(), None, HERE), a_send(), now_ms=0)

    assert outcome == MeshNotFound()
    assert answer_send(outcome).status == 404


def test_with_dedupe_switched_off_rows_are_neither_read_nor_written() -> None:
    facts = SendFacts(MESH, stored(), None, HERE, dedupes=False)

    outcome = decide_send(facts, a_send(body="other"), now_ms=5000)

    assert isinstance(outcome, Sent)
    assert outcome.row is None
    assert json.loads(outcome.message)["deduplicated"] is False


def test_a_batch_is_split_and_answered_send_by_send() -> None:
    parts = split_batch(b'{"sends": [{"kind":"dm"}, 7]}')
    assert parts == [b'{"kind":"dm"}', b"7"]

    refused = answer_send(Unsendable("kind_invalid", "kind is ..."))
    first = answer_send(decide_send(SendFacts(MESH, destination=HERE), a_send(), now_ms=0))

    assert json.loads(batch_body([first, refused])) == {
        "sends": [
            {"status": 201, "body": first.fields},
            {"status": 400, "body": {"code": "kind_invalid", "detail": "kind is ..."}},
        ]
    }


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"sends":[]}', b'{"sends":{}}', b'{"sends":[1],"sends":[2]}']
)
def test_what_is_no_batch_is_refused(data: bytes) -> None:
    assert isinstance(split_batch(data), Unsendable)


def test_a_batch_has_a_bound() -> None:
    data = json.dumps({"sends": list(range(1001))}).encode()

    assert isinstance(split_batch(data), Unsendable)


# A model: streams as lists, rows as a dict, and what each key stands for written down beside.

SENDERS = st.sampled_from(["ann", "ben"])
IDS = st.sampled_from(["a", "b", "c"])
BODIES = st.sampled_from(["one", "two"])
KINDS: st.SearchStrategy[Kind] = st.sampled_from(["topic", "dm", "queue"])


class StreamModel:
    def __init__(self, stream_id: int) -> None:
        self.id = stream_id
        self.messages: list[bytes] = []
        self.first = 0
        self.size = 0

    @property
    def tail(self) -> Offset:
        return Offset(len(self.messages), self.size)

    def append(self, data: bytes) -> None:
        self.messages.append(data)
        self.size += len(data)


class MeshModel(RuleBasedStateMachine):
    """A store in memory that carries out what `decide_send` says, in any order of events."""

    @initialize()
    def make(self) -> None:
        self.now_ms = 1000
        self.ids = 0
        self.streams: dict[str, StreamModel] = {}
        self.rows: dict[SendKey, DedupeRow] = {}
        self.meant: dict[SendKey, tuple[bytes, str]] = {}
        self.ever: list[str] = []
        for kind, ref in (("topic", "t"), ("dm", "ann"), ("dm", "ben"), ("queue", "t")):
            self.create(destination_path("shop", kind, ref))  # type: ignore[arg-type]

    def create(self, path: str) -> None:
        self.ids += 1
        self.streams[path] = StreamModel(self.ids)

    def facts(self, send: Send, *, rate: Rate | None = None) -> SendFacts:
        path = destination_path("shop", send.kind, send.ref)
        row = self.rows.get(SendKey("shop", send.sender, send.client_message_id))
        origin = destination = None
        if row is not None:
            there = self.streams.get(destination_path("shop", row.kind, row.ref))
            if there is not None:
                origin = Origin(there.id, Offset(there.first, 0))
        here = self.streams.get(path)
        if here is not None:
            inboxes = [inbox_path("shop", name) for name in ("ann", "ben")]
            recipients = inboxes if send.kind == "topic" else []
            destination = Destination(here.id, here.tail, recipients)
        bucket = Bucket(0.0, self.now_ms) if rate is not None else None
        return SendFacts(MESH, row, origin, destination, rate, bucket)

    def carry_out(self, send: Send, outcome: SendOutcome) -> None:
        if not isinstance(outcome, Sent):
            return
        assert outcome.row is not None
        assert outcome.row.key not in self.rows
        self.rows[outcome.row.key] = outcome.row
        here = self.streams[outcome.sealed.path]
        assert outcome.row.offset == here.tail
        here.append(outcome.message)
        for path in outcome.recipients:
            assert outcome.delivery is not None
            self.streams.setdefault(path, StreamModel(0)).append(outcome.delivery)
        self.ever.append(outcome.row.broker_message_id)
        self.meant[outcome.row.key] = (send.fingerprint, outcome.row.broker_message_id)

    @rule(sender=SENDERS, client_id=IDS, body=BODIES, kind=KINDS, limited=st.booleans())
    def send(self, sender: str, client_id: str, body: str, kind: Kind, limited: bool) -> None:
        ref = "ann" if kind == "dm" else "t"
        send = a_send(sender=sender, client_message_id=client_id, body=body, kind=kind, ref=ref)
        key = SendKey("shop", sender, client_id)
        known = self.meant.get(key)
        exists = destination_path("shop", kind, ref) in self.streams
        rate = Rate(1, 1) if limited else None

        outcome = decide_send(self.facts(send, rate=rate), send, now_ms=self.now_ms)

        if known is not None and known[0] != send.fingerprint:
            assert isinstance(outcome, IdReused)
        elif known is not None:
            assert isinstance(outcome, Repeated)
            assert outcome.row.broker_message_id == known[1]
            assert outcome.history_available == self.is_readable(known[1])
        elif limited:
            assert isinstance(outcome, TooFast)
        else:
            assert isinstance(outcome, Sent if exists else DestinationNotFound)
        self.carry_out(send, outcome)

    @rule(sends=st.lists(st.tuples(IDS, BODIES), min_size=2, max_size=4))
    def send_a_batch(self, sends: list[tuple[str, str]]) -> None:
        """Each send is decided on top of those before it."""
        for client_id, body in sends:
            send = a_send(client_message_id=client_id, body=body, ref="t")
            outcome = decide_send(self.facts(send), send, now_ms=self.now_ms)
            self.carry_out(send, outcome)
            assert answer_item(answer_send(outcome))["status"] in (200, 201, 404, 409)

    @rule(kind=KINDS)
    def truncate(self, kind: Kind) -> None:
        stream = self.streams.get(destination_path("shop", kind, "ann" if kind == "dm" else "t"))
        if stream is not None:
            stream.first = len(stream.messages)

    @rule(kind=KINDS)
    def delete_or_make(self, kind: Kind) -> None:
        path = destination_path("shop", kind, "ann" if kind == "dm" else "t")
        if self.streams.pop(path, None) is None:
            self.create(path)

    @rule(days=st.integers(1, 8))
    def wait(self, days: int) -> None:
        self.now_ms += days * DAY_MS

    @rule()
    def sweep(self) -> None:
        for key in [key for key, row in self.rows.items() if row.is_due(self.now_ms)]:
            del self.rows[key]
            del self.meant[key]

    def is_readable(self, message_id: str) -> bool:
        return any(
            b'"fingerprint"' in data and json.loads(data)["broker_message_id"] == message_id
            for stream in self.streams.values()
            for data in stream.messages[stream.first :]
        )

    @invariant()
    def every_row_has_one_message_and_no_message_id_is_used_twice(self) -> None:
        assert len(set(self.ever)) == len(self.ever)
        assert self.rows.keys() == self.meant.keys()


MeshModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMeshModel = MeshModel.TestCase
