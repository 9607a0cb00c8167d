"""Read a coordination stream: for each entity its newest message, and when it was stored.

The stream is read through the log of the server, which gives with each message the producer id,
epoch and number under which it was accepted, and the server's time. A message counts for the entity
whose id it was accepted under, if it is about that entity. Its epoch and version are those of the
producer, the version being the number, whatever its value says: other implementations leave them
out, or copy old ones. Entries are ordered by (epoch, version). What cannot be read is remembered by
its number, so that an override can raise the epoch over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, Protocol

import msgspec

from fencepost.client import operations, state
from fencepost.client.effects import Operation
from fencepost.client.errors import (
    ClaimCompletedError,
    OutcomeUnknownError,
    ProducerMovedError,
    ProtocolError,
    SequenceGapError,
    StaleEpochError,
)
from fencepost.client.http import Request
from fencepost.client.operations import Condition, Producing, encode_json
from fencepost.client.reading import LogReader, Pages
from fencepost.client.results import LogEntry, ProducerInfo
from fencepost.client.retry import Kind, exchange
from fencepost.client.settings import JSON, ClientSettings
from fencepost.coordination.rules.ids import parse_id

NONCE_BYTES = 16
LOST = (StaleEpochError, SequenceGapError, ProducerMovedError, ClaimCompletedError)
"""Refusals that say: the entity is elsewhere by now. Any other refusal is raised as it is."""


class Entry(msgspec.Struct, frozen=True):
    """The newest message about an entity."""

    change: state.Change
    epoch: int
    version: int
    updated_ms: int = 0
    """When the server stored it; 0 for a message of our own that was not read back yet."""
    since_ms: int = 0
    """When the first of the messages was stored that this one goes on from."""

    @property
    def place(self) -> tuple[int, int]:
        return self.epoch, self.version

    @property
    def value(self) -> dict[str, Any]:
        value: dict[str, Any] = self.change.value
        return value


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """What stands under the producer id of an entity and cannot be read as a message about it."""

    epoch: int
    version: int
    why: str

    @property
    def place(self) -> tuple[int, int]:
        return self.epoch, self.version

    def __str__(self) -> str:
        return f"epoch {self.epoch}, version {self.version}: {self.why}"


class Entities(Protocol):
    """Which producer ids stand for entities of one type, and how messages about them are read."""

    def id_of(self, key: str) -> str:
        """The producer id of an entity."""
        ...

    @property
    def ids(self) -> str:
        """A pattern that the ids of all entities match."""
        ...

    def read(self, key: str, data: Any) -> state.Change | str:
        """A message under the id of `key` as a change of it, or why it is none."""
        ...

    def goes_on(self, change: state.Change, /) -> bool:
        """Whether a change goes on with what the one before it began."""
        ...


class Entries:
    """The entities of one type on one stream."""

    def __init__(self, settings: ClientSettings, path: str, entities: Entities) -> None:
        self._settings = settings
        self._path = path
        self._entities = entities
        self._after = -1
        self._known: dict[str, Entry] = {}
        self._skipped: dict[str, Skipped] = {}
        self.loaded = False
        """Whether the stream was read at all."""
        self.stopped: Callable[[], bool] = lambda: False
        """Asked before each request of `next`: whether the user wants no more of them."""

    def copy(self) -> Entries:
        """The same, to be read on by itself: what one of them reads, the other still gets."""
        other = Entries(self._settings, self._path, self._entities)
        other._after, other.loaded = self._after, self.loaded
        other._known, other._skipped = dict(self._known), dict(self._skipped)
        return other

    @property
    def after(self) -> int:
        """The position up to which the log was read."""
        return self._after

    def get(self, key: str) -> Entry | None:
        return self._known.get(key)

    def all(self) -> Iterator[Entry]:
        """The entries in the order in which their entities first came."""
        return iter(self._known.values())

    def skipped(self, key: str) -> Skipped | None:
        """The newest message about an entity if it cannot be read; None if it can."""
        skipped, entry = self._skipped.get(key), self._known.get(key)
        newer = skipped is not None and (entry is None or skipped.place > entry.place)
        return skipped if newer else None

    def all_skipped(self) -> dict[str, Skipped]:
        """The entities whose newest message cannot be read."""
        return {key: one for key in self._skipped if (one := self.skipped(key)) is not None}

    def place(self, key: str) -> tuple[int, int] | None:
        """The epoch and number that the producer id of an entity has, as far as they are known."""
        skipped = self.skipped(key)
        if skipped is not None:
            return skipped.place
        entry = self._known.get(key)
        return None if entry is None else entry.place

    def refresh(self) -> Operation[None]:
        """Read what the stream has got since the last time."""
        reader = self._reader(live=False)
        while (page := (yield from reader.next())) is not None:
            for entry in page.entries:
                self._take(entry)
        self._advance(reader)
        self.loaded = True

    def next(self) -> Operation[list[Entry]]:
        """What changes next, waiting for it as long as it takes; nothing once it is stopped."""
        while not self.stopped():
            reader = self._reader(live=True)
            reader.stopped = self.stopped
            page = yield from reader.next()
            self._advance(reader)
            found = [self._take(entry) for entry in page.entries] if page is not None else []
            taken = [entry for entry in found if entry is not None]
            if taken:
                return taken
        return []

    def explain(self, key: str) -> Operation[None]:
        """Find out where an id stands that refuses a move which fits all messages that were read.

        A message that was truncated, and that the log has forgotten, left only its number.
        """
        yield from self._ask(self._entities.id_of(key))

    def explain_all(self) -> Operation[None]:
        """The same for all entities."""
        yield from self._ask(self._entities.ids)

    def _ask(self, match: str) -> Operation[None]:
        query = [("stream", self._path), ("match", match)]
        pages = Pages(self._settings, "/v1/producers", "producers", ProducerInfo, query)
        listed: list[ProducerInfo] = []
        while (page := (yield from pages.next())) is not None:
            listed += (one for one in page if one.stream == self._path)
        if any(self._is_behind(one) for one in listed):
            yield from self.refresh()  # the id may have moved since the stream was read
        for one in listed:
            key = self._key(one.id)
            if key is not None and self._is_behind(one):
                why = "its messages are gone, the stream was truncated"
                self._skipped[key] = Skipped(epoch=one.epoch, version=one.seq, why=why)

    def _is_behind(self, listed: ProducerInfo) -> bool:
        """Whether an id has moved further than the messages that were read say."""
        key = self._key(listed.id)
        place = None if key is None else self.place(key)
        return key is not None and (place is None or place < (listed.epoch, listed.seq))

    def _reader(self, *, live: bool) -> LogReader:
        query = [("stream", self._path), ("pruned", "skip")]
        return LogReader(self._settings, query, after=self._after, until=None, live=live)

    def _advance(self, reader: LogReader) -> None:
        assert reader.after != "now"
        self._after = max(self._after, reader.after)

    def put(self, entry: Entry) -> bool:
        """Take an entry in, unless a newer one is there."""
        key = entry.change.key
        known = self._known.get(key)
        if known is not None and entry.place < known.place:
            return False
        self._known[key] = entry
        return True

    def _take(self, found: LogEntry) -> Entry | None:
        if found.marker in ("deleted", "expired"):
            self._known.clear()
            self._skipped.clear()
        if found.marker is not None or found.producer is None:
            return None
        sent = found.producer
        key = self._key(sent.id)
        if key is None:
            return None
        change = self._entities.read(key, found.data)
        if isinstance(change, str):
            skipped = Skipped(epoch=sent.epoch, version=sent.seq, why=change)
            known = self._skipped.get(key)
            if known is None or known.place <= skipped.place:
                self._skipped[key] = skipped
            return None
        before, since_ms = self._known.get(key), found.timestamp_ms
        if before is not None and before.since_ms and self._entities.goes_on(change):
            since_ms = before.since_ms
        entry = Entry(change, sent.epoch, sent.seq, found.timestamp_ms, since_ms)
        return entry if self.put(entry) else None

    def _key(self, producer_id: str) -> str | None:
        """Which entity an id stands for; None when it stands for none of ours."""
        name = parse_id(producer_id)[-1]
        return name if name and self._entities.id_of(name) == producer_id else None


class Move(msgspec.Struct, frozen=True):
    """A message under the number it is to have. It is sent as it is, however often."""

    producer: Producing
    body: bytes
    change: state.Change
    after: int = -1
    """The log was read up to this position before the move was made, so it can only come later."""

    @property
    def entry(self) -> Entry:
        """The entry that the move becomes once it is accepted."""
        return Entry(self.change, self.producer.epoch, self.producer.seq)


def new_move(
    settings: ClientSettings,
    producer: Producing,
    operation: Literal["insert", "update", "delete"],
    type: str,
    key: str,
    value: dict[str, Any],
    *,
    after: int = -1,
) -> Move:
    """A message with its epoch, its version and a nonce in it.

    The nonce, as txid, is what makes two actors' moves different even if they say the same, so
    that Producer-Match means "mine". There is no time in it: a body that is made anew for a retry
    would be another one.
    """
    nonce = settings.clock.token(NONCE_BYTES).hex()
    stamped = value | {"epoch": producer.epoch, "version": producer.seq}
    change = state.Change(
        type=type,
        key=key,
        value=stamped,
        headers=state.ChangeHeaders(operation=operation, txid=nonce),
    )
    # The builder checks what it builds; this path is hot, and everything in it is ours.
    assert type
    assert key
    return Move(producer, b"[%b]" % encode_json(change), change, after)


Verdict = Literal["mine", "taken", "lost"]
"""A move was accepted; another was, and is the newest; or the entity is elsewhere by now."""


def make(
    settings: ClientSettings,
    path: str,
    move: Move,
    *,
    producer_if: tuple[int, int] | None = None,
    claim_end: Literal["released", "completed"] | None = None,
    reason: str | None = None,
    outlasts: bool = False,
) -> Operation[bool]:
    """Whether `move` is the accepted one under its number: now, or by an earlier transmission.

    One that `outlasts` its epoch was accepted even if the entity has a newer epoch since.
    """
    condition = Condition(
        producer=move.producer, producer_if=producer_if, claim_end=claim_end, reason=reason
    )
    verdict = yield from attempt(settings, path, move, condition, outlasts=outlasts)
    return verdict == "mine"


def attempt(
    settings: ClientSettings, path: str, move: Move, condition: Condition, *, outlasts: bool = False
) -> Operation[Verdict]:
    """Send a move, and say what became of it.

    An answer may be lost, and its request be repeated when the entity has moved on. The server
    compares it with the newest messages of an id; what became of an older one stands in the log.
    """
    try:
        done = yield from operations.append(settings, path, move.body, JSON, condition)
    except StaleEpochError:
        stored = outlasts and (yield from _find(settings, path, move))
        return "mine" if stored else "lost"
    except LOST:
        return "lost"
    if not done.duplicate or done.matches is True:
        return "mine"
    if done.matches is None:
        stored = yield from _find(settings, path, move)
        if stored is None:
            at = f"{move.producer.id}, epoch {move.producer.epoch}, number {move.producer.seq}"
            raise OutcomeUnknownError(
                f"the server no longer knows what was stored as {at}, and the log has lost it"
            )
        if stored:
            return "mine"
    return "taken" if (done.epoch, done.seq) == (move.producer.epoch, move.producer.seq) else "lost"


def _find(settings: ClientSettings, path: str, move: Move) -> Operation[bool | None]:
    """Whether the log has `move` under its number; None if it has no message under that number."""
    query = [("stream", path), ("pruned", "skip")]
    reader = LogReader(settings, query, after=move.after, until=None, live=False)
    sought = move.producer
    while (page := (yield from reader.next())) is not None:
        for found in page.entries:
            sent = found.producer
            if sent is None or (sent.id, sent.epoch, sent.seq) != (
                sought.id,
                sought.epoch,
                sought.seq,
            ):
                continue
            change = state.parse(found.data) if isinstance(found.data, dict) else None
            return isinstance(change, state.Change) and (
                change.headers.txid == move.change.headers.txid
            )
    return None


def server_now_ms(settings: ClientSettings) -> Operation[int]:
    """What time it is at the server, rounded down to a second: ages never come out too great."""
    answer = yield from exchange(settings, Request("HEAD", "/v1/log"), Kind.READ)
    date = answer.response.headers.get("date")
    if date is None:
        raise ProtocolError("the server does not say what time it is: its answers have no Date")
    try:
        return int(parsedate_to_datetime(date).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise ProtocolError(f"the server's answer has {date!r} as its Date") from None


def instant(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / 1000, UTC)
