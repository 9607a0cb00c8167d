"""Events of the log by name, read while others write."""

from __future__ import annotations

from typing import Any, cast

from fencepost.protocol.limits import Limits
from fencepost.protocol.log_filters import EventFilter
from fencepost.protocol.logs import Selection
from fencepost.store.log_contract import LogChunk, LogQuery
from fencepost.store.read.log import SqlLogs
from fencepost.store.read.scans import Scans
from tests.contract.subject import Subject

JSON = "application/json"


class Late(SqlLogs):
    """Logs that are written to between the look at the head and the read."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(Scans(cast(Any, subject.store).readers, threads=2), Limits())
        self._subject = subject

    async def head(self) -> int:
        head = await super().head()
        await self._subject.appended("s", b'{"name": "Placed"}', content_type=JSON)
        return head


async def test_a_reader_at_the_head_is_told_so_while_the_log_grows(subject: Subject) -> None:
    await subject.create("s", content_type=JSON)
    done = await subject.appended("s", b'{"name": "Placed"}', content_type=JSON)
    events = EventFilter(frozenset(["Placed"]))
    query = LogQuery(Selection([], [], None), done.position, None, 10, 1 << 20, events=events)

    found = await Late(subject).read(query, lambda rows: rows.take)

    chunk, rows = cast("tuple[LogChunk, int | None]", found)
    assert (chunk.next, chunk.at_head, rows) == (done.position, True, None)
