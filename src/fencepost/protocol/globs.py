"""Globs over stream paths: `*` stands for one segment, `**` for any number of them, also none.

A `*` beside other characters stands for any run of them within its segment. Matching takes time in
proportion to pattern times path, whatever the pattern: it looks for the pieces between wildcards
from left to right and never goes back, which is right because the earliest place that a piece fits
leaves the most room for the rest.

`Globs` is several patterns as one. A path is compared only with the patterns whose literal
beginning it shares, which are found by halving among all beginnings.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ANY = "**"


class BadGlob(NamedTuple):
    """The pattern is none; `detail` says why."""

    detail: str


class Glob:
    """A pattern that is understood."""

    __slots__ = ("_longest", "_rest", "_runs", "_shortest", "_stem", "prefix", "text")

    def __init__(self, text: str) -> None:
        segments = text.split("/")
        self.text = text
        # Most patterns have one wildcard, at their end: the log matches thousands of paths a page.
        self._stem, star, rest = text.partition("*")
        self._rest = star + rest
        self._runs = _runs(segments)
        self._shortest = sum(map(len, self._runs))
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
        segments = path.split("/")
        runs = self._runs
        if len(runs) == 1:
            return len(segments) == self._shortest and _fits(runs[0], segments, 0)
        if len(segments) < self._shortest:
            return False
        first, last = runs[0], runs[-1]
        end = len(segments) - len(last)
        if not _fits(first, segments, 0) or not _fits(last, segments, end):
            return False
        at = len(first)
        for run in runs[1:-1]:
            while at + len(run) <= end and not _fits(run, segments, at):
                at += 1
            at += len(run)
            if at > end:
                return False
        return True


class Globs:
    """Several patterns as one: it takes what any of them takes.

    The literal beginnings form a trie, kept as a sorted list in which each one names the longest
    other beginning that it starts with. Every beginning of a path is the last one that sorts
    before the path, or is reached from that one.
    """

    __slots__ = ("_globs", "_parents", "_stems", "comparisons_max")

    def __init__(self, globs: Iterable[Glob]) -> None:
        by_stem: dict[str, dict[str, Glob]] = {}
        for glob in globs:
            by_stem.setdefault(literal_prefix(glob), {})[glob.text] = glob
        self._stems = sorted(by_stem)
        self._globs = [tuple(by_stem[stem].values()) for stem in self._stems]
        self._parents: list[int] = []
        totals: list[int] = []
        above: list[int] = []
        for index, stem in enumerate(self._stems):
            while above and not stem.startswith(self._stems[above[-1]]):
                above.pop()
            self._parents.append(above[-1] if above else -1)
            totals.append(len(self._globs[index]) + (totals[above[-1]] if above else 0))
            above.append(index)
        self.comparisons_max: int = max(totals, default=0)
        """Patterns that one path is compared with at most."""

    def matches(self, path: str) -> bool:
        """Whether one of the patterns takes `path`."""
        at = bisect_right(self._stems, path) - 1
        while at >= 0:
            if path.startswith(self._stems[at]):
                for glob in self._globs[at]:  # not any(): this is asked of thousands of paths
                    if glob.matches(path):
                        return True
            at = self._parents[at]
        return False


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
