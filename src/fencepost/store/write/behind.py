"""What the log says of streams and producers, and their own rows do not say yet.

A row of the log names its stream and its producer, and says where both stand after it. So a commit
need not write the same into the rows of the stream and of the producer: these are written behind
the commits, when so many rows of the log have come, and once for all of them. In the database
`behind.written_to` is the position from which on that may be outstanding. The view
`streams_now` lays the rows of the log from there on over the streams, and `batches_behind` has them
for the producers, for all who read those tables; the ledger's loader asks the object here, which
knows the same in memory.

Rows are written a generation at a time, and a generation a piece at a time, in the order of the
tables: a piece goes into the transaction of each group, so that no group waits for long. A value is
looked up when its piece is written, so that a row gets the newest one. Only a tail that moved and a
producer's next batch may wait. Whatever else changes writes the whole row at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

from fencepost.protocol.streams import Producer
from fencepost.store.sql import Connection, Row

Place = tuple[int, str]

PIECE_ROWS_MIN = 64
PIECE_ROWS_EACH = 2
"""A piece has so many rows, and so many more for each row that its group adds to the log: a
generation is written before the next one is complete."""
_ID = 3
"""Where the stream is in a row of `move_tail`."""


class Whole(Protocol):
    """A slice of a large commit, as far as it writes rows of streams and producers."""

    @property
    def updates(self) -> list[Row]: ...
    @property
    def producers(self) -> list[Row]: ...


class Group(Protocol):
    """A sealed group, as far as it says where streams and producers stand."""

    @property
    def rows(self) -> Sequence[Row]: ...
    @property
    def moves(self) -> Sequence[Row]: ...
    @property
    def producers(self) -> dict[Place, Producer]: ...
    @property
    def whole(self) -> Collection[int]: ...
    @property
    def opened(self) -> Collection[Place]: ...
    @property
    def carried(self) -> Sequence[Whole]: ...
    @property
    def statements(self) -> Sequence[tuple[str, tuple[Any, ...]]]: ...
    @property
    def counters(self) -> Row: ...


class Piece(NamedTuple):
    """What one transaction writes of what is behind, and how far everything is written then."""

    tails: Sequence[Row]
    producers: Sequence[tuple[Place, Producer]]
    written_to: int


class Behind:
    """Tails and newest batches that are only in the log. Changed on the event loop, and by the
    writer thread while no group is under way."""

    def __init__(self, rows_max: int) -> None:
        """Begin to write when `rows_max` rows have been added to the log."""
        self.tails: dict[int, Row] = {}
        self.producers: dict[Place, Producer] = {}
        self.written_to = 0
        self._rows_max = rows_max
        self._rows = 0
        # The generation that is being written, as far as it is left, and where it ends:
        self._streams_left: list[int] = []
        self._producers_left: list[Place] = []
        self._left_to = 0
        self._piece: Piece | None = None
        self._taken = (0, 0)

    def __bool__(self) -> bool:
        return bool(self.tails or self.producers)

    def load(self, connection: Connection) -> None:
        """Learn from the database what is behind, and forget what was known."""
        [(self.written_to, next_position)] = connection.fetch("load_written_to")
        self._drop(
            {row[_ID]: row for row in connection.fetch("tails_behind")},
            {(row[0], row[1]): _producer(*row) for row in connection.fetch("producers_behind")},
        )
        # They may be as many as a whole generation, so they are one.
        self._begin(next_position)

    def _drop(self, tails: dict[int, Row], producers: dict[Place, Producer]) -> None:
        # Others may hold the dictionaries that were there, and go on with those.
        self.tails, self.producers = tails, producers
        self._rows = 0
        self._streams_left, self._producers_left = [], []
        self._piece, self._taken = None, (0, 0)

    # In the transaction of a group

    def piece(self, group: Group) -> Piece:
        """Take the piece that the transaction of a group writes, before its own rows."""
        left = len(self._streams_left) + len(self._producers_left)
        if left:
            size = PIECE_ROWS_MIN + PIECE_ROWS_EACH * len(group.rows)
            streams = self._streams_left[:size]
            producers = self._producers_left[: size - len(streams)]
            self._taken = len(streams), len(producers)
            self._piece = Piece(
                # What was written whole since is not here any more.
                [self.tails[one] for one in streams if one in self.tails],
                [(one, self.producers[one]) for one in producers if one in self.producers],
                self._left_to if size >= left else self.written_to,
            )
        else:
            # Without anything behind, what the group writes itself is all there is.
            is_all = not (self or group.moves or len(group.producers) > len(group.opened))
            written_to: int = group.counters[0] if is_all else self.written_to
            self._piece = Piece((), (), written_to)
        return self._piece

    def committed(self, group: Group) -> None:
        """A group is on disk, with the piece that it was given."""
        if self._piece is not None:
            self._written(self._piece)
        for stream_id in group.whole:
            self.tails.pop(stream_id, None)
        for row in group.moves:
            self.tails[row[_ID]] = row
        if group.producers:
            self.producers.update(group.producers)
            for place in group.opened:
                self.producers.pop(place, None)
        if group.carried or group.statements:
            self._leave(group)
        self._rows += len(group.rows)
        if self._rows >= self._rows_max and not (self._streams_left or self._producers_left):
            self._begin(group.counters[0])

    def _begin(self, next_position: int) -> None:
        """Let everything that is behind be a generation, to be written from the next group on."""
        self._streams_left = sorted(self.tails)
        self._producers_left = sorted(self.producers)
        self._left_to = next_position
        self._rows = 0

    def _written(self, piece: Piece) -> None:
        streams, producers = self._taken
        del self._streams_left[:streams]
        del self._producers_left[:producers]
        for row in piece.tails:
            if self.tails.get(row[_ID]) is row:
                del self.tails[row[_ID]]
        for place, producer in piece.producers:
            if self.producers.get(place) is producer:
                del self.producers[place]
        self.written_to = piece.written_to
        self._piece, self._taken = None, (0, 0)

    def _leave(self, group: Group) -> None:
        """Leave alone what slices of a large commit wrote whole, and producers that are gone."""
        for carried in group.carried:
            for row in carried.updates:
                self.tails.pop(row[-1], None)
            for row in carried.producers:
                self.producers.pop((row[0], row[1]), None)
        for name, values in group.statements:
            if name == "forget_producer":
                self.producers.pop((values[0], values[1]), None)

    # All at once, while no group is under way

    def everything(self) -> Piece:
        """All that is behind, in the order of the tables."""
        return Piece(
            [self.tails[one] for one in sorted(self.tails)],
            [(one, self.producers[one]) for one in sorted(self.producers)],
            self.written_to,
        )

    def everything_written(self, written_to: int) -> None:
        """All of it is on disk, and nothing has come since."""
        self.written_to = written_to
        self._drop({}, {})


def _producer(
    _stream: int,
    producer_id: str,
    epoch: int,
    seq: int,
    first: bytes,
    position: int,
    updated_ms: int,
    principal: str,
    claim: int,
) -> Producer:
    """A producer as far as its row goes: its recent batches are in the log."""
    return Producer(producer_id, epoch, seq, first, b"", position, updated_ms, principal, claim)
