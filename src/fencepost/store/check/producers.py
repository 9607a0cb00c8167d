"""The pass over producers: each one's batches in the log, in order, against its row.

Two sorted walks go side by side, so that memory does not grow with the number of producers: there
may be one for every task that was ever claimed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from fencepost.protocol.offsets import Offset
from fencepost.protocol.streams import PACKED_BYTES, RECENT_BATCHES, pack
from fencepost.store.check.report import Report, StreamState
from fencepost.store.database import Row


class Link(NamedTuple):
    """A batch in a producer's chain."""

    position: int
    epoch: int
    seq: int
    previous: int | None
    start: Offset
    digest: bytes
    at_ms: int


class Head(NamedTuple):
    """A row of the producers' table."""

    stream: int
    id: str
    epoch: int
    seq: int
    first: bytes
    position: int
    updated_ms: int
    recent: bytes | None = None  # its newest batches, in a store that keeps them in the row


Place = tuple[int, str]


class ProducerCheck:
    """Chains of batches against the state that they led to."""

    def __init__(
        self,
        report: Report,
        streams: dict[int, StreamState],
        purged: dict[int, int],
        forgotten_after_ms: int | None,
    ) -> None:
        self._report = report
        self._streams = streams
        self._purged = purged
        # The shortest time after which an idle producer was ever forgotten; None when none was.
        self._forgotten_after_ms = forgotten_after_ms

    def run(self, rows: Iterable[Row], heads: Iterable[Row]) -> None:
        """Both walks are sorted by stream and id."""
        chains = groupby(rows, key=lambda row: (row[0], row[1]))
        waiting: Iterator[Head] = (Head(*row) for row in heads)
        head = next(waiting, None)
        for place, chain in chains:
            while head is not None and (head.stream, head.id) < place:
                self._without_rows(head)
                head = next(waiting, None)
            mine = head if head is not None and (head.stream, head.id) == place else None
            self._chain(place, (_link(row) for row in chain), mine)
            if mine is not None:
                head = next(waiting, None)
        while head is not None:
            self._without_rows(head)
            head = next(waiting, None)

    def _without_rows(self, head: Head) -> None:
        self._report.counts["producers"] += 1
        where = f"producer {head.id} of stream {head.stream}"
        if head.stream not in self._streams:
            self._report.add("producer_without_stream", where, "its stream does not exist")
        elif head.position > self._purged.get(head.stream, -1):
            self._report.add(
                "producer_without_batch",
                where,
                f"its newest batch should be at position {head.position}",
            )
        self._first(where, head, None)
        self._recent(where, head, ())

    def _chain(self, place: Place, chain: Iterable[Link], head: Head | None) -> None:
        stream_id, producer_id = place
        where = f"producer {producer_id} of stream {stream_id}"
        before: Link | None = None
        opening: Link | None = None
        newest: deque[Link] = deque(maxlen=RECENT_BATCHES)
        for link in chain:
            if link.seq == 0:
                self._opens(where, before, link)
                opening = link
                newest.clear()
            else:
                self._goes_on(where, stream_id, before, link)
                if before is None or before.epoch != link.epoch:
                    opening = None
                    newest.clear()
            newest.append(link)
            before = link
        assert before is not None
        if head is None:
            # The state goes with the stream; markers of a purged one may still name it.
            if stream_id in self._streams and self._forgotten_after_ms is None:
                self._report.add(
                    "producer_missing", where, f"it sent the batch at {before.position}"
                )
            return
        self._report.counts["producers"] += 1
        if stream_id not in self._streams:
            self._report.add("producer_without_stream", where, "its stream does not exist")
        if (head.epoch, head.seq, head.position) != (before.epoch, before.seq, before.position):
            self._report.add(
                "producer_wrong",
                where,
                f"its row says {head.epoch}.{head.seq} at {head.position}, the log"
                f" {before.epoch}.{before.seq} at {before.position}",
            )
        self._first(where, head, opening)
        self._recent(where, head, newest)

    def _opens(self, where: str, before: Link | None, link: Link) -> None:
        if link.previous is not None:
            self._report.add("previous_wrong", where, f"{link.position} opens an epoch")
        if before is None or link.epoch > before.epoch or self._was_forgotten(before, link):
            return
        code = "producer_repeats" if link.epoch == before.epoch else "epoch_backwards"
        self._report.add(
            code,
            where,
            f"{link.epoch}.0 at position {link.position} after"
            f" {before.epoch}.{before.seq} at {before.position}",
        )

    def _goes_on(self, where: str, stream_id: int, before: Link | None, link: Link) -> None:
        add = self._report.add
        at = f"{link.epoch}.{link.seq} at position {link.position}"
        if before is None:
            purged = self._purged.get(stream_id, -1)
            if link.previous is None or link.previous > purged:
                add("producer_gap", where, f"{at} without the batches before it")
            return
        after = f"{at} after {before.epoch}.{before.seq} at {before.position}"
        if link.epoch < before.epoch:
            add("epoch_backwards", where, after)
        elif link.epoch == before.epoch and link.seq <= before.seq:
            add("producer_repeats", where, after)
        elif link.epoch != before.epoch or link.seq != before.seq + 1:
            add("producer_gap", where, after)
        elif link.previous != before.position:
            add("previous_wrong", where, f"{after}, and it names {link.previous}")

    def _was_forgotten(self, before: Link, link: Link) -> bool:
        after_ms = self._forgotten_after_ms
        return after_ms is not None and link.at_ms - before.at_ms >= after_ms

    def _first(self, where: str, head: Head, opening: Link | None) -> None:
        if len(head.first) != PACKED_BYTES:
            self._report.add("producer_first_wrong", where, "what is kept of seq 0 is not readable")
        elif opening is not None and head.first != pack(opening.start, opening.digest):
            self._report.add(
                "producer_first_wrong",
                where,
                f"what is kept of seq 0 is not the batch at position {opening.position}",
            )

    def _recent(self, where: str, head: Head, newest: Iterable[Link]) -> None:
        """What a repeated request is compared with; of what was purged there is nothing else."""
        kept = head.recent
        if kept is None:
            return
        found = b"".join(pack(link.start, link.digest) for link in newest)
        shared = min(len(kept), len(found))
        if not kept or len(kept) % PACKED_BYTES:
            self._report.add("producer_recent_wrong", where, f"{len(kept)} bytes of batches")
        elif kept[len(kept) - shared :] != found[len(found) - shared :]:
            self._report.add("producer_recent_wrong", where, "not the batches that the log has")


def _link(row: Row) -> Link:
    position, epoch, seq, previous, version, start_bytes, digest, at_ms = row[2:]
    return Link(position, epoch, seq, previous, Offset(version, start_bytes), digest, at_ms)
