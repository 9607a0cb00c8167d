"""Requests: something to decide in a turn, and what the turn has to know of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fencepost.store.postgres.driver.pipeline import WritingConnection
from fencepost.store.postgres.ledger import Needs
from fencepost.store.write.decider import Decider

Done = Callable[[Any], None]

WAITS = object()
"""For a request that waits for a large commit when it has to."""


class Request(NamedTuple):
    """Something to decide, and who is told of it."""

    work: Callable[[Decider], object]
    done: Done
    needs: Callable[[Needs], None] | None = None
    size: int = 0
    tries: int = 0
    alone: bool = False
    """Whether it gets a turn of its own, because one that it shared was refused."""
    reaches: bool = False
    """Whether it may touch more than it needs, so that it waits for any large commit."""
    instead: object = WAITS
    """What to answer when a large commit holds what it is about, if it is not to wait."""
    of: int | None = None
    """The large commit that it is part of, and does not have to wait for."""
    on: WritingConnection | None = None
    """Whose open transaction its turn is taken in and ends."""

    def marks(self) -> set[int]:
        """What it is about, as large commits hold it."""
        if self.needs is None:
            return set()
        needs = Needs()
        self.needs(needs)
        return needs.marks()
