"""How fast each principal appends, how many claims it has open, and what is audited.

Rates live in memory and begin anew with the process. Open claims are counted from disk when the
store opens or a commit failed, and from then on by what is decided. Without authorization nothing
here is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fencepost.protocol.appends import Append, Appended, AppendOutcome
from fencepost.protocol.claims import (
    Actor,
    AuditEvent,
    EpochGuarded,
    NotHolder,
    Standings,
    audit,
    decide_standings,
    is_same_hold,
)
from fencepost.protocol.rates import NEW, TooFast, decide_append_pace, ended
from fencepost.protocol.streams import CLAIMED, Producer
from fencepost.store.sql import Connection
from fencepost.store.write.ledger_group import Entry

STANDINGS_MAX = 4096
"""Principals that are kept in mind although they have no open claims."""


class Claims:
    """The standings of all principals, as after all decisions made so far."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.noted: Standings = {}
        """What is in memory of the standings, without a look at the disk."""
        self.auditor: Callable[[AuditEvent], None] | None = None
        """Called with what the audit stream should hold, while the group in question is open."""
        self.refused = 0
        """Appends refused for being too fast, for the metrics."""
        self._known = False
        self._held: list[AuditEvent] | None = None

    def reset(self) -> None:
        """Forget how many claims are open; rates go on."""
        self._known = False
        self._held = None

    def undo(self, kept: Standings) -> None:
        """Let principals stand as in an earlier copy of what was noted."""
        self.noted = kept
        self.reset()

    def hold_events(self) -> None:
        """Keep what is to be audited until `tell_held`: it is not certain that it is decided."""
        self._held = []

    def tell_held(self) -> None:
        """Audit what was held."""
        held, self._held = self._held, None
        for event in held or ():
            self._tell(event)

    def _tell(self, event: AuditEvent) -> None:
        if self._held is not None:
            self._held.append(event)
        elif self.auditor is not None:
            self.auditor(event)

    @property
    def standings(self) -> Standings:
        """Where every principal stands; open claims are counted on disk when that is not known."""
        if not self._known:
            self._count()
        return self.noted

    def _count(self) -> None:
        self._known = True
        counts = {str(name): int(count) for name, count in self._connection.fetch("open_claims")}
        for name in {*self.noted, *counts}:
            standing = self.noted.get(name, NEW)
            self.noted[name] = standing._replace(open_claims=counts.get(name, 0))

    def pace(self, actor: Actor | None, now_ms: int, appends: int = 1) -> TooFast | None:
        """Count appends that are about to be decided, or say that they come too fast."""
        if actor is None or actor.principal.pace.appends is None:
            return None
        standing = self.noted.get(actor.name, NEW)
        paced = decide_append_pace(standing, actor.principal.pace, now_ms, appends=appends)
        if isinstance(paced, TooFast):
            self.refused += 1
            return paced
        if actor.name in self.noted:
            self.noted[actor.name] = paced
        else:
            self.take_over({actor.name: paced})
        return None

    def settle(
        self, request: Append, before: Producer | None, outcome: AppendOutcome, now_ms: int
    ) -> AppendOutcome:
        """The outcome, unless what it would claim or raise comes too fast."""
        if (
            not isinstance(outcome, Appended)
            or outcome.producer is None
            or is_same_hold(before, outcome.producer)
        ):
            return outcome
        changed = self.weigh(self.standings, request, before, outcome, now_ms)
        if isinstance(changed, TooFast):
            return changed
        self.take_over(changed)
        return outcome

    def take_over(self, changed: Standings) -> None:
        """Let principals stand as a decision leaves them."""
        self.noted.update(changed)
        if len(self.noted) > STANDINGS_MAX:
            # Those with open claims must be known; what the others sent lately may be forgotten.
            self.noted = {
                name: standing for name, standing in self.noted.items() if standing.open_claims
            }

    def weigh(
        self,
        standings: Standings,
        request: Append,
        before: Producer | None,
        outcome: AppendOutcome,
        now_ms: int,
    ) -> Standings | TooFast:
        """How principals would stand after an outcome; only those that change."""
        if request.actor is None or not isinstance(outcome, Appended) or outcome.producer is None:
            return {}
        found = decide_standings(standings, request.actor, before, outcome.producer, now_ms)
        self.refused += isinstance(found, TooFast)
        return found

    def tell(
        self, request: Append, before: Producer | None, outcome: AppendOutcome, now_ms: int
    ) -> None:
        """Audit an append that was carried out, or that the rules for its producer id refuse."""
        actor, claim = request.actor, request.producer
        if actor is None or claim is None or self.auditor is None:
            return
        if isinstance(outcome, Appended):
            if before is None or (before.epoch == claim.epoch and not actor.overrides):
                return  # Nearly no append raises or overrides anything.
            refusal = None
        elif isinstance(outcome, NotHolder | EpochGuarded):
            refusal = outcome
        else:
            return
        event = audit(actor, request.path, claim.epoch, claim.id, before, refusal, now_ms)
        if event is not None:
            self._tell(event)

    def end_all(self, entry: Entry, now_ms: int) -> None:
        """End the claims on a stream that goes; they do not count as abandoned."""
        if not any(standing.open_claims for standing in self.standings.values()):
            return
        for name in _open_claims(
            self._connection.fetch("open_claims_of", (entry.stream.id,)), entry
        ):
            standing = self.noted.get(name, NEW)
            self.noted[name] = ended(standing, abandoned=False, now_ms=now_ms)


def _open_claims(rows: Iterable[tuple[object, ...]], entry: Entry) -> list[str]:
    """The holders of a stream's open claims: those on disk, and what was decided since."""
    found = {str(producer_id): str(principal) for producer_id, principal in rows}
    for producer_id, producer in entry.producers.items():
        found.pop(producer_id, None)
        if producer is not None and producer.claim == CLAIMED:
            found[producer_id] = producer.principal
    return list(found.values())
