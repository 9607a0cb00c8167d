"""Options of `.format("fencepost")`, typed and checked, and the streams that they select.

Spark hands options over as texts, under names in any case. `Options` remembers each name that the
code asks for, and `refuse_others` refuses every given option that the code never asked for. A
misspelt option is thus never ignored: a misspelt `endingPosition` would read everything.

`Selection` says which streams a query reads: a few paths, or a pattern.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fencepost.pipeline.errors import OptionError
from fencepost.protocol.globs import ANY, BadGlob, parse_glob

_SIZE = re.compile(r"(\d{1,16})([kmg]?)b?", re.ASCII)
_DURATION = re.compile(r"(\d{1,9})\s*(ms|s|m|min|h|d)", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_TRUE = ("true", "false")
_SECRET = ("token",)
_OF_TABLES = "provider"
"""What Spark gives as an option when it makes a table for its catalog."""
_FROM_SPARK = ("checkpointLocation", "queryName")
"""Options that Spark itself adds to those of a stream."""


class Options:
    """The options of one read or write."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = {name.lower(): value for name, value in given.items()}
        self._asked: dict[str, str] = {name.lower(): name for name in _FROM_SPARK}

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._given

    def know(self, *names: str) -> None:
        """Count options as known before they are read."""
        self._asked.update({name.lower(): name for name in names})

    def text(self, name: str, default: str | None = None) -> str | None:
        """The text of an option; an empty one is a mistake, not an absence."""
        self._asked[name.lower()] = name
        value = self._given.get(name.lower())
        if value is None:
            return default
        if not value.strip():
            raise self.refusal(name, "a text that is not empty")
        return value

    def required(self, name: str, legal: str) -> str:
        """The text of an option that has to be there; `legal` says what it may be."""
        value = self.text(name)
        if value is None:
            raise OptionError(f"option {name} is missing: it is {legal}")
        return value

    def choice(self, name: str, legal: Sequence[str], default: str) -> str:
        """One of a few words, in any case."""
        value = self.text(name, default)
        assert value is not None
        for word in legal:
            if value.strip().lower() == word.lower():
                return word
        raise self.refusal(name, _either(legal))

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        return self.choice(name, _TRUE, _TRUE[not default]) == "true"

    def integer(
        self, name: str, default: int | None = None, *, least: int = 0, most: int | None = None
    ) -> int | None:
        """A whole number within bounds."""
        value = self.text(name)
        if value is None:
            return default
        bounds = f"from {least} on" if most is None else f"from {least} to {most}"
        number = whole_number(value)
        if number is None or number < least or (most is not None and number > most):
            raise self.refusal(name, f"a whole number {bounds}")
        return number

    def seconds(self, name: str, default_ms: int) -> float:
        """A time that is given in milliseconds."""
        milliseconds = self.integer(name, default_ms, least=1, most=86_400_000)
        assert milliseconds is not None
        return milliseconds / 1000

    def duration(self, name: str, default_ms: int) -> float:
        """A time with its unit, as Spark's own options have it, in seconds."""
        value = self.text(name)
        if value is None:
            return default_ms / 1000
        found = _DURATION.fullmatch(value.strip().lower())
        seconds = int(found[1]) * _SECONDS[found[2]] if found else 0.0
        if not 0.001 <= seconds <= 86_400:
            raise self.refusal(name, "a time from 1ms to 1d, such as 500ms, 30s, 15m or 1h")
        return seconds

    def size(self, name: str) -> int | None:
        """A number of bytes, with k, m or g for powers of 1024."""
        value = self.text(name)
        if value is None:
            return None
        found = _SIZE.fullmatch(value.strip().lower())
        number = int(found[1]) * _UNITS[found[2]] if found else 0
        if not 1 <= number < 2**53:
            raise self.refusal(
                name, "a number of bytes from 1 on, such as 1048576, 512k, 64m or 2g"
            )
        return number

    def exactly_one(self, names: Sequence[str], what: str) -> str:
        """Which of several options is given; `what` says what it is for."""
        given = [name for name in names if name in self]
        if len(given) == 1:
            return given[0]
        if not given:
            raise OptionError(f"{what}: give one of the options {', '.join(names)}")
        raise OptionError(f"{what}: give only one of the options {', '.join(given)}")

    def refusal(self, name: str, legal: str) -> OptionError:
        """The error that an option is not a legal value."""
        if name.lower() in _SECRET:
            return OptionError(f"option {name} must be {legal}")
        return OptionError(
            f"option {name} is {self._given.get(name.lower())!r}: it must be {legal}"
        )

    def refuse_others(self, hints: Mapping[str, str] | None = None) -> None:
        """Refuse options that were given and never asked for; `hints` explain some of them."""
        if _OF_TABLES in self._given and _OF_TABLES not in self._asked:
            raise OptionError(
                "CREATE TABLE cannot be used: Spark keeps such a table without the options that it"
                " takes to write to it. In SQL, read with CREATE TEMPORARY VIEW name USING"
                " fencepost OPTIONS (...); write with df.write.format('fencepost')"
            )
        for name in self._given:
            if name in self._asked:
                continue
            known = sorted(set(self._asked.values()) - set(_FROM_SPARK), key=str.lower)
            hint = (hints or {}).get(name) or _nearest(name, self._asked)
            raise OptionError(
                f"there is no option {name}{hint}; the options are {', '.join(known)}"
            )


