"""Every request the client can make, as generators without I/O.

Each function builds a request, has it exchanged (`retry.py` says which failures are repeated) and
turns the answer into a typed result. What reads more than one answer is in `reading.py`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import urlencode

import msgspec

from fencepost.client.effects import Operation
from fencepost.client.errors import (
    ConflictError,
    ContentTypeMismatchError,
    InvalidArgumentError,
    ProtocolError,
    ResponseError,
    StreamNotFoundError,
    StreamSeqError,
    UnencodableError,
    require,
)
from fencepost.client.http import Request, Response, is_url, parse_url, target_of, wire_target
from fencepost.client.results import Appended, Committed, Head, Plan, PositionRange, Staged
from fencepost.client.retry import Kind, exchange
from fencepost.client.settings import JSON, ClientSettings

T = TypeVar("T")

KEY_BYTES = 10
NUMBER_MAX = 2**53 - 1
"""The greatest epoch and seq: what every JSON reader holds exactly."""

ENCODING_FAILURES = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)
"""Exceptions that encoding a user's value may raise."""
_ENCODER = msgspec.json.Encoder()


def media_type(content_type: str) -> str:
    """The type without its parameters."""
    return content_type.partition(";")[0].strip().lower()


BYTES = (bytes, bytearray, memoryview)
BYTES_REFUSED = (
    "bytes are no JSON value: append the value itself, or create the stream for bytes, with"
    ' content_type="application/octet-stream"'
)


def is_json(content_type: str) -> bool:
    return media_type(content_type) == JSON


def stream_target(path: str, query: Iterable[tuple[str, str]] = ()) -> str:
    """The target of a stream's requests; a stream by its full URL keeps that."""
    if not is_url(path):
        return target_of("/v1/stream/" + path, query)
    encoded = urlencode(list(query))
    return path + (("&" if "?" in path else "?") + encoded if encoded else "")


def check_path(path: str) -> str:
    """A path of a stream; raises `InvalidArgumentError` for one that no stream can have."""
    require(path.strip("/") != "", "the path of a stream is not empty")
    return path


def check_origin(settings: ClientSettings, path: str) -> str:
    """A path or URL of a stream; a URL of another server would get this server's token."""
    require(isinstance(path, str), f"the path of a stream is a text, not {path!r}")
    if is_url(path):
        there, here = parse_url(path.partition("?")[0], settings.address.ssl), settings.address
        same = (there.host, there.port, bool(there.ssl)) == (here.host, here.port, bool(here.ssl))
        require(same, f"{path} is not on the server of this client: connect to that one")
    return check_path(path)


def encode_messages(messages: Iterable[Any], content_type: str) -> bytes:
    """Several messages as one body."""
    given = listed(messages)
    if not is_json(content_type):
        return b"".join(map(encode_bytes, given))
    if holds_bytes(given):
        raise UnencodableError(BYTES_REFUSED)
    return encode_json(given)


def listed(messages: Iterable[Any]) -> list[Any]:
    """Several messages; raises for one message, whose letters or keys would be stored instead."""
    several = hasattr(messages, "__iter__") and not isinstance(messages, (str, *BYTES, Mapping))
    kind = type(messages).__name__
    require(several, f"several messages are a list, not {kind}: store one message with append")
    return list(messages)


def holds_bytes(messages: Iterable[Any]) -> bool:
    """Whether bytes are among the messages: JSON would hold base64 of them."""
    return any(isinstance(data, BYTES) for data in messages)


def encode_json(data: Any) -> bytes:
    """A value as JSON; raises `UnencodableError` for what JSON cannot hold."""
    try:
        return _ENCODER.encode(data)
    except ENCODING_FAILURES as error:
        raise UnencodableError(f"this cannot be stored as JSON: {error}") from error


def encode_bytes(data: Any) -> bytes:
    """A message of a stream that is not JSON."""
    if isinstance(data, str):
        try:
            return data.encode()
        except UnicodeEncodeError as error:
            raise UnencodableError(f"the text is not Unicode: {error}") from None
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    raise UnencodableError(
        f"a stream that is not JSON takes bytes or text, not {type(data).__name__}"
    )


