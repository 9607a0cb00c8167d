"""Query strings of the endpoints beside the streams: every parameter is known, or refused.

A misspelt `match` that is silently ignored would read everything, so here an unknown parameter is
an error, and so is one that comes twice where it may come once.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import parse_qsl

from fencepost.http.messages import Request
from fencepost.protocol.globs import BadGlob, Glob, parse_glob
from fencepost.protocol.limits import Limits
from fencepost.protocol.logs import parse_position
from fencepost.server.handlers.fields import bad, check_path

FIELDS_MAX = 256
"""Parameters in one query string."""


class Parameters:
    """The parameters of one request."""

    def __init__(self, request: Request, *, once: Iterable[str], repeatable: Iterable[str]) -> None:
        known, several = frozenset(once), frozenset(repeatable)
        self._values: dict[str, list[str]] = {}
        try:
            pairs = parse_qsl(
                request.query.decode("ascii"),
                keep_blank_values=True,
                max_num_fields=FIELDS_MAX,
                errors="strict",
            )
        except ValueError:
            raise bad(
                "query_invalid",
                f"the query string is malformed, or has more than {FIELDS_MAX} parameters",
            ) from None
        for name, value in pairs:
            if name not in known and name not in several:
                names = ", ".join(sorted(known | several)) or "none"
                raise bad("parameter_unknown", f"there is no such parameter; there are {names}")
            if name in self._values and name not in several:
                raise bad("query_repeated", f"the parameter {name} came more than once")
            self._values.setdefault(name, []).append(value)

    def get(self, name: str) -> str | None:
        """The value of a parameter that may come once."""
        values = self._values.get(name)
        return values[0] if values else None

    def all(self, name: str) -> list[str]:
        """The values of a parameter that may come several times."""
        return self._values.get(name, [])

    def integer(
        self, name: str, code: str, *, least: int, most: int, default: int | None
    ) -> int | None:
        """A whole number within bounds."""
        text = self.get(name)
        if text is None:
            return default
        number = parse_position(text)
        if number is None or not least <= number <= most:
            raise bad(code, f"{name} is a whole number from {least} to {most}")
        return number

    def globs(self, name: str, limits: Limits) -> list[Glob]:
        """Patterns over paths."""
        return [glob_of(text, name, limits) for text in self.all(name)]

    def paths(self, name: str, limits: Limits) -> list[str]:
        """Exact paths of streams."""
        for text in self.all(name):
            if len(text.encode()) > limits.path_bytes_max:
                raise bad(
                    "path_too_long",
                    f"a stream path has at most {limits.path_bytes_max} bytes (path_bytes_max)",
                )
        return [check_path(text) for text in self.all(name)]


def glob_of(text: str, name: str, limits: Limits) -> Glob:
    """A pattern, or a refusal that says what is wrong with it."""
    if len(text.encode()) > limits.path_bytes_max:
        raise bad(
            "match_invalid",
            f"{name}: a pattern has at most {limits.path_bytes_max} bytes (path_bytes_max)",
        )
    glob = parse_glob(text)
    if isinstance(glob, BadGlob):
        raise bad("match_invalid", f"{name}: {glob.detail}")
    return glob


def list_limit(parameters: Parameters, limits: Limits) -> int:
    """How many entries a page of a list has at most."""
    limit = parameters.integer(
        "limit",
        "limit_invalid",
        least=1,
        most=limits.list_rows_max,
        default=min(limits.list_rows_default, limits.list_rows_max),
    )
    assert limit is not None
    return limit