def whole_number(text: str) -> int | None:
    """A whole number as people write it, or None."""
    stripped = text.strip()
    digits = stripped.removeprefix("-")
    return int(stripped) if digits.isascii() and digits.isdigit() and len(digits) <= 18 else None


def _either(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _nearest(name: str, asked: Mapping[str, str]) -> str:
    close = difflib.get_close_matches(name, asked, n=1, cutoff=0.75)
    return f" (did you mean {asked[close[0]]}?)" if close else ""


SELECTING = ("stream", "streams", "match")
STREAMS_MAX = 64
"""The paths that a server takes in one request (its `log_streams_max`)."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Streams by their paths, or by a pattern."""

    streams: tuple[str, ...] = ()
    match: str | None = None

    def asked(self) -> dict[str, Any]:
        """The arguments of the client's calls."""
        # Without a pattern the server compares no paths, which is half the work.
        match = None if self.match == ANY else self.match
        return {"streams": list(self.streams) or None, "match": match}

    def takes(self, path: str) -> bool:
        """Whether a stream is selected."""
        if self.match is None:
            return path in self.streams
        glob = parse_glob(self.match)
        assert not isinstance(glob, BadGlob)
        return glob.matches(path)

    def __str__(self) -> str:
        return self.match if self.match is not None else ", ".join(self.streams)


def selection_of(options: Options) -> Selection:
    """The streams that `stream`, `streams` or `match` select; exactly one must be given."""
    stream = options.text("stream")
    streams = options.text("streams")
    match = options.text("match")
    options.exactly_one(SELECTING, "say which streams to read (match ** is all)")
    if stream is not None:
        return Selection((_path(options, "stream", stream),))
    if streams is not None:
        paths = tuple(dict.fromkeys(_path(options, "streams", one) for one in _list(streams)))
        if not paths or len(paths) > STREAMS_MAX:
            raise options.refusal(
                "streams", f"from 1 to {STREAMS_MAX} paths; for more of them use the option match"
            )
        return Selection(paths)
    assert match is not None
    glob = parse_glob(match)
    if isinstance(glob, BadGlob):
        raise options.refusal("match", f"a pattern like orders/* or **: {glob.detail}")
    return Selection(match=match)


def _list(text: str) -> list[str]:
    """Paths in a JSON array, for those with commas in them, or with commas between them."""
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except ValueError:
            return [""]
        return [one if isinstance(one, str) else "" for one in found]
    return [piece.strip() for piece in text.split(",")]


def _path(options: Options, name: str, path: str) -> str:
    glob = parse_glob(path)
    if isinstance(glob, BadGlob):
        raise options.refusal(name, f"made of paths like orders/eu: {glob.detail}")
    if not glob.is_exact:
        raise options.refusal(name, "made of paths; a pattern with * goes into the option match")
    return path