def new_key(settings: ClientSettings) -> str:
    """A key that no other request has.

    It begins with the time: keys that come in their order cost the server half as much to keep.
    """
    return f"{settings.clock.now_ms():012x}{settings.clock.token(KEY_BYTES).hex()}"


class Producing(msgspec.Struct, frozen=True):
    """A producer's number for one append."""

    id: str
    epoch: int
    seq: int

    def __post_init__(self) -> None:
        require(isinstance(self.id, str), f"the id of a producer is a text, not {self.id!r}")
        require(self.id != "", "the id of a producer is not empty")
        require(0 <= self.epoch <= NUMBER_MAX, "the epoch of a producer is from 0 to 2**53 - 1")
        require(0 <= self.seq <= NUMBER_MAX, "the seq of a producer is from 0 to 2**53 - 1")


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that may go with an append beside its data."""

    close: bool = False
    if_match: str | None = None
    if_none_match: Literal["*"] | None = None
    auto_create: bool = False
    stream_seq: str | None = None
    key: str | None = None
    producer: Producing | None = None
    producer_if: tuple[int, int] | None = None
    strict: bool = False
    claim_end: Literal["released", "completed"] | None = None
    """The holder of a claimed producer id gives it up with this append."""
    reason: str | None = None
    """Why an epoch is raised, for the audit stream."""
    lease: str | None = None
    """The token of a lease that must be current."""

    def __post_init__(self) -> None:
        require(self.key != "", "an Idempotency-Key is not empty")
        require(self.if_match != "", "if_match is an offset or *")
        require(self.stream_seq != "", "stream_seq is not empty")
        if self.producer_if is not None:
            require(min(self.producer_if) >= 0, "producer_if is an epoch and a seq, both from 0 on")

    @property
    def makes(self) -> bool:
        """Whether a stream that does not exist is made."""
        return self.auto_create or self.if_none_match is not None

    def headers(self) -> list[tuple[str, str]]:
        """As they go on the wire."""
        headers: list[tuple[str, str]] = []
        if self.close:
            headers.append(("Stream-Closed", "true"))
        if self.if_match is not None:
            quoted = self.if_match if self.if_match == "*" else f'"{self.if_match}"'
            headers.append(("If-Match", quoted))
        if self.if_none_match is not None:
            headers.append(("If-None-Match", self.if_none_match))
        if self.auto_create:
            headers.append(("Stream-Auto-Create", "true"))
        if self.stream_seq is not None:
            headers.append(("Stream-Seq", self.stream_seq))
        if self.key is not None:
            headers.append(("Idempotency-Key", self.key))
        if self.producer is not None:
            headers += producer_headers(self.producer)
        if self.producer_if is not None:
            headers.append(("Producer-If", "{}.{}".format(*self.producer_if)))
        if self.strict:
            headers.append(("Producer-Strict", "true"))
        if self.claim_end is not None:
            headers.append(("Claim-End", self.claim_end))
        if self.reason is not None:
            headers.append(("Audit-Reason", self.reason))
        if self.lease is not None:
            headers.append(("Lease-Token", self.lease))
        return headers


def producer_headers(producer: Producing) -> list[tuple[str, str]]:
    return [
        ("Producer-Id", producer.id),
        ("Producer-Epoch", str(producer.epoch)),
        ("Producer-Seq", str(producer.seq)),
    ]


def append(
    settings: ClientSettings,
    path: str,
    body: bytes,
    content_type: str,
    condition: Condition,
    *,
    retry: bool = True,
) -> Operation[Appended]:
    """Add a body to a stream, under a key of its own unless it has a key or a number already."""
    named = condition.key is not None or condition.producer is not None
    if not named and retry:
        condition = msgspec.structs.replace(condition, key=new_key(settings))
    headers = condition.headers()
    if body or condition.makes:
        headers.insert(0, ("Content-Type", content_type))
    request = Request("POST", stream_target(path), tuple(headers), body)
    # Closing alone is the same however often it is done.
    once = not retry and not named and bool(body)
    try:
        answer = yield from exchange(settings, request, Kind.ONCE if once else Kind.WRITE)
    except ConflictError as error:
        plain = error.code == "http_409"
        if condition.stream_seq is not None and plain and not is_about_type(error):
            raise StreamSeqError.like(error) from None
        raise
    return appended(answer.response, condition)


def is_about_type(error: ResponseError) -> bool:
    """Whether a refusal is about the content type; a server without codes says so in its text."""
    if isinstance(error, ContentTypeMismatchError):
        return True
    said = error.detail.lower()
    return error.code == "http_409" and "content" in said and "type" in said


def appended(response: Response, condition: Condition) -> Appended:
    """What the answer to an append says."""
    by_producer = condition.producer is not None and response.status == 204
    # A close without data is answered 204 as well, and a duplicate says where the original went.
    duplicate = response.is_true("idempotency-replayed") or (
        by_producer and "stream-position" not in response.headers
    )
    match = response.headers.get("producer-match")
    return Appended(
        next_offset=_required(response, "stream-next-offset"),
        offset=response.headers.get("stream-offset"),
        version=response.integer("stream-version"),
        position=response.integer("stream-position"),
        closed=response.is_true("stream-closed"),
        duplicate=duplicate,
        matches=None if match is None else match == "true",
        epoch=response.integer("producer-epoch"),
        seq=response.integer("producer-seq"),
    )


class Creation(msgspec.Struct, frozen=True, kw_only=True):
    """How a stream is made."""

    content_type: str | None = None
    ttl_seconds: int | None = None
    expires_at: datetime | str | None = None
    closed: bool = False
    fork_of: str | None = None
    fork_offset: str | None = None
    fork_sub_offset: int | None = None

    def __post_init__(self) -> None:
        require(self.content_type != "", "content_type is not empty")
        require((self.ttl_seconds or 0) >= 0, "ttl_seconds is not negative")
        require((self.fork_sub_offset or 0) >= 0, "sub_offset is not negative")

    def headers(self, settings: ClientSettings) -> list[tuple[str, str]]:
        headers: list[tuple[str, str]] = []
        if self.content_type is not None:
            headers.append(("Content-Type", self.content_type))
        if self.ttl_seconds is not None:
            headers.append(("Stream-TTL", str(self.ttl_seconds)))
        if self.expires_at is not None:
            headers.append(("Stream-Expires-At", _instant(self.expires_at)))
        if self.closed:
            headers.append(("Stream-Closed", "true"))
        if self.fork_of is not None:
            source = wire_target(settings.address, Request("PUT", stream_target(self.fork_of)))
            headers.append(("Stream-Forked-From", source))
        if self.fork_offset is not None:
            headers.append(("Stream-Fork-Offset", self.fork_offset))
        if self.fork_sub_offset is not None:
            headers.append(("Stream-Fork-Sub-Offset", str(self.fork_sub_offset)))
        return headers


def _instant(value: datetime | str) -> str:
    if isinstance(value, str):
        return value
    if value.tzinfo is None:
        raise InvalidArgumentError("expires_at needs a time zone: datetime.now(UTC) + ...")
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")


def create(
    settings: ClientSettings, path: str, creation: Creation, body: bytes = b""
) -> Operation[Head]:
    """Make a stream, or find it as it would have been made."""
    headers = tuple(creation.headers(settings))
    answer = yield from exchange(
        settings, Request("PUT", stream_target(path), headers, body), Kind.WRITE
    )
    made = _described(answer.response)
    # A 200 after an attempt whose answer was lost may be about the stream that it made.
    is_new = True if answer.response.status == 201 else None if answer.uncertain else False
    return msgspec.structs.replace(made, is_new=is_new)


def head(settings: ClientSettings, path: str) -> Operation[Head]:
    """Look at a stream."""
    answer = yield from exchange(settings, Request("HEAD", stream_target(path)), Kind.READ)
    return _described(answer.response)


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ProtocolError(f"the server names {text!r} as a time, which is none") from None


def _described(response: Response) -> Head:
    expires_at = response.headers.get("stream-expires-at")
    return Head(
        content_type=response.headers.get("content-type", "application/octet-stream"),
        next_offset=_required(response, "stream-next-offset"),
        closed=response.is_true("stream-closed"),
        ttl_seconds=response.integer("stream-ttl"),
        expires_at=None if expires_at is None else _moment(expires_at),
        first_offset=response.headers.get("stream-first-offset"),
        books_closed=response.headers.get("stream-books") == "closed",
    )


def delete(settings: ClientSettings, path: str) -> Operation[None]:
    """Remove a stream; if an attempt may have arrived, finding nothing means it is done."""
    request = Request("DELETE", stream_target(path))
    try:
        yield from exchange(settings, request, Kind.WRITE)
    except StreamNotFoundError as error:
        if not error.uncertain:
            raise


def truncate(settings: ClientSettings, path: str, before: str) -> Operation[Head]:
    """Drop what lies before an offset; the stream's offsets go on as they were."""
    target = stream_target(path, (("truncate", ""), ("before", before)))
    answer = yield from exchange(settings, Request("POST", target), Kind.WRITE)
    return Head(
        content_type="",
        next_offset=_required(answer.response, "stream-next-offset"),
        first_offset=answer.response.headers.get("stream-first-offset"),
    )


