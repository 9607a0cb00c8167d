"""What a coordination stream says now: for each entity its newest message and when it was stored.

The stream is read through the log of the server, which gives with each message the producer id,
epoch and number under which it was accepted, and the server's time. A message counts only if it was
accepted under the id of its entity and says itself what the server says: epoch and version, the
version being the number. Entries are ordered by (epoch, version).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import msgspec

from fencepost.client import operations, state
from fencepost.client.effects import Operation
from fencepost.client.errors import (
    ForbiddenError,
    ProducerMovedError,
    ProtocolError,
    SequenceGapError,
    StaleEpochError,
)
from fencepost.client.http import Request
from fencepost.client.operations import Condition, Producing
from fencepost.client.reading import LogReader
from fencepost.client.results import LogEntry
from fencepost.client.retry import Kind, exchange
from fencepost.client.settings import JSON, ClientSettings

NONCE_BYTES = 16
HELD = frozenset(("producer_held", "epoch_guarded"))
"""Codes of refusals: another actor holds the id now, by the rules of the server."""

_ENCODER = msgspec.json.Encoder()


class Entry(msgspec.Struct, frozen=True):
    """The newest message about an entity."""

    change: state.Change
    epoch: int
    version: int
    updated_ms: int = 0
    """When the server stored it; 0 for a message of our own that was not read back yet."""

    @property
    def place(self) -> tuple[int, int]:
        return self.epoch, self.version

    @property
    def value(self) -> dict[str, Any]:
        value: dict[str, Any] = self.change.value
        return value


class Entries:
    """The entities of some types on one stream."""

    def __init__(
        self, settings: ClientSettings, path: str, id_of: Callable[[state.Change], str | None]
    ) -> None:
        self._settings = settings
        self._path = path
        self._id_of = id_of
        self._after = -1
        self._known: dict[tuple[str, str], Entry] = {}
        self.loaded = False
        """Whether the stream was read at all."""

    def get(self, type: str, key: str) -> Entry | None:
        return self._known.get((type, key))

    def of(self, type: str) -> Iterator[Entry]:
        """The entries of a type, in the order in which their entities first came."""
        return (entry for (one, _key), entry in self._known.items() if one == type)

    def refresh(self) -> Operation[None]:
        """Read what the stream has got since the last time."""
        reader = self._reader(live=False)
        while (page := (yield from reader.next())) is not None:
            for entry in page.entries:
                self._take(entry)
        self._advance(reader)
        self.loaded = True

    def next(self) -> Operation[list[Entry]]:
        """What changes next, waiting for it as long as it takes."""
        while True:
            reader = self._reader(live=True)
            page = yield from reader.next()
            self._advance(reader)
            found = [self._take(entry) for entry in page.entries] if page is not None else []
            taken = [entry for entry in found if entry is not None]
            if taken:
                return taken

    def _reader(self, *, live: bool) -> LogReader:
        query = [("stream", self._path), ("pruned", "skip")]
        return LogReader(self._settings, query, after=self._after, until=None, live=live)

    def _advance(self, reader: LogReader) -> None:
        assert reader.after != "now"
        self._after = max(self._after, reader.after)

    def put(self, entry: Entry) -> bool:
        """Take an entry in, unless a newer one is there."""
        name = entry.change.type, entry.change.key
        known = self._known.get(name)
        if known is not None and entry.place < known.place:
            return False
        self._known[name] = entry
        return True

    def _take(self, found: LogEntry) -> Entry | None:
        if found.marker in ("deleted", "expired"):
            self._known.clear()
        if found.marker is not None or found.producer is None:
            return None
        try:
            change = state.parse(found.data)
        except state.StateMessageError:
            return None
        if not isinstance(change, state.Change) or not isinstance(change.value, dict):
            return None
        sent = found.producer
        said = change.value.get("epoch"), change.value.get("version")
        if self._id_of(change) != sent.id or said != (sent.epoch, sent.seq):
            return None
        entry = Entry(change, sent.epoch, sent.seq, found.timestamp_ms)
        return entry if self.put(entry) else None


class Move(msgspec.Struct, frozen=True):
    """A message under the number it is to have. It is sent as it is, however often."""

    producer: Producing
    body: bytes
    change: state.Change

    @property
    def entry(self) -> Entry:
        """What it leaves when it is accepted."""
        return Entry(self.change, self.producer.epoch, self.producer.seq)


def new_move(
    settings: ClientSettings,
    producer: Producing,
    operation: Literal["insert", "update", "delete"],
    type: str,
    key: str,
    value: dict[str, Any],
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
    return Move(producer, b"[%b]" % _ENCODER.encode(change), change)


Verdict = Literal["mine", "taken", "lost"]
"""Of a move: it is the accepted one; another is, and is the newest; or the entity is elsewhere."""


def make(
    settings: ClientSettings,
    path: str,
    move: Move,
    *,
    producer_if: tuple[int, int] | None = None,
    claim_end: Literal["released", "completed"] | None = None,
    reason: str | None = None,
) -> Operation[bool]:
    """Whether `move` is the accepted one under its number: now, or by an earlier transmission."""
    condition = Condition(
        producer=move.producer, producer_if=producer_if, claim_end=claim_end, reason=reason
    )
    return (yield from attempt(settings, path, move, condition)) == "mine"


def attempt(
    settings: ClientSettings, path: str, move: Move, condition: Condition
) -> Operation[Verdict]:
    """Send a move, and say what became of it."""
    try:
        done = yield from operations.append(settings, path, move.body, JSON, condition)
    except (StaleEpochError, SequenceGapError, ProducerMovedError):
        return "lost"
    except ForbiddenError as error:
        if error.code in HELD:
            return "lost"
        raise
    if not done.duplicate or done.matches is True:
        return "mine"
    return "taken" if (done.epoch, done.seq) == (move.producer.epoch, move.producer.seq) else "lost"


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
