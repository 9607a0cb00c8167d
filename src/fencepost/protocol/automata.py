"""Patterns over stream paths as one automaton: a path is read once, however many there are.

What the patterns have taken of a path so far is a set of places in them, which is the bits of one
number: a character moves all of them at once by a shift and masks. Every set that came up has a
number and a table of what came after it, so that a path of a usual shape is followed from table to
table. What is remembered is bounded; without it a step costs a 64th of the length of the patterns.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

REMEMBERED_BITS_MAX = 1 << 20
"""Bits of sets that one automaton remembers, but `SETS_MIN` sets at least."""
SETS_MIN = 8
SETS_MAX = 512
STEPS_MAX = 4_096
"""Steps from one set to another that one automaton remembers."""


class _Remembered:
    """The sets of places that came up, and the steps between them.

    Several threads may use it at once: at worst a set is remembered twice.
    """

    __slots__ = ("_next", "_steps", "numbers", "places", "steps")

    def __init__(self, first: int) -> None:
        self.places = {0: first}
        """Each set by its number; 0 is where a path begins."""
        self.numbers = {first: 0}
        self.steps: dict[int, dict[str, int]] = {0: {}}
        """The set that each character leads to, by the number of the set that it comes after."""
        self._next = count(1)
        self._steps = count(1)

    def add(self, number: int, character: str, places: int) -> int:
        """Remember a step; the number of the set that it leads to."""
        following = self.numbers.get(places)
        if following is None:
            following = next(self._next)
            self.places[following] = places
            self.steps[following] = {}
            self.numbers[places] = following
        self.steps[number][character] = following
        return following

    def is_full(self, sets_max: int) -> bool:
        return len(self.places) >= sets_max or next(self._steps) >= STEPS_MAX


class Automaton:
    """Takes what any of its patterns takes.

    It reads a path with a slash behind it, so that every segment ends with one. A place is a bit:
    what comes next there is a character, which leads to the bit above, or a `**`, which stays and
    leads to the bit above behind every slash. Behind a `*` a place stays as long as no slash comes.
    """

    __slots__ = (
        "_accepting",
        "_first",
        "_literals",
        "_remembered",
        "_rests",
        "_sets_max",
        "_stars",
    )

    def __init__(self, patterns: Iterable[str]) -> None:
        layout = _Layout()
        for pattern in patterns:
            layout.add(pattern)
        self._literals = {character: _bits(places) for character, places in layout.literals.items()}
        """The places that each character leads to."""
        self._stars = _bits(layout.stars)
        self._rests = _bits(layout.rests)
        """The places of every `**`."""
        self._accepting = _bits(layout.ends)
        first = _bits(layout.starts)
        self._first = first | (first & self._rests) << 1
        self._sets_max = min(SETS_MAX, max(SETS_MIN, REMEMBERED_BITS_MAX // (layout.at + 1)))
        self._remembered = _Remembered(self._first)

    def takes(self, path: str) -> bool:
        """Whether one of the patterns takes `path`."""
        remembered = self._remembered
        steps = remembered.steps
        at = 0
        for character in path + "/":
            following = steps[at].get(character)
            if following is None:
                if remembered.is_full(self._sets_max):
                    return self._takes_anew(path)
                following = self._step(remembered, at, character)
            at = following
        return bool(remembered.places[at] & self._accepting)

    def _takes_anew(self, path: str) -> bool:
        """The same without remembering; what was remembered so far is forgotten."""
        self._remembered = _Remembered(self._first)
        places = self._first
        for character in path + "/":
            places = self._moved(places, character)
        return bool(places & self._accepting)

    def _step(self, remembered: _Remembered, number: int, character: str) -> int:
        return remembered.add(number, character, self._moved(remembered.places[number], character))

    def _moved(self, places: int, character: str) -> int:
        moved = places << 1 & self._literals.get(character, 0)
        if character == "/":
            moved |= places & self._rests
            return moved | (moved & self._rests) << 1
        return moved | places & (self._stars | self._rests)


class _Layout:
    """Which places of all patterns, one behind the other, are what."""

    def __init__(self) -> None:
        self.at = 0
        self.starts: list[int] = []
        self.stars: list[int] = []
        self.rests: list[int] = []
        self.ends: list[int] = []
        self.literals: dict[str, list[int]] = {}

    def add(self, pattern: str) -> None:
        self.starts.append(self.at)
        before = ""
        for segment in pattern.split("/"):
            if segment != "**":
                self._add_segment(segment)
            elif before != segment:
                self.rests.append(self.at)
                self.at += 1
            before = segment
        self.ends.append(self.at)
        self.at += 1

    def _add_segment(self, segment: str) -> None:
        for character in segment + "/":
            if character == "*":
                self.stars.append(self.at)
            else:
                self.at += 1
                self.literals.setdefault(character, []).append(self.at)


def _bits(places: list[int]) -> int:
    """The number in which the bits of these places, which are in order, are set."""
    if not places:
        return 0
    found = bytearray(places[-1] // 8 + 1)
    for place in places:
        found[place >> 3] |= 1 << (place & 7)
    return int.from_bytes(found, "little")
