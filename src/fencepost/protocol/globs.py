"""Globs over stream paths: `*` stands for one segment, `**` for any number of them, also none.

A `*` beside other characters stands for any run of them within its segment. Matching takes time in
proportion to pattern times path, whatever the pattern: it looks for the pieces between wildcards
from left to right and never goes back, which is right because the earliest place that a piece fits
leaves the most room for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ANY = "**"


class BadGlob(NamedTuple):
    """The pattern is none; `detail` says why."""

    detail: str


class Glob:
    """A pattern that is understood."""

    __slots__ = ("_rest", "_runs", "_shortest", "_stem", "prefix", "text")

    def __init__(self, text: str) -> None:
        segments = text.split("/")
        self.text = text
        # Most patterns have one wildcard, at their end: the log matches thousands of paths a page.
        self._stem, star, rest = text.partition("*")
        self._rest = star + rest
        self._runs = _runs(segments)
        self._shortest = sum(map(len, self._runs))
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
