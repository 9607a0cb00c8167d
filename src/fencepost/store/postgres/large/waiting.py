"""Requests that wait for a large commit: put aside in their order, until it is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

LIVES = 0x6C617267
"""Of the advisory locks by which large commits show that they live, each with its own number."""


class Aside(Generic[T]):
    """Requests of one node that a large commit of any node holds up."""

    def __init__(self) -> None:
        self.large: int | None = None
        """The commit that they wait for."""
        self._waiting: list[T] = []
        self._marks: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, large: int, request: T, marks: Iterable[int]) -> None:
        """Put a request aside."""
        self.large = large
        self._waiting.append(request)
        self._marks.update(marks)

    def keeps(self, marks: Iterable[int]) -> bool:
        """Whether something waits that must be decided before whatever has these marks."""
        return bool(self._waiting) and any(mark in self._marks for mark in marks)

    def take(self) -> list[T]:
        """All of them, in order; none waits any more."""
        waiting, self._waiting = self._waiting, []
        self._marks.clear()
        self.large = None
        return waiting
