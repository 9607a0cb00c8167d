"""The audit stream: who took over which claim, who overrode what, and who was refused it.

An event joins the commit that it is about, so there is no raise without its event and no event
without its raise. Refusals are kept as well, but only so many a second for each principal: what is
beyond is counted, and the number comes with the next one, so that refused requests
cannot fill the disk. The stream is an ordinary JSON stream that administrators read; its path is
reserved, so no request can write to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from fencepost.protocol.appends import Append, Conditions
from fencepost.protocol.batches import Malformed, json_batch
from fencepost.protocol.claims import AuditEvent
from fencepost.protocol.creates import Create, Created, Exists
from fencepost.protocol.grants import AUDIT
from fencepost.protocol.rates import Bucket, Rate, Wait, take
from fencepost.protocol.streams import JSON
from fencepost.server.auth import AuthConfigError
from fencepost.server.handlers.fields import rfc3339
from fencepost.store.contract import Store

PRINCIPALS_MAX = 1024
"""Principals whose refusals are counted; a JWT issuer may make up any number of them."""

_IF_MISSING = Conditions(create_as=JSON)


class Audit:
    """Writes events into the open commit. The store is given `note`, then `open` the store."""

    def __init__(self, *, refusals_per_s: float) -> None:
        self._join: Callable[[Append], object]
        self._rate = Rate(refusals_per_s, max(1.0, 2 * refusals_per_s)) if refusals_per_s else None
        self._buckets: dict[str, Bucket] = {}
        self._suppressed: dict[str, int] = {}
        self.events = self.suppressed = 0

    async def open(self, store: Store, join: Callable[[Append], object]) -> None:
        """Create the stream unless it exists; `join` adds an append to the open commit."""
        self._join = join
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        store.create(Create(AUDIT, content_type=JSON), done.set_result)
        outcome = await done
        if not isinstance(outcome, Created | Exists) or outcome.closed:
            raise AuthConfigError(
                f"the stream {AUDIT} cannot be the audit stream ({outcome}): it has to be an open"
                " JSON stream: delete or rename what is there"
            )

    def note(self, event: AuditEvent) -> None:
        """Put an event into the commit that is open now."""
        if event.kind == "refused" and not self._is_kept(event):
            self.suppressed += 1
            self._suppressed[event.principal] = self._suppressed.get(event.principal, 0) + 1
            return
        shown: dict[str, object] = {
            "type": event.kind,
            "at": rfc3339(event.at_ms),
            "principal": event.principal,
            "stream": event.stream,
            "producer": event.producer,
            "old_epoch": event.old_epoch,
            "new_epoch": event.new_epoch,
            "holder": event.holder,
            "reason": event.reason,
        }
        if event.code is not None:
            shown["code"] = event.code
        if event.targets is not None:
            shown = {name: shown[name] for name in ("type", "at", "principal", "stream", "reason")}
            shown["targets"] = event.targets
        suppressed = self._suppressed.pop(event.principal, 0)
        if suppressed:
            shown["refusals_left_out"] = suppressed
        batch = json_batch(msgspec.json.encode(shown))
        assert batch is not None
        assert not isinstance(batch, Malformed)
        self.events += 1
        self._join(Append(AUDIT, batch, JSON, conditions=_IF_MISSING))

    def _is_kept(self, event: AuditEvent) -> bool:
        if self._rate is None:
            return False
        taken = take(self._buckets.get(event.principal), self._rate, event.at_ms)
        if isinstance(taken, Wait):
            return False
        if len(self._buckets) >= PRINCIPALS_MAX:
            self._buckets.clear()
            self._suppressed.clear()
        self._buckets[event.principal] = taken
        return True
