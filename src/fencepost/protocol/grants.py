"""Who may do what: principals, their grants, and the rules for producer ids.

A principal has grants, each of stream globs and verbs, and globs of the producer ids it may use.
`admin` on a stream stands for every verb on it. What is not granted is not allowed, and the answer
does not depend on whether the stream exists.

The audit stream is apart: only `admin` reads it and no request writes to it, whatever is granted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeVar

from fencepost.protocol.globs import ANY, Glob, fits, literal_prefix
from fencepost.protocol.logs import (
    Part,
    Range,
    Selection,
    common_ranges,
    joined_ranges,
    text_range,
)
from fencepost.protocol.rates import UNLIMITED, Pace

T = TypeVar("T")

READ, APPEND, CREATE, CLOSE, DELETE, CLAIM, ADMIN = (1 << bit for bit in range(7))
EVERY_VERB = (1 << 7) - 1
VERBS = {
    "read": READ,
    "append": APPEND,
    "create": CREATE,
    "close": CLOSE,
    "delete": DELETE,
    "claim": CLAIM,
    "admin": ADMIN,
}

AUDIT = "__audit"
"""The path of the audit stream; this segment is reserved, alone and with more behind it."""

GROUPS = "__groups"
"""The first segment of the path that grants on a group are about; reserved as well."""

REMEMBERED_MAX = 16_384
"""Answers about paths and ids that are kept for each principal."""


def is_audit(path: str) -> bool:
    """Whether a path is the audit stream's, or below it."""
    return path.startswith(AUDIT) and path.partition("/")[0] == AUDIT


