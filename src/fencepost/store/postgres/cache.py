"""The cache of a node: its ledger, kept correct while other nodes write to the same database.

A turn begins with the locked row of counters, which shows whether another node has had a turn since
this node's last one. If not, the ledger is still correct. If so, the rows in `turns` say which
streams those turns changed, and the log says which producers wrote; these are dropped from the
ledger, and the rest of it stays. All of this is read under the lock of the turn, so nothing can be
written in between. A turn that changed something that its row does not list says so. If there is
one of these, or a turn is missing, or there are too many, the whole ledger is dropped.

What the requests of a turn name is then loaded in bulk, before any of them is decided: single
queries would be as many round trips while all other nodes wait. What was looked for and does not
exist is remembered as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from fencepost.protocol.appends import KeyRecord
from fencepost.protocol.commits import Part
from fencepost.protocol.leases import LeaseRef
from fencepost.protocol.meshes import bodies_path, destination_path, inbox_path
from fencepost.protocol.streams import Producer
from fencepost.store import records
from fencepost.store.group_contract import GroupRequest
from fencepost.store.mesh_contract import SendRequest
from fencepost.store.postgres.books import TurnBooksRows
from fencepost.store.postgres.driver.pipeline import WritingConnection
from fencepost.store.postgres.driver.statements import Query
from fencepost.store.postgres.groups import Plan, TurnGroupRows
from fencepost.store.postgres.requests import Needs
from fencepost.store.sql import Connection, Row
from fencepost.store.write.books import BooksRows
from fencepost.store.write.claims import Claims
from fencepost.store.write.groups import GroupRows
from fencepost.store.write.keys import KeyPlace
from fencepost.store.write.ledger import Ledger
from fencepost.store.write.ledger_group import Entry, LedgerGroup
from fencepost.store.write.loader import DiskLoader
from fencepost.store.write.staging import ChunkRow, StagedPart

ALONE_TURNS = 100
"""After so many turns in a row without another node's in between, a node no longer asks for the
changes of other nodes when it begins a turn."""
QUICK_AFTER_TURNS = 10
"""After so many turns in a row without another node's in between, a node decides before it begins a
turn; after `ALONE_TURNS` when that was too early the last time."""
FORESEEN_MS_MAX = 2_000
"""For so long the time is known without asking the database: clocks that are kept right differ by a
millisecond after that."""
TURNS_MAX = 64
"""Turns of other nodes whose changes are followed; after more of them the ledger is dropped."""
PRODUCERS_MAX = 4_000
"""Producers that may have written in them."""
STREAMS_MAX = 256
"""Changed streams that are fetched at once; the others are loaded when they are needed."""

_NOT_IN_A_LEDGER = frozenset(
    {
        # A ledger forgets staged parts, writers and whole commits whenever another node wrote.
        *("save_part", "save_chunk", "commit_part", "drop_part", "drop_chunks"),
        *("save_writer", "forget_writer"),
        *("save_writer_batch", "trim_writer_history", "drop_writer_history"),
        # The books of a stream, which is listed: its row is fetched anew.
        "save_books",
        # No ledger has any of these.
        *("stir", "take_lead", "leave_lead", "save_secret", "save_followed", "save_bucket"),
        *("insert_subscription", "save_wake", "delete_subscription"),
        *("delete_links", "save_link", "delete_link"),
        *("begin_partial", "end_partial", "delete_some_links"),
    }
)
"""Statements, beside the rows of streams, producers, keys and the log, that leave the ledgers of
other nodes correct."""


# What other nodes changed


class Seen(NamedTuple):
    """How far a ledger is correct: the last turn of its node, and the first position after it."""

    turn: int
    position: int


class Changes(NamedTuple):
    """What other nodes wrote after a turn: their turns, and the producers that they changed."""

    turns: Sequence[Row]
    """Number, whether it lists all that it changed, and the streams that it changed."""
    producers: Sequence[Row]
    """Stream and id of each that wrote."""
    streams: Sequence[Row]
    """Some of the changed streams, as they are now."""

    def list_all(self, seen: Seen, turn: int) -> bool:
        """Whether these are all changes after what was seen, up to a turn."""
        numbers = [number for number, _, _ in self.turns]
        return (
            numbers == list(range(seen.turn + 1, turn + 1))
            and all(is_listed for _, is_listed, _ in self.turns)
            and len(self.producers) < PRODUCERS_MAX
        )

    def changed_streams(self) -> set[int]:
        """The streams that changed."""
        return {stream for _, _, streams in self.turns for stream in streams}


def changes_after(seen: Seen) -> list[Query]:
    """The queries for the fields of `Changes`, in their order."""
    return [
        ("others_turns", (seen.turn, TURNS_MAX + 1)),
        ("others_producers", (seen.position, PRODUCERS_MAX)),
        ("others_streams", (seen.turn, TURNS_MAX, STREAMS_MAX)),
    ]


def lists_all_changes(group: LedgerGroup) -> bool:
    """Whether a turn changed its streams, and the producers in its rows of the log, and no more."""
    if group.carried:
        return False
    if not _NOT_IN_A_LEDGER.issuperset([name for name, _ in group.statements]):
        return False
    return group.producers.keys() <= {(row[1], row[8]) for row in group.rows}


# What was loaded in bulk


class BulkLoader(DiskLoader):
    """Finds what a turn or a slice has loaded in bulk, and asks the database for anything else."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.turn_groups = TurnGroupRows(connection)
        self._turn_books = TurnBooksRows(connection)
        self.absent: set[str] = set()
        """Paths that were looked for, and that no stream had."""
        self._keys: dict[KeyPlace, tuple[KeyRecord, bytes] | None] = {}
        self._sends: dict[KeyPlace, Row | None] = {}
        self._parts: dict[Part, StagedPart | None] = {}
        self._chunks: dict[Part, dict[int, ChunkRow]] = {}
        self._digests: dict[tuple[Part, int], bytes | None] = {}

    async def load(
        self, connection: WritingConnection, ledger: Ledger, needs: Needs, *, locking: bool = False
    ) -> None:
        """Load all that is needed, into `ledger` or beside it; lock it outside of a turn."""
        if not ledger.has_all(needs.paths, needs.producers):
            await self._load_streams(connection, ledger, needs.paths, locking=locking)
            await self._load_producers(connection, ledger, needs.producers)
        if needs.keys:
            await self._load_keys(connection, ledger, needs.keys)
        if needs.parts or needs.chunks:
            await self._load_parts(connection, needs, locking=locking)
        if needs.books:
            await self._turn_books.load(connection, ledger, needs.books)

    async def _load_streams(
        self,
        connection: WritingConnection,
        ledger: Ledger,
        named: Collection[str],
        *,
        locking: bool,
    ) -> None:
        absent = self.absent
        paths = [path for path in named if path not in absent and ledger.cached(path) is None]
        if paths:
            absent.update(paths)
            query = "lock_streams" if locking else "find_streams"
            for row in await connection.fetch(query, (paths,)):
                absent.discard(ledger.take_in(row).stream.path)

    async def _load_producers(
        self, connection: WritingConnection, ledger: Ledger, named: Collection[tuple[str, str]]
    ) -> None:
        missing: list[tuple[Entry, str]] = []
        for path, producer_id in named:
            entry = ledger.cached(path)
            if entry is not None and producer_id not in entry.producers:
                missing.append((entry, producer_id))
        if not missing:
            return
        columns = _columns([(entry.stream.id, producer_id) for entry, producer_id in missing])
        rows = await connection.fetch("find_producers", columns)
        found = {(row[0], row[1]): _producer(row[1], row[2:]) for row in rows}
        for entry, producer_id in missing:
            producer = found.get((entry.stream.id, producer_id))
            ledger.take_producer(entry, producer_id, producer)

    async def _load_keys(
        self, connection: WritingConnection, ledger: Ledger, named: Collection[tuple[str, str, str]]
    ) -> None:
        self.assume_new(ledger, named)
        if self._keys:
            for row in await connection.fetch("find_keys", _columns(self._keys)):
                self._keys[row[0], row[1], row[2]] = records.key_from_row(tuple(row[3:]))

    def assume_new(self, ledger: Ledger, named: Collection[tuple[str, str, str]]) -> None:
        """Let keys of streams be new: the row of one that is not will be refused."""
        for path, principal, key in named:
            entry = ledger.cached(path)
            if entry is not None:
                self._keys[entry.stream.id, principal, key] = None

    def saves_keys(self, group: LedgerGroup) -> bool:
        """Whether a group has rows of all the keys that were assumed to be new."""
        return group.keys.keys() >= self._keys.keys()

    async def load_sends(
        self, connection: WritingConnection, ledger: Ledger, requests: Sequence[SendRequest]
    ) -> None:
        """Load what sends are decided on: meshes, members of topics, dedupe rows, streams."""
        meshes = ledger.meshes
        names = meshes.unknown_meshes({request.mesh for request in requests})
        if names:
            meshes.take_meshes(names, await connection.fetch("find_meshes", (names,)))
        known = [(mesh, r.send) for r in requests if (mesh := meshes.find(r.mesh)) is not None]
        if not known:
            return
        topics = {(mesh.id, send.ref) for mesh, send in known if send.kind == "topic"}
        unknown = meshes.unknown_topics(topics)
        if unknown:
            rows = await connection.fetch("find_topic_members", _columns(unknown))
            meshes.take_topics(unknown, rows)
        places = [(mesh.id, send.sender, send.client_message_id) for mesh, send in known]
        self._sends = dict.fromkeys(places)
        for row in await connection.fetch("find_sends", _columns(places)):
            self._sends[row[0], row[1], row[2]] = tuple(row[3:])
        paths = {destination_path(mesh.name, send.kind, send.ref) for mesh, send in known}
        for mesh, send in known:
            # A repeated send is delivered to no inbox again.
            place = (mesh.id, send.sender, send.client_message_id)
            if send.kind == "topic" and self._sends[place] is None:
                members = meshes.members((mesh.id, send.ref))
                paths.update(inbox_path(mesh.name, member) for member in members)
            if send.body.parts:
                paths.add(bodies_path(mesh.name, send.kind, send.ref))
        await self.load(connection, ledger, Needs(paths))

    async def _load_parts(
        self, connection: WritingConnection, needs: Needs, *, locking: bool
    ) -> None:
        parts = list({*needs.parts, *(part for part, _ in needs.chunks)})
        self._parts = dict.fromkeys(parts)
        query = "lock_parts" if locking else "find_parts"
        for txn, name, media_type, committed in await connection.fetch(query, _columns(parts)):
            self._parts[Part(txn, name)] = StagedPart(media_type, committed)
        if needs.parts:
            whole = list(needs.parts)
            self._chunks = {part: {} for part in whole}
            for txn, name, *row in await connection.fetch("chunks_of_parts", _columns(whole)):
                self._chunks[Part(txn, name)][row[1]] = ChunkRow(*row)
        if needs.chunks:
            self._digests = dict.fromkeys(needs.chunks)
            columns = _columns([(*part, ordinal) for part, ordinal in needs.chunks])
            for txn, name, ordinal, digest in await connection.fetch("find_chunks", columns):
                self._digests[Part(txn, name), ordinal] = digest

    @property
    def groups(self) -> GroupRows:
        return self.turn_groups

    @property
    def books(self) -> BooksRows:
        return self._turn_books

    def forget(self) -> None:
        """Forget what there may be any number of, and most of which is used once."""
        if self.turn_groups.loaded_groups:
            self.turn_groups.forget()
        if self._turn_books.loaded:
            self._turn_books.forget()
        self._keys.clear()
        self._sends.clear()
        self._parts.clear()
        self._chunks.clear()
        self._digests.clear()

    # As the ledger asks

    def stream(self, path: str) -> Row | None:
        return None if path in self.absent else super().stream(path)

    def producer(self, stream_id: int, producer_id: str) -> Producer | None:
        rows = self.connection.fetch("find_producer", (stream_id, producer_id))
        return _producer(producer_id, rows[0]) if rows else None

    def key(self, place: KeyPlace) -> tuple[KeyRecord, bytes] | None:
        return self._keys[place] if place in self._keys else super().key(place)

    def send(self, place: KeyPlace) -> Row | None:
        return self._sends[place] if place in self._sends else super().send(place)

    def part(self, part: Part) -> StagedPart | None:
        return self._parts[part] if part in self._parts else super().part(part)

    def parts(self, parts: Collection[Part]) -> dict[Part, StagedPart]:
        found = {part: self.part(part) for part in parts}
        return {part: staged for part, staged in found.items() if staged is not None}

    def digests(self, chunks: Collection[tuple[Part, int]]) -> dict[tuple[Part, int], bytes]:
        found = {place: self.digest(*place) for place in chunks}
        return {place: digest for place, digest in found.items() if digest is not None}

    def chunks(self, part: Part) -> dict[int, ChunkRow]:
        return self._chunks[part] if part in self._chunks else super().chunks(part)

    def digest(self, part: Part, ordinal: int) -> bytes | None:
        place = (part, ordinal)
        return self._digests[place] if place in self._digests else super().digest(part, ordinal)


