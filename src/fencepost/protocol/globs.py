"""Globs over stream paths: `*` stands for one segment, `**` for any number of them, also none.

A `*` beside other characters stands for any run of them within its segment. A pattern with one `**`
or none is compared piece by piece, from left to right and never back, which is right because the
earliest place that a piece fits leaves the most room for the rest. More patterns together, or a
pattern in which a run of segments must be looked for, are one automaton (`automata.py`). Either way
a comparison takes time in proportion to the path, whatever the patterns: another principal wrote
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fencepost.protocol.automata import Automaton

ANY = "**"


class BadGlob(NamedTuple):
    """The pattern is none; `detail` says why."""

    detail: str


class Glob:
    """A pattern that is understood."""

    __slots__ = ("_automaton", "_longest", "_rest", "_runs", "_shortest", "_stem", "prefix", "text")

    def __init__(self, text: str) -> None:
        segments = text.split("/")
        self.text = text
        # Most patterns have one wildcard, at their end: the log matches thousands of paths a page.
        self._stem, star, rest = text.partition("*")
        self._rest = star + rest
        self._runs = _runs(segments)
        self._shortest = sum(map(len, self._runs))
        self._automaton: Automaton | None = None
        # A path that lacks this piece is no match, and that is seen without taking it apart.
        pieces = [piece for run in self._runs for segment in run for piece in segment]
        self._longest = max(pieces, key=len, default="")
        literal = []
        for segment in segments:
            if "*" in segment:
                break
            literal.append(segment)
        self.prefix: tuple[str, ...] = tuple(literal)
        """The segments before the first wildcard: every match begins with them."""

    @property
    def is_exact(self) -> bool:
        """Whether the pattern is simply a path."""
        return not self._rest

    def matches(self, path: str) -> bool:
        """Whether `path` as a whole is what the pattern describes."""
        stem, rest = self._stem, self._rest
        if not rest:
            return path == stem
        if rest == "*":
            return path.startswith(stem) and path.find("/", len(stem)) < 0
        if rest == ANY:
            return path.startswith(stem) or path == stem[:-1]
        if self._longest not in path:
            return False
        runs = self._runs
        if len(runs) > 2:
            automaton = self._automaton
            if automaton is None:
                automaton = self._automaton = Automaton([self.text])
            return automaton.takes(path)
        segments = path.split("/")
        if len(runs) == 1:
            return len(segments) == self._shortest and _fits(runs[0], segments, 0)
        if len(segments) < self._shortest:
            return False
        first, last = runs
        return _fits(first, segments, 0) and _fits(last, segments, len(segments) - len(last))


class Globs:
    """Several patterns as one: it takes what any of them takes."""

    __slots__ = ("_automaton", "_globs", "comparisons_max")

    def __init__(self, globs: Iterable[Glob]) -> None:
        self._globs = tuple({glob.text: glob for glob in globs}.values())
        # It is made when a path comes, in the thread that compares.
        self._automaton: Automaton | None = None
        self.comparisons_max: int = _sharing_max(self._globs)
        """Patterns whose literal beginning one path shares at most."""

    def matches(self, path: str) -> bool:
        """Whether one of the patterns takes `path`."""
        if len(self._globs) == 1:
            return self._globs[0].matches(path)
        automaton = self._automaton
        if automaton is None:
            automaton = self._automaton = Automaton(glob.text for glob in self._globs)
        return automaton.takes(path)


def _sharing_max(globs: Iterable[Glob]) -> int:
    """How many of these patterns have literal beginnings that begin with each other, at most."""
    counts = Counter(map(literal_prefix, globs))
    most = 0
    above: list[tuple[str, int]] = []
    for stem in sorted(counts):
        while above and not stem.startswith(above[-1][0]):
            above.pop()
        total = counts[stem] + (above[-1][1] if above else 0)
        above.append((stem, total))
        most = max(most, total)
    return most


def literal_prefix(glob: Glob) -> str:
    """What every match of a pattern begins with."""
    if glob.is_exact:
        return glob.text
    before, _, _ = glob.text.partition("*")
    # `a/**` is also `a` itself: the slash before a double star may be missing.
    whole = "/".join(glob.prefix)
    return whole if glob.text[len(before) :].startswith(ANY) else before


def parse_glob(text: str) -> Glob | BadGlob:
    """The pattern written as `text`, or why it is none."""
    if not text or text.startswith("/") or text.endswith("/") or "//" in text:
        return BadGlob("a pattern has one or more segments, none of them empty")
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in text):
        return BadGlob("a pattern has no control characters")
    for segment in text.split("/"):
        if ANY in segment and segment != ANY:
            return BadGlob("** stands alone between slashes")
        if segment in (".", ".."):
            return BadGlob("a pattern has no segments . or ..")
    return Glob(text)


def _runs(segments: Sequence[str]) -> list[list[list[str]]]:
    """The pattern cut at each `**`; a segment is the list of texts between its stars."""
    runs: list[list[list[str]]] = [[]]
    for segment in segments:
        if segment == ANY:
            runs.append([])
        else:
            runs[-1].append(segment.split("*"))
    return runs


def _fits(run: Sequence[Sequence[str]], segments: Sequence[str], at: int) -> bool:
    return all(fits(pieces, segments[at + index]) for index, pieces in enumerate(run))


def fits(pieces: Sequence[str], text: str) -> bool:
    """Whether a text has these pieces in this order, with anything in between."""
    first, last = pieces[0], pieces[-1]
    if len(pieces) == 1:
        return text == first
    end = len(text) - len(last)
    if end < len(first) or not text.startswith(first) or not text.endswith(last):
        return False
    at = len(first)
    # The earliest place that a piece fits leaves the most room for the rest.
    for piece in pieces[1:-1]:
        at = text.find(piece, at, end)
        if at < 0:
            return False
        at += len(piece)
    return True