class IdGlob:
    """A pattern over producer ids: `*` stands for any run of characters, slashes included."""

    __slots__ = ("_pieces", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._pieces = text.split("*")

    def matches(self, text: str) -> bool:
        return fits(self._pieces, text)


class Grant(NamedTuple):
    """These verbs (a sum of them) on the streams that one of these globs takes."""

    streams: tuple[Glob, ...]
    verbs: int


Raising = Literal["never", "stale", "always"]


class ProducerRule(NamedTuple):
    """What holds for the producer ids that a glob takes.

    `is_claim`: opening or retaking such an id is a claim. `shared`: any principal may go on in an
    epoch; else its holder only. `raising`: whether an epoch may be raised over the current one.
    """

    glob: IdGlob
    is_claim: bool
    shared: bool
    raising: Raising
    stale_after_ms: int


class ProducerRules:
    """The rule for every id: of those whose glob takes it, the first.

    Ids that one of `claims` takes are claims, whichever rule it is.
    """

    __slots__ = ("_claims", "_known", "_rules")

    def __init__(self, rules: Iterable[ProducerRule], claims: Iterable[IdGlob] = ()) -> None:
        self._rules = (*rules, SHARED)
        self._claims = tuple(claims)
        self._known: dict[str, ProducerRule] = {}

    def rule(self, producer_id: str) -> ProducerRule:
        """The rule that holds for an id."""
        found = self._known.get(producer_id)
        if found is None:
            found = next(rule for rule in self._rules if rule.glob.matches(producer_id))
            if any(glob.matches(producer_id) for glob in self._claims):
                found = found._replace(is_claim=True)
            _keep(self._known, producer_id, found)
        return found


SHARED = ProducerRule(IdGlob("*"), False, True, "always", 0)
"""What holds for ids that no rule speaks of: as without authorization."""


class Principal:
    """A recognised sender, and what it may do. Nothing of it changes while a server runs.

    Answers are remembered, because clients use the same few streams again and again.
    """

    __slots__ = (
        "_everything",
        "_grants",
        "_ids",
        "_producers",
        "_verbs",
        "name",
        "pace",
        "read_ranges",
        "rules",
    )

    def __init__(
        self,
        name: str,
        grants: Iterable[Grant],
        *,
        producers: Iterable[IdGlob],
        rules: ProducerRules,
        pace: Pace = UNLIMITED,
    ) -> None:
        self.name = name
        self.rules = rules
        self.pace = pace
        self._grants = tuple(grants)
        self._ids = tuple(producers)
        self._verbs: dict[str, int] = {}
        self._producers: dict[str, int | None] = {}
        self._everything = _granted(
            grant.verbs for grant in self._grants if any(glob.text == ANY for glob in grant.streams)
        )
        shown = [one for one in self._grants if one.verbs & (READ | ADMIN)]
        self.read_ranges = tuple(
            joined_ranges(text_range(literal_prefix(glob)) for one in shown for glob in one.streams)
        )
        """Where paths lie that it may read, with others between them."""

    def renamed(self, name: str) -> Principal:
        """Another one with the same grants."""
        return Principal(name, self._grants, producers=self._ids, rules=self.rules, pace=self.pace)

    @property
    def is_admin(self) -> bool:
        """Whether it may do everything everywhere, and see how the server itself is doing."""
        return bool(self._everything & ADMIN)

    def verbs_on(self, path: str) -> int:
        """The verbs it has on a stream, as a sum."""
        found = self._verbs.get(path)
        if found is None:
            found = _granted(
                grant.verbs
                for grant in self._grants
                if any(glob.matches(path) for glob in grant.streams)
            )
            if is_audit(path):
                found &= ADMIN
            _keep(self._verbs, path, found)
        return found

    def may(self, verbs: int, path: str) -> bool:
        """Whether it has all of these verbs on a stream."""
        return self.verbs_on(path) & verbs == verbs

    def may_read(self, path: str) -> bool:
        """Whether it may see a stream; the audit stream is for administrators."""
        return bool(self.verbs_on(path) & (READ | ADMIN))

    def may_somewhere(self, verb: int) -> bool:
        """Whether it has a verb on any stream."""
        return any(grant.verbs & (verb | ADMIN) for grant in self._grants)

    def may_read_all_of(self, pattern: Glob) -> bool:
        """Whether whatever a pattern can match may be read: one of the granted globs includes it.

        The audit stream is not asked for here: a pattern that takes it in sees it only as
        `may_read` says.
        """
        return any(
            grant.verbs & (READ | ADMIN) and any(includes(glob, pattern) for glob in grant.streams)
            for grant in self._grants
        )

    def may_use(self, producer_id: str) -> bool:
        """Whether it may send as this producer."""
        return self.verbs_for(producer_id) is not None

    def verbs_for(self, producer_id: str) -> int | None:
        """The verbs that sending as this producer needs beside those of the request itself.

        None when it may not send as this producer at all.
        """
        found = self._producers.get(producer_id, -1)
        if found == -1:
            found = None
            if any(glob.matches(producer_id) for glob in self._ids):
                found = CLAIM if self.rules.rule(producer_id).is_claim else 0
            _keep(self._producers, producer_id, found)
        return found


def _granted(verbs: Iterable[int]) -> int:
    total = 0
    for some in verbs:
        total |= some
    return EVERY_VERB if total & ADMIN else total


def _keep(known: dict[str, T], key: str, value: T) -> None:
    if len(known) >= REMEMBERED_MAX:
        known.clear()
    known[key] = value


def includes(outer: Glob, inner: Glob) -> bool:
    """Whether every path that `inner` takes is surely one that `outer` takes."""
    return _includes(
        outer.text.split("/"),
        inner.text.split("/"),
        ANY,
        lambda one, other: other != ANY and _includes(one, other, "*", _same),
    )


def _same(one: str, other: str) -> bool:
    return one == other and one != "*"


def _includes(
    outer: Sequence[str], inner: Sequence[str], star: str, fits: Callable[[str, str], bool]
) -> bool:
    # One idea for segments and for characters: a star of `outer` takes any run of `inner`, stars
    # included; everything else takes exactly one.
    reached = {0}
    for piece in outer:
        if piece == star:
            reached = set(range(min(reached), len(inner) + 1))
        else:
            reached = {at + 1 for at in reached if at < len(inner) and fits(piece, inner[at])}
        if not reached:
            return False
    return len(inner) in reached


EVERYWHERE: tuple[Range, ...] = (("", None),)


class Narrowed(Glob):
    """A glob that takes only what a principal may read of it, all of which lies in `ranges`."""

    __slots__ = ("_may_read", "_ranges")

    def __init__(
        self, text: str, may_read: Callable[[str], bool], ranges: Sequence[Range] = EVERYWHERE
    ) -> None:
        super().__init__(text)
        self._may_read = may_read
        self._ranges = ranges

    def matches(self, path: str) -> bool:
        return super().matches(path) and self._may_read(path)

    def within(self, whole: Range) -> Range:
        """As much of a range of paths as holds what it takes there; an empty one for nothing."""
        ranges = common_ranges([whole], self._ranges)
        return (ranges[0][0], ranges[-1][1]) if ranges else ("", "")


class NarrowedSelection(Selection):
    """A selection of what a principal may read of it, all of which lies in `ranges`; without paths
    and globs that is not all."""

    __slots__ = ("_may_read", "_ranges")

    def __init__(
        self,
        paths: Iterable[str],
        globs: Iterable[Glob],
        part: Part | None,
        may_read: Callable[[str], bool],
        ranges: Sequence[Range] = EVERYWHERE,
    ) -> None:
        globs = tuple(globs)
        paths = tuple(paths)
        super().__init__(paths, globs if paths or globs else (Glob(ANY),), part)
        self._may_read = may_read
        self._ranges = ranges

    def takes_path(self, path: str) -> bool:
        return super().takes_path(path) and self._may_read(path)

    def path_ranges(self) -> list[Range]:
        return common_ranges(super().path_ranges(), self._ranges)
