"""A large commit's copy of what it touches, filled before each slice as a turn's ledger is."""

from __future__ import annotations

from fencepost.protocol.commits import Part
from fencepost.store.database import Connection
from fencepost.store.large.copies import CommitLedger, Numbers
from fencepost.store.large.decider import LargeDecision
from fencepost.store.postgres.ledger import TurnLedger
from fencepost.store.postgres.staged import TurnStaging
from fencepost.store.write.staging import StagingGroup


class CopiedStaging(TurnStaging):
    """The parts that the slice in hand names."""

    def use(self, group: StagingGroup, part: Part, position: int) -> None:
        # Nothing is counted here, and no part is looked for twice.
        group.statements.append(("commit_part", (position, *part)))


class TurnCopy(CommitLedger, TurnLedger):
    """The streams and producers that a commit touches, as its slices so far leave them."""

    def __init__(
        self, connection: Connection, numbers: Numbers, key_retention_ms: int | None
    ) -> None:
        super().__init__(connection, numbers, key_retention_ms)
        self.parts = self.staging = CopiedStaging(connection, ())


class TurnDecision(LargeDecision):
    """What a large commit comes to that is written beside the turns, and ends in one."""

    lookups: Connection
    """What was not loaded is looked for here."""
    copy: TurnCopy

    def _copied(self, numbers: Numbers, key_retention_ms: int | None) -> CommitLedger:
        self.copy = TurnCopy(self.lookups, numbers, key_retention_ms)
        return self.copy

    def _conclude(self) -> None:
        # The transaction that wrote the slices ends with the turn that this belongs to.
        self._keep(self._decider.ledger, self._decider.group)
