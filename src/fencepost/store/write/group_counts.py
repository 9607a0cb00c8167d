"""What the row of a group counts: its targets and parked events, and the shares of its owner."""

from __future__ import annotations

from collections.abc import Callable

from fencepost.protocol.groups import Group, GroupLimits, LimitExceeded
from fencepost.protocol.leases import Parked
from fencepost.protocol.shares import PARKED_EVENTS, Amounts
from fencepost.store.write.groups import MESH, GroupChanges, Groups
from fencepost.store.write.usage import Usage


class GroupCounts:
    """Changes the counts of groups together with what they count."""

    def __init__(
        self,
        groups: Groups,
        usage: Usage,
        limits: GroupLimits,
        open_group: Callable[[], GroupChanges],
    ) -> None:
        self._groups = groups
        self._usage = usage
        self._limits = limits
        self._open_group = open_group

    def take_share(self, group: Group, more: Amounts) -> LimitExceeded | None:
        """Let the owner of a group take so much more; or why it may not."""
        if not group.owner or group.name.startswith(MESH):
            return None
        refused = self._usage.refuse(group.owner, more)
        if refused is None:
            self._usage.add(self._open_group(), group.owner, more)
        return refused

    def parked_max(self, group: Group) -> int:
        """How many events a group may set aside: no more than now when its owner's share is used
        up."""
        if group.owner and not group.name.startswith(MESH):
            refused = self._usage.refuse(group.owner, {PARKED_EVENTS: 1})
            if refused is not None:
                return min(group.parked_count, self._limits.parked_max)
        return self._limits.parked_max

    def noted(self, group: Group, event: Parked) -> Parked:
        """An event that is parked, with the note that its target was told of it with."""
        if group.settings.targets != "computed" or event.note is not None:
            return event
        told = self._groups.told.find(group.id, event.target, event.position)
        return event if told is None else event._replace(note=told.note)

    def drop(self, group: Group, target: str, token: int) -> Group:
        """Let the row of a target go, whose last number is known; the group as it then is."""
        changes, without = self._open_group(), group.without(token)
        self._groups.drop(changes, group.id, target)
        self._groups.save_group(changes, without)
        return without

    def recount(self, group: Group, *, targets: int = 0, parked: int = 0) -> Group:
        """Count so many targets and parked events more; the group as it then is."""
        if not targets and not parked:
            return group
        counted = group._replace(
            targets_count=group.targets_count + targets, parked_count=group.parked_count + parked
        )
        self._groups.save_group(self._open_group(), counted)
        if parked > 0 and group.owner and not group.name.startswith(MESH):
            self._usage.add(self._open_group(), group.owner, {PARKED_EVENTS: parked})
        return counted