def _columns(rows: Iterable[Sequence[Any]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _producer(producer_id: str, row: Row) -> Producer:
    epoch, seq, first, position, updated_ms, principal, claim, recent = row
    return Producer(producer_id, epoch, seq, first, recent, position, updated_ms, principal, claim)


class Cache:
    """Begins the turns of one node, and makes its ledger ready for each."""

    def __init__(
        self,
        ledger: Ledger,
        loader: BulkLoader,
        claims: Claims,
        *,
        streams_max: int,
        clock_ns: Callable[[], int],
    ) -> None:
        self._ledger = ledger
        self._loader = loader
        self._claims = claims
        self._streams_max = streams_max
        self._asks = 0  # turns that still begin with asking for the changes of other nodes
        self._alone_turns = 0
        self._clock_ns = clock_ns
        self._counters: Row = ()
        self._heard_ns = 0  # when the database said the time that is in these counters
        self._changes: Changes | None = None
        self._ahead: tuple[Plan, list[list[Row]]] | None = None
        """Rows of groups that were loaded when the turn began."""
        self.last_turn = -1
        """The turn up to which the ledger is correct; -1 when it is to be dropped."""

    async def begin(
        self,
        connection: WritingConnection,
        requests: Sequence[GroupRequest] = (),
        leases: Collection[LeaseRef] = (),
    ) -> Row:
        """Wait for the turn; the counters. Rows for requests that wait for it come along."""
        self._changes = self._ahead = None
        asks = self._asks > 0 and self.last_turn != -1
        queries = changes_after(self._seen()) if asks else []
        plan = None
        if requests or leases:
            plan = self._loader.turn_groups.plan(requests, leases)
            queries += plan.queries()
        if queries:
            counters, found = await connection.begin_and_fetch(queries)
        else:
            counters, found = await connection.begin(), []
        self._counters, self._heard_ns = counters, self._clock_ns()
        if asks:
            count = len(Changes._fields)
            self._changes, found = Changes(*found[:count]), found[count:]
        if plan is not None:
            self._ahead = plan, found
        return counters

    def foreseen(self, seen: int) -> Row | None:
        """The counters that the next turn begins with, if no other node has one before.

        None when that is to be expected; `seen` is the newest turn that was heard of. The time is
        the database's, or earlier by as much as its answer was on its way.
        """
        if not 0 <= seen <= self.last_turn or self._alone_turns < QUICK_AFTER_TURNS:
            return None
        passed_ms = (self._clock_ns() - self._heard_ns) // 1_000_000
        *numbers, now_ms, leader, large = self._counters
        if passed_ms > FORESEEN_MS_MAX or large is not None:
            return None
        return (*numbers, now_ms + passed_ms, leader, None)

    def taken(self, turn: int, group: LedgerGroup, now_ms: int | None = None) -> None:
        """A turn of this node is over; the database said just now what time it is, or earlier."""
        self._loader.forget()
        self.last_turn = turn
        absent = self._loader.absent
        if len(absent) > self._streams_max:
            # Clients may ask for any number of streams that do not exist.
            absent.clear()
        if not group.counters:
            return  # nothing was written
        if group.created:
            absent.difference_update(group.entries[made].stream.path for made in group.created)
        *_, next_chunk, then_ms, leader, large = self._counters
        if now_ms is None:
            now_ms = then_ms
        else:
            self._heard_ns = self._clock_ns()
        self._counters = (turn, *group.counters, next_chunk, now_ms, leader, large)

    def overtaken(self) -> None:
        """Another node had a turn before a quick one."""
        self._alone_turns = QUICK_AFTER_TURNS - ALONE_TURNS

    def undone(self) -> None:
        """What was decided before its turn came to nothing."""
        self._loader.forget()

    def lost(self) -> None:
        """It is not known what the database holds: the ledger is dropped before the next turn."""
        self._loader.forget()
        self.last_turn = -1

    async def prepare_quick(self, connection: WritingConnection, needs: Needs) -> None:
        """Make the ledger ready to decide a request before the turn. Its keys are taken for new."""
        self._alone_turns += 1
        await self._loader.load(connection, self._ledger, needs._replace(keys=()))
        self._loader.assume_new(self._ledger, needs.keys)

    def saves_keys(self, group: LedgerGroup) -> bool:
        """Whether a group will be refused if one of the keys that were taken for new is not."""
        return self._loader.saves_keys(group)

    async def prepare(self, connection: WritingConnection, counters: Row, needs: Needs) -> bool:
        """Make the ledger ready to decide requests with these needs; whether it was dropped."""
        dropped = False
        if counters[0] != self.last_turn:
            self._alone_turns = min(self._alone_turns, 0)
            dropped = await self._refresh(connection, counters)
        else:
            self._alone_turns += 1
            if self._asks:
                self._asks -= 1
        await self._loader.load(connection, self._ledger, needs)
        return dropped

    async def load_groups(
        self,
        connection: WritingConnection,
        requests: Sequence[GroupRequest],
        leases: Collection[LeaseRef],
    ) -> None:
        """Have the rows of groups that some requests name or may claim, and those of leases."""
        groups = self._loader.turn_groups
        plan = groups.plan(requests, leases)
        if self._ahead is not None and self._ahead[0].covers(plan):
            groups.take(*self._ahead)
        else:
            await groups.load(connection, plan)

    async def load_sends(
        self, connection: WritingConnection, requests: Sequence[SendRequest]
    ) -> None:
        """Load what some sends are decided on."""
        await self._loader.load_sends(connection, self._ledger, requests)

    async def _refresh(self, connection: WritingConnection, counters: Row) -> bool:
        """Make the ledger correct after another node has written; whether all of it was dropped."""
        turn, next_position, next_stream, last_ms, *_ = counters
        changes, self._changes, self._asks = self._changes, None, ALONE_TURNS
        now = (next_position, next_stream, last_ms)
        self._claims.reset()
        self._loader.absent.clear()
        self._loader.forget()
        if self.last_turn == -1:
            self._ledger.reset(now)
            return False
        seen = self._seen()
        if changes is None:
            changes = Changes(*await connection.fetch_all(changes_after(seen)))
        if not changes.list_all(seen, turn):
            self._ledger.reset(now)
            return True
        self._ledger.refresh(
            now,
            changed=changes.changed_streams(),
            rows=changes.streams,
            producers=set(changes.producers),
        )
        return False

    def _seen(self) -> Seen:
        return Seen(self.last_turn, self._ledger.next_position)
