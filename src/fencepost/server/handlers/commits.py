"""`/v1/commit`: several appends that happen together or not at all.

A commit's body is JSON. Each of its appends says what a POST to its stream would say in headers,
and brings its data along or names the parts that it is made of (`staging.py` takes those). The
answer to a refused commit says which append was refused and why; nothing of the commit has happened
then. Parsing comes first in this module, the answers after it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec

from fencepost.clock import Clock
from fencepost.http.messages import Request, Response
from fencepost.memory import dissolve, paused_collector
from fencepost.protocol.acks import Ack
from fencepost.protocol.appends import Append, Conditions, ProducerTuple
from fencepost.protocol.batches import DIGEST_BYTES, Batch, digest
from fencepost.protocol.books import BooksRequest
from fencepost.protocol.commits import (
    Commit,
    CommitDuplicate,
    CommitItem,
    CommitKeyReused,
    CommitLeaseLost,
    CommitOutcome,
    CommitPartial,
    CommitRefused,
    CommitReplayed,
    Committed,
    CommittedInSlices,
    ItemDeleted,
    ItemMissing,
    ItemOutcome,
    Named,
    Part,
    PartIncomplete,
    PartMismatch,
    PartMissing,
    PartOverfull,
    PartTwice,
    PartUsed,
    describe_commit,
)
from fencepost.protocol.groups import GroupLimits
from fencepost.protocol.leases import LeaseRef
from fencepost.protocol.limits import Limits
from fencepost.protocol.offsets import START, Offset, parse_offset
from fencepost.protocol.streams import JSON, media_type
from fencepost.protocol.writers import (
    BatchDone,
    WriterFenced,
    WriterHeld,
    WriterHistoryGone,
    WriterMissing,
    WriterQueryChanged,
    WriterRangeMismatch,
)
from fencepost.server import access
from fencepost.server.groups.bodies import LeaseBody, ack_of, limit_exceeded
from fencepost.server.groups.working import Working
from fencepost.server.handlers import fields, parsing, rendering, writers
from fencepost.server.handlers.fields import RefusedError, bad, decoded, rfc3339
from fencepost.server.handlers.rendering import (
    BROWSER_BLOCK,
    lease_refused,
    refused,
    with_fields,
)
from fencepost.server.handlers.staging import commit_too_large, part_refused
from fencepost.server.lease_tokens import LeaseTokens
from fencepost.store.contract import (
    Failed,
    Store,
    Unknown,
)

_NOT_A_COMMIT = ("commit_invalid", "is not a commit")
Respond = Callable[[Response], None]


class _Producer(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    epoch: int
    seq: int


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    txn: str
    part: str
    chunks: Annotated[int, msgspec.Meta(ge=1)] | None = None


class _Item(msgspec.Struct, forbid_unknown_fields=True):
    stream: str
    content_type: str | None = None
    data: msgspec.Raw = msgspec.Raw()
    data_base64: str | None = None
    parts: list[_Part] = []
    close: bool = False
    producer: _Producer | None = None
    producer_if: str | None = None
    producer_strict: bool = False
    stream_seq: str | None = None
    if_match: str | None = None
    if_none_match: Literal["*"] | None = None
    auto_create: bool = False
    key: str | None = None
    claim_end: Literal["released", "completed"] | None = None
    lease: str | None = None
    books: Literal["close", "open"] | None = None
    truncate_before: str | None = None


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    appends: list[_Item]
    writer: writers.BatchBody | None = None
    leases: list[LeaseBody] = []


class _RawBody(msgspec.Struct, forbid_unknown_fields=True):
    appends: list[msgspec.Raw]
    writer: writers.BatchBody | None = None
    leases: list[LeaseBody] = []


_DECODER = msgspec.json.Decoder(_Body)
_RAW_DECODER = msgspec.json.Decoder(_RawBody)
_ITEM_DECODER = msgspec.json.Decoder(_Item)

LARGE_BODY_BYTES = 64 * 1024
"""A body beyond this is read some appends at a time, so that others need not wait."""
ITEMS_PER_TURN = 128
"""Appends of a large body that are read in one turn of the loop."""


class Commits:
    """The handler of commits. It answers from a callback, like an append."""

    def __init__(
        self,
        store: Store,
        limits: Limits,
        clock: Clock,
        tokens: LeaseTokens,
        groups: GroupLimits,
        working: Working,
    ) -> None:
        self._store = store
        self._limits = limits
        self._clock = clock
        self._tokens = tokens
        self._groups = groups
        self._working = working

    def commit(self, request: Request, answer: Respond) -> Awaitable[Response] | None:
        if len(request.body) > LARGE_BODY_BYTES:
            return self.commit_large(request)
        _check_headers(request)
        commit = self._parse(request)
        may_read = access.may_read(request.principal)

        def done(outcome: CommitOutcome | Failed | Unknown) -> None:
            self._note(commit, outcome)
            answer(committed(commit, outcome, may_read))

        self._store.commit(commit, done)
        return None

    def _note(self, commit: Commit, outcome: CommitOutcome | Failed | Unknown) -> None:
        """Have the acks of a commit counted as those of other requests are."""
        if isinstance(outcome, Committed | CommittedInSlices) and outcome.acks:
            groups = [ref.group for ref, _ in commit.leases]
            self._working.note_commit(groups, outcome.acks)

    async def commit_large(self, request: Request) -> Response:
        """A commit with a large body: other requests have their turn while it is read."""
        with paused_collector():
            return await self._commit_large(request)

    async def _commit_large(self, request: Request) -> Response:
        access.writing_allowed(request)
        _check_headers(request)
        body: _RawBody = decoded(_RAW_DECODER, request.body, *_NOT_A_COMMIT)
        self._check_counts(len(body.appends), body.writer is not None)
        may_read = access.may_read(request.principal)
        items: list[CommitItem] = []
        parts, shows_all, named = 0, True, Named(set(), set())
        for index, raw in enumerate(body.appends):
            item = self._large_item(raw, index, request)
            items.append(item)
            parts += len(item.parts)
            named.paths.add(item.append.path)
            named.parts.update(item.parts)
            shows_all = shows_all and may_read(item.append.path)
            if index % ITEMS_PER_TURN == 0:
                await asyncio.sleep(0)
        self._check_parts(parts)
        hashing = asyncio.get_running_loop().run_in_executor(None, hashlib.sha256, request.body)
        commit = self._commit(request, items, body, (await hashing).digest(), named)
        answered: asyncio.Future[CommitOutcome | Failed | Unknown]
        answered = asyncio.get_running_loop().create_future()
        self._store.commit(commit, lambda outcome: _resolve(answered, outcome))
        outcome = await answered
        self._note(commit, outcome)
        answer = committed(commit, outcome, None if shows_all else may_read)
        await dissolve(items, body.appends)
        return answer

    def _large_item(self, raw: msgspec.Raw, index: int, request: Request) -> CommitItem:
        try:
            return self._item(decoded(_ITEM_DECODER, raw, *_NOT_A_COMMIT), request)
        except RefusedError as error:
            error.response = at_item(error.response, index)
            raise

    def _parse(self, request: Request) -> Commit:
        body: _Body = decoded(_DECODER, request.body, *_NOT_A_COMMIT)
        self._check_counts(len(body.appends), body.writer is not None)
        self._check_parts(sum(len(item.parts) for item in body.appends))
        items = []
        for index, item in enumerate(body.appends):
            try:
                items.append(self._item(item, request))
            except RefusedError as error:
                error.response = at_item(error.response, index)
                raise
        return self._commit(request, items, body, hashlib.sha256(request.body).digest())

    def _check_counts(self, appends: int, has_writer: bool) -> None:
        if not appends and not has_writer:
            raise bad("commit_empty", "a commit has at least one append, or a writer")
        if appends > self._limits.commit_appends_max:
            raise commit_too_large("appends", "commit_appends_max", self._limits.commit_appends_max)

    def _check_parts(self, parts: int) -> None:
        if parts > self._limits.commit_parts_max:
            raise commit_too_large("parts", "commit_parts_max", self._limits.commit_parts_max)

    def _commit(
        self,
        request: Request,
        items: list[CommitItem],
        body: _Body | _RawBody,
        mark: bytes,
        named: Named | None = None,
    ) -> Commit:
        key = fields.text_header(request, b"idempotency-key", self._limits.key_bytes_max)
        if key is not None:
            parsing.check_key(key)
        writer = body.writer
        batch = None if writer is None else writers.batch_of(writer, request, self._limits)
        principal = access.name_of(request.principal)
        leases = self._leases(body.leases)
        dice = self._clock.random() if leases else 0.0
        return Commit(items, key, mark[:DIGEST_BYTES], principal, batch, named, leases, dice)

    def _leases(self, given: list[LeaseBody]) -> list[tuple[LeaseRef, Ack]]:
        if len(given) > self._groups.claim_streams_max:
            raise limit_exceeded("claim_streams_max", self._groups.claim_streams_max)
        leases = []
        for index, lease in enumerate(given):
            try:
                ref = parsing.lease_of(lease.token, self._tokens)
                leases.append((ref, ack_of(ref, lease, self._groups)))
            except RefusedError as error:
                error.response = at_lease(error.response, index)
                raise
        return leases

    def _item(self, item: _Item, request: Request) -> CommitItem:
        limits = self._limits
        path = fields.refuse_managed(fields.check_path(item.stream))
        if len(path.encode()) > limits.path_bytes_max:
            raise bad("path_too_long", f"a stream path has at most {limits.path_bytes_max} bytes")
        kind = item.content_type
        if kind is not None:
            kind = fields.check_content_type(kind, limits)
        batch = self._batch(item, kind)
        books = _books(item)
        if batch is None and not item.parts and not item.close:
            _check_empty(item, books)
        media = None if kind is None else media_type(kind)
        mark = digest(media or "", item.close, b"" if batch is None else batch.data)
        if books is not None:
            mark = hashlib.sha256(mark + books.mark()).digest()[:DIGEST_BYTES]
        if item.stream_seq == "":
            raise bad("header_invalid", "stream_seq must not be empty")
        append = Append(
            path,
            batch,
            media,
            item.close,
            self._producer(item),
            _bounded(item.stream_seq, "stream_seq", limits.stream_seq_bytes_max),
            mark,
            self._conditions(item, kind, books),
            access.actor_of(request, path, item.claim_end),
        )
        access.append_allowed(append, has_data=bool(item.parts))
        scope = access.scope_of(request.principal)
        if any("\0" in part.txn or "\0" in part.part for part in item.parts):
            raise bad("commit_invalid", "the names of a part have no NUL")
        parts = tuple(Part(scope + part.txn, part.part) for part in item.parts)
        return CommitItem(append, parts, tuple(part.chunks for part in item.parts))

    def _batch(self, item: _Item, kind: str | None) -> Batch | None:
        data = bytes(item.data)
        given = bool(data) + (item.data_base64 is not None) + bool(item.parts)
        if given > 1:
            raise bad("commit_invalid", "give one of data, data_base64 and parts")
        if data:
            if kind is None or media_type(kind) != JSON:
                raise bad("content_type_invalid", "data is JSON: for other types use data_base64")
        elif item.data_base64 is not None:
            if kind is None:
                raise bad("content_type_missing", "an append needs a content_type")
            try:
                data = base64.b64decode(item.data_base64, validate=True)
            except ValueError:
                raise bad("base64_invalid", "data_base64 is not base64") from None
            if not data:
                raise bad("body_empty", "data_base64 is empty")
        else:
            return None
        batch = parsing.batch_of(data, media_type(kind), self._limits)
        if batch is None:
            raise bad("batch_empty", "an empty array appends nothing")
        return batch

    def _producer(self, item: _Item) -> ProducerTuple | None:
        producer = item.producer
        if producer is None:
            return None
        for value in (producer.epoch, producer.seq):
            if not 0 <= value <= fields.INTEGER_MAX:
                raise bad("header_invalid", "epoch and seq are integers from 0 to 2^53-1")
        name = _bounded(producer.id, "producer.id", self._limits.producer_id_bytes_max)
        if not name or name.isspace():
            raise bad("producer_id_empty", "a producer id must not be empty")
        return ProducerTuple(name, producer.epoch, producer.seq)

    def _conditions(
        self, item: _Item, kind: str | None, books: BooksRequest | None
    ) -> Conditions | None:
        creates = item.auto_create or item.if_none_match is not None
        if creates and kind is None:
            raise bad("content_type_missing", "an append that may make a stream needs its type")
        if item.producer_if is not None and item.producer is None:
            raise bad("producer_headers_incomplete", "producer_if needs a producer")
        if item.if_match is not None and item.if_none_match is not None:
            raise bad("precondition_conflict", "give if_match or if_none_match, not both")
        if_match: Offset | int | Literal["*"] | None = None
        if item.if_match is not None:
            if_match = "*" if item.if_match == "*" else parsing.expected_tail(item.if_match)
        key = _bounded(item.key, "key", self._limits.key_bytes_max)
        conditions = Conditions(
            if_match=if_match,
            if_empty=item.if_none_match is not None,
            create_as=kind if creates else None,
            producer_if=parsing.producer_if(
                None if item.producer_if is None else item.producer_if.encode()
            ),
            strict=item.producer_strict,
            key=None if key is None else parsing.check_key(key),
            lease=None if item.lease is None else parsing.lease_of(item.lease, self._tokens),
            books=books,
        )
        return None if conditions == Conditions() else conditions


def _books(item: _Item) -> BooksRequest | None:
    """Read the wishes of an append about the books of its stream; None if it has none."""
    if item.books is None and item.truncate_before is None:
        return None
    before: Offset | Literal["now"] | None = None
    if item.truncate_before is not None:
        parsed = parse_offset(item.truncate_before)
        if parsed is None:
            raise bad(
                "offset_invalid",
                f"truncate_before is {item.truncate_before[:80]!r}, and must be an offset that"
                ' this server gave out, or "now"',
            )
        before = START if parsed == "-1" else parsed
    return BooksRequest(item.books, before)


def _check_empty(item: _Item, books: BooksRequest | None) -> None:
    """Refuse an append without data, unless it changes the books and has no producer."""
    if books is None:
        raise bad(
            "body_empty",
            "an append has data, data_base64 or parts, unless it closes, or has books or"
            " truncate_before",
        )
    if item.producer is not None:
        # A producer's numbers are those of its messages, and there is none.
        raise bad("commit_invalid", "an append without data has no producer: give it a key")


def _check_headers(request: Request) -> None:
    if request.repeated:
        parsing.refuse_repeated(request)
    # What an append of a commit says stands in the body; the key is that of the whole.
    parsing.refuse_headers_of_appends(request, "a commit", but=b"idempotency-key")


def _resolve(future: asyncio.Future[Any], outcome: object) -> None:
    # The client may be gone by the time that the commit is done.
    if not future.done():
        future.set_result(outcome)


def _bounded(value: str | None, name: str, bytes_max: int) -> str | None:
    if value is not None and len(value.encode()) > bytes_max:
        raise bad("header_too_long", f"{name} has at most {bytes_max} bytes")
    if value is not None and "\0" in value:
        raise bad("commit_invalid", f"{name} has no NUL: no text that is kept holds one")
    return value


def committed(
    commit: Commit,
    outcome: CommitOutcome | Failed | Unknown,
    may_read: Callable[[str], bool] | None,
) -> Response:
    match outcome:
        case Committed():
            answer = _readable(commit, describe_commit(commit, outcome), may_read)
            return _described(answer, duplicate=False, batch=_batch_of(commit))
        case CommittedInSlices(answer, duplicate):
            answer = _readable(commit, answer, may_read)
            return _described(answer, duplicate=duplicate, batch=_batch_of(commit))
        case CommitDuplicate():
            answer = _readable(commit, describe_commit(commit, outcome), may_read)
            return _described(answer, duplicate=True, batch=_batch_of(commit))
        case CommitReplayed(answer):
            return _described(_readable(commit, answer, may_read), duplicate=True)
        case CommitKeyReused(first_used_ms):
            return refused(
                409,
                "idempotency_key_reused",
                "Idempotency key reused",
                f"the key was used for another commit at {rfc3339(first_used_ms)}",
            )
        case CommitRefused(index, refusal):
            return at_item(_item_refused(commit.items[index].append.path, refusal), index)
        case CommitLeaseLost(index, reason):
            return at_lease(lease_refused(reason), index)
        case CommitPartial(duplicates):
            return refused(
                409,
                "commit_partial",
                "Partly done before",
                f"some appends were made before ({list(duplicates[:10])}) and others not;"
                " nothing was done",
            )
        case BatchDone(batch, matches, published):
            shown: dict[str, object] = {
                "duplicate": True,
                "batch": batch,
                "match": matches,
                "range": writers.shown_range(published),
                "appends": [],
            }
            headers = [(b"Content-Type", b"application/json")]
            return Response(200, headers, msgspec.json.encode(shown), BROWSER_BLOCK)
        case WriterMissing() | WriterHeld() | WriterQueryChanged() | WriterFenced():
            return writers.refusal(outcome, missing_status=409)
        case WriterRangeMismatch() | WriterHistoryGone():
            return writers.refusal(outcome)
        case Failed() | Unknown():
            return rendering.failed(outcome)


def _batch_of(commit: Commit) -> int | None:
    return None if commit.writer is None else commit.writer.batch


def _readable(commit: Commit, answer: bytes, may_read: Callable[[str], bool] | None) -> bytes:
    """An answer that says of streams which may not be read only that they were appended to."""
    if may_read is None or all(may_read(item.append.path) for item in commit.items):
        return answer
    shown = msgspec.json.decode(answer)
    shown["appends"] = [
        append if may_read(append["stream"]) else {"stream": append["stream"]}
        for append in shown["appends"]
    ]
    return msgspec.json.encode(shown)


def _described(answer: bytes, *, duplicate: bool, batch: int | None = None) -> Response:
    published = b"" if batch is None else b'"batch":%d,' % batch
    body = b'{"duplicate":%b,%b%b' % (b"true" if duplicate else b"false", published, answer[1:])
    return Response(200, [(b"Content-Type", b"application/json")], body, BROWSER_BLOCK)


def _item_refused(path: str, refusal: ItemOutcome) -> Response:
    match refusal:
        case ItemMissing():
            return rendering.missing(path)
        case ItemDeleted():
            return rendering.soft_deleted(path)
        case PartMissing() | PartUsed() | PartIncomplete():
            return part_refused(refusal)
        case PartOverfull() | PartMismatch() | PartTwice():
            return part_refused(refusal)
        case _:
            return rendering.appended(path, refusal)


def at_lease(response: Response, index: int) -> Response:
    """A problem that says which lease of a commit it is about."""
    return with_fields(response, lease=index)


def at_item(response: Response, index: int) -> Response:
    """A problem that says which append of a commit it is about."""
    return with_fields(response, item=index)