class CommitAppend(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One append of a commit. Give `messages`, or `parts` that were staged, or neither: then it
    closes the stream, or is about its books."""

    stream: str
    messages: list[Any] = []
    content_type: str = JSON
    parts: list[tuple[str, str] | tuple[str, str, int]] = []
    """Staged parts in their order: transaction, part and, if the server is to hold the part to
    it, the number of its chunks."""
    close: bool = False
    producer: Producing | None = None
    producer_if: tuple[int, int] | None = None
    producer_strict: bool = False
    stream_seq: str | None = None
    if_match: str | None = None
    if_none_match: Literal["*"] | None = None
    auto_create: bool = False
    key: str | None = None
    claim_end: Literal["released", "completed"] | None = None
    lease: str | None = None
    """The token of a lease that must be current; it goes on."""
    books: Literal["close", "open"] | None = None
    """Close the books of the stream, so that it takes no messages; or open them again, with
    `if_match` at its tail."""
    truncate_before: str | None = None
    """Let the stream begin at this offset after the append; `now` is where the append begins."""

    def document(self) -> dict[str, Any]:
        """As it goes on the wire."""
        document: dict[str, Any] = {"stream": self.stream, "content_type": self.content_type}
        if self.parts:
            document["parts"] = [dict(zip(_PART, part, strict=False)) for part in self.parts]
        elif self.messages:
            body = encode_messages(self.messages, self.content_type)
            if is_json(self.content_type):
                document["data"] = msgspec.Raw(body)
            else:
                document["data_base64"] = base64.b64encode(body).decode()
        if self.producer is not None:
            document["producer"] = msgspec.structs.asdict(self.producer)
        if self.producer_if is not None:
            document["producer_if"] = "{}.{}".format(*self.producer_if)
        for name in _PLAIN:
            value = getattr(self, name)
            if value:
                document[name] = value
        return document


class WriterBatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The batch of a writer that a commit publishes, in the run that `open_writer` began."""

    name: str
    query: str
    epoch: int
    batch: int
    digest: str | None = None
    """A text that stands for the batch's content; compared when the batch comes again."""
    range: PositionRange | None = None
    """The positions that the batch was read from. One that comes again from others is refused."""


_PART = ("txn", "part", "chunks")
_PLAIN = (
    "close",
    "producer_strict",
    "stream_seq",
    "if_match",
    "if_none_match",
    "auto_create",
    "key",
    "claim_end",
    "lease",
    "books",
    "truncate_before",
)


def commit(
    settings: ClientSettings,
    appends: Iterable[CommitAppend],
    key: str | None,
    reason: str | None = None,
    writer: WriterBatch | None = None,
    leases: Iterable[tuple[str, int] | msgspec.Struct] = (),
) -> Operation[Committed]:
    """Several appends, all of them or none; `reason` is for the audit stream.

    A lease is a token with the position to ack it at, or all that a `LeaseAck` says.
    """
    # Each is encoded at once: ten thousand dictionaries would have the garbage collector look
    # through everything that is alive, several times.
    encoded = [msgspec.Raw(encode_json(append.document())) for append in appends]
    document: dict[str, Any] = {"appends": encoded}
    acked = [
        {"token": lease[0], "at": lease[1]} if isinstance(lease, tuple) else lease
        for lease in leases
    ]
    if acked:
        document["leases"] = acked
    headers = [("Content-Type", JSON)]
    if writer is not None:
        document["writer"] = writer
    elif key is None:
        key = new_key(settings)  # by a writer's batch the server knows the commit again
    if key is not None:
        headers.append(("Idempotency-Key", key))
    body = encode_json(document)
    if reason is not None:
        headers.append(("Audit-Reason", reason))
    request = Request("POST", "/v1/commit", tuple(headers), body)
    answer = yield from exchange(settings, request, Kind.WRITE)
    return decoded(answer.response, Committed)


def stage(
    settings: ClientSettings, txn: str, part: str, chunk: int, body: bytes, content_type: str
) -> Operation[Staged]:
    """Upload a chunk that a commit will make visible."""
    target = target_of(f"/v1/staging/{txn}/{part}", (("chunk", str(chunk)),))
    request = Request("POST", target, (("Content-Type", content_type),), body)
    answer = yield from exchange(settings, request, Kind.WRITE)
    return decoded(answer.response, Staged)


BUNDLE = "application/vnd.fencepost.bundle"
"""The type of an upload that holds chunks of many parts."""


class BundledChunk(NamedTuple):
    """A chunk of a bundle: of the part `PART.piece`, for a stream that may be appended to."""

    piece: int
    chunk: int
    stream: str
    content_type: str
    body: bytes


def stage_bundle(
    settings: ClientSettings, txn: str, part: str, chunks: Sequence[BundledChunk]
) -> Operation[Staged]:
    """Upload chunks of many parts at once."""
    index = [
        {
            "piece": chunk.piece,
            "chunk": chunk.chunk,
            "stream": chunk.stream,
            "content_type": chunk.content_type,
            "bytes": len(chunk.body),
        }
        for chunk in chunks
    ]
    body = b"".join((msgspec.json.encode(index), b"\n", *(chunk.body for chunk in chunks)))
    headers = (("Content-Type", BUNDLE),)
    request = Request("POST", target_of(f"/v1/staging/{txn}/{part}"), headers, body)
    answer = yield from exchange(settings, request, Kind.WRITE)
    return decoded(answer.response, Staged)


def unstage_pieces(
    settings: ClientSettings, txn: str, part: str, first: int, count: int
) -> Operation[None]:
    """Drop parts of a bundle that no commit used; those that are not there are passed over."""
    query = (("first", str(first)), ("pieces", str(count)))
    target = target_of(f"/v1/staging/{txn}/{part}", query)
    yield from exchange(settings, Request("DELETE", target), Kind.WRITE)


def plan(settings: ClientSettings, query: Iterable[tuple[str, str]]) -> Operation[Plan]:
    """Where a bounded read of the log would end."""
    answer = yield from exchange(
        settings, Request("GET", target_of("/v1/log/plan", query)), Kind.READ
    )
    return decoded(answer.response, Plan)


def log_head(settings: ClientSettings) -> Operation[int]:
    """The newest position of the log."""
    answer = yield from exchange(settings, Request("HEAD", "/v1/log"), Kind.READ)
    position = answer.response.integer("log-head")
    if position is None:
        raise ProtocolError("the server did not say where its log ends: it may not have one")
    return position


def query_of(pairs: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs of a query string, without those that say nothing; lists repeat their name."""
    query: list[tuple[str, str]] = []
    for name, value in pairs.items():
        values = value if isinstance(value, list | tuple) else [value]
        query += [(name, _shown(one)) for one in values if one is not None]
    return query


def _shown(value: Any) -> str:
    return _instant(value) if isinstance(value, datetime) else str(value)


def _required(response: Response, name: str) -> str:
    value = response.headers.get(name)
    if value is None:
        raise ProtocolError(f"the server's answer has no {name}: is this a durable-streams server?")
    return value


def decoded(response: Response, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(response.body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"the server's answer is not what it should be: {error}") from None
