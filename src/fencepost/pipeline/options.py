"""Options of `.format("fencepost")`: typed, and refused when they are not understood.

Spark hands options over as texts under names in any case. A reader of options asks for each one it
knows, which is also how it is known which ones there are: `refuse_others` then names every option
that nobody asked for. A misspelt option is never silently ignored, because a misspelt
`endingPosition` would read everything.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from fencepost.pipeline.errors import OptionError

_SIZE = re.compile(r"(\d{1,16})([kmg]?)b?", re.ASCII)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_TRUE = ("true", "false")
_SECRET = ("token",)
_FROM_SPARK = ("checkpointlocation", "queryname")
"""What Spark itself adds to the options of a stream."""


class Options:
    """The options of one read or write."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = {name.lower(): value for name, value in given.items()}
        self._asked: dict[str, str] = {name: name for name in _FROM_SPARK}

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
        """Refuse what nobody asked for; `hints` say more about some of them."""
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
