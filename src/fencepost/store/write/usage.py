"""Usage: what each principal holds, as after all decisions made so far.

The database counts the rows itself, by triggers on their tables, in the transaction that changes
them (`principal_usage`): no restart, purge or upkeep lets a count drift. Here are the counts of
principals that took something lately, with what the open groups add. What goes away is not noticed
here; where a share seems to be used up, the count is read again before anything is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from fencepost.protocol.groups import LimitExceeded
from fencepost.protocol.shares import Amounts, Shares, decide_shares
from fencepost.store.sql import Connection


class UsageGroup(Protocol):
    """A group as far as this module writes to it."""

    usage: dict[str, Counter[str]]


class Usage:
    """The decided counts. `pending` are the groups not yet on disk."""

    def __init__(
        self, connection: Connection, pending: Sequence[UsageGroup], shares: Shares
    ) -> None:
        self._connection = connection
        self._pending = pending
        self._shares = shares
        self._known: dict[str, Counter[str]] = {}
        self.is_settled: Callable[[], bool] = _always
        """Whether all that was decided is on disk or in a group: a large commit that is being
        carried out is neither, and then counts are not read again."""
        self.refused = 0
        """Requests refused for going past a share, for the metrics."""

    def reset(self) -> None:
        """Forget everything that is not on disk; the next question reads it."""
        self._known.clear()

    def refuse(self, principal: str, more: Amounts) -> LimitExceeded | None:
        """Why a principal may not take so much more; None when it may."""
        if not principal or not more:
            return None
        used = self._known.get(principal)
        if used is None:
            used = self._read(principal)
        refused = decide_shares(self._shares, used, more)
        if refused is not None and self.is_settled():
            refused = decide_shares(self._shares, self._read(principal), more)
        self.refused += refused is not None
        return refused

    def add(self, group: UsageGroup, principal: str, more: Amounts) -> None:
        """A principal takes so much more, with the group; `refuse` was asked before."""
        if not principal or not more:
            return
        if principal in self._known:
            self._known[principal].update(more)
        group.usage.setdefault(principal, Counter()).update(more)

    def _read(self, principal: str) -> Counter[str]:
        """What is on disk, and what the groups add that are on their way there.

        A group that reached the disk a moment ago may count twice: near its share a principal is
        refused too early then, never too late.
        """
        used = Counter(
            {
                str(resource): int(amount)
                for resource, amount in self._connection.fetch("usage_of", (principal,))
            }
        )
        for group in self._pending:
            if principal in group.usage:
                used.update(group.usage[principal])
        self._known[principal] = used
        return used


def _always() -> bool:
    return True
