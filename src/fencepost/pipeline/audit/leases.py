"""Rules about the targets of groups, which compare two looks at them.

A row of a target says how far it is (`at`), how far its events reach (`work_to`) and which lease is
its newest. Nothing keeps what it said before, so the audit looks when it begins and again when it
ends. The numbers of leases grow with every claim, reset and skip: where the number has stayed, `at`
may not go back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from fencepost.client.errors import ForbiddenError, GroupNotFoundError
from fencepost.client.groups import TargetInfo
from fencepost.client.sync import Client
from fencepost.pipeline.audit.reports import Defect

KINDS = {
    "lease_ahead": "a target of a group has gone past the newest event that concerns it",
    "lease_back": "a target went back between two looks, without a reset",
    "lease_token_repeated": (
        "the number of a target's leases fell, or two workers held one number"
    ),
}
"""What each kind of defect means."""

Key = tuple[str, int, str]
"""A group, its incarnation, and a target of it."""


class Seen(NamedTuple):
    """What the first look keeps of a target."""

    at: int
    number: int
    worker: str | None


def look(client: Client) -> dict[Key, Seen]:
    """The targets of all groups that may be read, as they are now."""
    return {key: Seen(row.at, row.lease_number, row.worker) for key, row in _rows(client)}


def compare(client: Client, before: dict[Key, Seen]) -> list[Defect]:
    """Look again, and report what must not be."""
    return [
        defect for key, row in _rows(client) for defect in defects_of(key, before.get(key), row)
    ]


def defects_of(key: Key, before: Seen | None, row: TargetInfo) -> Iterator[Defect]:
    """What is wrong with a target, by what the first look saw of it, if it saw it."""
    group = key[0]
    if row.at > row.work_to:
        detail = f"the group {group} is at {row.at}, and its events reach to {row.work_to}"
        yield Defect("lease_ahead", row.target, row.at, detail)
    if before is None:
        return
    if row.lease_number == before.number and row.at < before.at:
        detail = f"the group {group} was at {before.at}, and is at {row.at} without a reset"
        yield Defect("lease_back", row.target, row.at, detail)
    workers = {before.worker, row.worker} - {None}
    same = row.lease_number == before.number and len(workers) > 1
    if row.lease_number < before.number or same:
        detail = f"the lease {row.lease_number} of the group {group} comes after {before.number}"
        yield Defect("lease_token_repeated", row.target, row.at, detail)


def _rows(client: Client) -> Iterator[tuple[Key, TargetInfo]]:
    for group in client.groups():
        # A group may be deleted meanwhile, or be one that the principal may not look at.
        with suppress(GroupNotFoundError, ForbiddenError):
            for row in client.group(group.group).streams():
                yield (group.group, group.incarnation, row.target), row
