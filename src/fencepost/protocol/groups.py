"""Groups: what a group is made with, which values it may have, and how operators name its targets.

A group hands out the work of many targets to workers, one lease per target (`leases.py`). It reads
the log from `start` on. Correlation finds out which target each event concerns and moves the
`watermark`, the last position whose targets are known. A group has an incarnation number: a token
of a group that was deleted does not fit the next group of the same name.

Functions that check a value return `GroupInvalid` or `FilterInvalid` with a sentence that names the
value, or None when it is good.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from fencepost.protocol.globs import BadGlob, Glob, parse_glob
from fencepost.protocol.timing import LEASE_MS_MAX, LEASE_MS_MIN, Backoff

TargetKind = Literal["stream", "message", "computed"]
OnExhausted = Literal["block", "park", "retry"]

RETRIES_MAX = 1_000
DELAY_MS_MAX = 7 * 86_400_000
SOURCES_MAX = 64
NAMES_MAX = 64
TEXT_MAX = 256
POSITION_MAX = 2**53 - 1
PRIORITY_MAX = 2**31 - 1

# Clients and proxies take the segments . and .. out of a URL.
_NAME = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9._-]{1,128}")
_MESH_NAME = re.compile(r"mesh:[A-Za-z0-9._-]{1,128}:(queue|inbox):[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """Every bound on groups, by the name that its setting and its refusal have."""

    groups_max: int = 1_000
    """Groups that exist at once."""
    group_targets_max: int = 1_000_000
    """Targets of one group; messages count while they are open work."""
    lanes_max: int = 64
    """Lanes of one group."""
    claim_streams_max: int = 1_000
    """Targets that one claim may take, and leases that one request may name."""
    claim_events_max: int = 10_000
    """Events in the answer to one claim, and targets in one correlation."""
    claim_bytes_max: int = 4 << 20
    """Payload bytes in the answer to one claim; a single larger event is sent whole."""
    lease_ms_min: int = LEASE_MS_MIN
    """The shortest lease."""
    lease_ms_max: int = LEASE_MS_MAX
    """The longest lease."""
    failure_bytes_max: int = 4 << 10
    """Bytes of the error that a failure brings."""
    parked_max: int = 100_000
    """Events that one group has set aside."""
    told_max: int = 1_000_000
    """Events that computed targets of one group were told of and have not got past."""


class GroupSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client asked for. Two groups are the same when these are equal."""

    sources: tuple[str, ...]
    names: tuple[str, ...] = ()
    """Names of events; empty: every event."""
    targets: TargetKind = "stream"
    lease_ms: int = 10_000
    retries_max: int = 3
    backoff: Backoff = Backoff()
    on_exhausted: OnExhausted = "block"
    lost_max: int = 5
    start: Literal["first", "now"] | int = "first"

    def canonical(self) -> GroupSettings:
        """The same settings with lists sorted and each entry once."""
        return msgspec.structs.replace(
            self, sources=tuple(sorted(set(self.sources))), names=tuple(sorted(set(self.names)))
        )


class Group(NamedTuple):
    """A group as decided so far. `id` is its incarnation, which is never used again."""

    id: int
    name: str
    settings: GroupSettings
    start: int
    """The group begins after this position; -1 is the beginning of the log."""
    watermark: int
    """The last position whose targets are known."""
    created_ms: int
    owner: str = ""
    targets_count: int = 0
    parked_count: int = 0
    lanes: tuple[str, ...] = ()
    """The lanes that targets of the group were ever in."""
    token_floor: int = 0
    """No lease of a row that is gone had a higher number. The numbers of new rows begin here, so a
    worker that holds a lease of the row before never fits the one that is made again."""

    def without(self, token: int) -> Group:
        """The group once a row with this number is gone."""
        return self._replace(
            targets_count=self.targets_count - 1, token_floor=max(self.token_floor, token)
        )


class GroupInvalid(NamedTuple):
    """A value of a group is not possible: 400 `group_invalid`."""

    detail: str


class GroupExists(NamedTuple):
    """A group of this name with other settings exists."""

    group: Group


class GroupMade(NamedTuple):
    """The group exists now; `fresh` when this request made it."""

    group: Group
    fresh: bool


class LimitExceeded(NamedTuple):
    """The request goes past a bound; `limit` is its name."""

    limit: str
    maximum: int


def check_group_name(name: str, *, of_mesh: bool = False) -> GroupInvalid | None:
    """Why a name is none. Names with `:` belong to meshes, which the server makes itself."""
    if _NAME.fullmatch(name) or (of_mesh and _MESH_NAME.fullmatch(name)):
        return None
    return GroupInvalid(
        f"the group name {name[:140]!r} is not of the form [A-Za-z0-9._-]{{1,128}}, or is . or .."
    )


def check_settings(settings: GroupSettings, limits: GroupLimits) -> GroupInvalid | None:
    """The first setting that is not possible."""
    return (
        _check_sources(settings.sources)
        or _check_texts("names", settings.names)
        or within("lease_ms", settings.lease_ms, limits.lease_ms_min, limits.lease_ms_max)
        or within("retries_max", settings.retries_max, 0, RETRIES_MAX)
        or within("lost_max", settings.lost_max, 0, RETRIES_MAX)
        or _check_backoff(settings.backoff)
        or _check_start(settings.start)
    )


def within(name: str, value: int, lowest: int, highest: int) -> GroupInvalid | None:
    """Why a number is out of its bounds."""
    if lowest <= value <= highest:
        return None
    return GroupInvalid(f"{name} is {value}, and must be from {lowest} to {highest}")


def check_text(name: str, value: str, length_max: int = TEXT_MAX) -> GroupInvalid | None:
    """Why a short text (the name of a worker, a lane, an event) is none."""
    if not value or len(value) > length_max:
        return GroupInvalid(f"{name} has {len(value)} characters, and must have 1 to {length_max}")
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in value):
        return GroupInvalid(f"{name} {value[:40]!r} has a control character")
    return None


def _check_sources(sources: Iterable[str]) -> GroupInvalid | None:
    given = tuple(sources)
    if not 1 <= len(given) <= SOURCES_MAX:
        return GroupInvalid(f"sources has {len(given)} entries, and must have 1 to {SOURCES_MAX}")
    for source in given:
        glob = parse_glob(source)
        if isinstance(glob, BadGlob):
            return GroupInvalid(f"sources has {source[:140]!r}: {glob.detail}")
    return None


def _check_texts(name: str, values: tuple[str, ...]) -> GroupInvalid | None:
    if len(values) > NAMES_MAX:
        return GroupInvalid(f"{name} has {len(values)} entries, and must have at most {NAMES_MAX}")
    return next(filter(None, (check_text(name, value) for value in values)), None)


def _check_backoff(backoff: Backoff) -> GroupInvalid | None:
    refused = within("backoff.cap_ms", backoff.cap_ms, 0, DELAY_MS_MAX) or within(
        "backoff.base_ms", backoff.base_ms, 0, backoff.cap_ms
    )
    if refused is None and not 0 <= backoff.jitter <= 1:
        return GroupInvalid(f"backoff.jitter is {backoff.jitter}, and must be from 0 to 1")
    return refused


def _check_start(start: Literal["first", "now"] | int) -> GroupInvalid | None:
    return within("start", start, -1, POSITION_MAX) if isinstance(start, int) else None


def decide_group(
    current: Group | None,
    name: str,
    settings: GroupSettings,
    *,
    group_id: int,
    groups_count: int,
    limits: GroupLimits,
    head: int,
    now_ms: int,
    owner: str = "",
) -> GroupMade | GroupExists | GroupInvalid | LimitExceeded:
    """Make a group, or find the one that is there. `head` is the last position of the log."""
    settings = settings.canonical()
    if current is not None:
        if current.settings == settings:
            return GroupMade(current, fresh=False)
        return GroupExists(current)
    if groups_count >= limits.groups_max:
        return LimitExceeded("groups_max", limits.groups_max)
    start = _start_position(settings.start, head)
    if start > head:
        return GroupInvalid(f"start is {start}, and the log ends at {head}")
    group = Group(group_id, name, settings, start, start, now_ms, owner)
    return GroupMade(group, fresh=True)


def _start_position(start: Literal["first", "now"] | int, head: int) -> int:
    if isinstance(start, int):
        return start
    return -1 if start == "first" else head


# Filters: how operators name many targets at once


class FilterInvalid(NamedTuple):
    """A filter is not understood: 400 `filter_invalid`."""

    detail: str


class Filter(NamedTuple):
    """The targets that an operation is about; a field that is None matches every target."""

    target: Glob | None = None
    source: Glob | None = None
    blocked: bool | None = None
    lane: Glob | None = None

    def matches(self, target: str, source: str, lane: str, *, blocked: bool) -> bool:
        """Whether a target is among them."""
        return (
            (self.blocked is None or self.blocked is blocked)
            and (self.target is None or self.target.matches(target))
            and (self.source is None or self.source.matches(source))
            and (self.lane is None or self.lane.matches(lane))
        )


def make_filter(
    *,
    target: str | None = None,
    source: str | None = None,
    blocked: bool | None = None,
    lane: str | None = None,
) -> Filter | FilterInvalid:
    """A filter of exact texts and globs, or what is wrong with one of them."""
    globs: list[Glob | None] = []
    for field, text in (("target", target), ("source", source), ("lane", lane)):
        glob = None if text is None else filter_glob(field, text)
        if isinstance(glob, FilterInvalid):
            return glob
        globs.append(glob)
    return Filter(globs[0], globs[1], blocked, globs[2])


def filter_glob(field: str, text: str) -> Glob | FilterInvalid:
    """A glob of a filter. No regular expression ever runs on the server's loop."""
    if len(text) > TEXT_MAX * 4:
        return FilterInvalid(f"{field} has {len(text)} characters, and at most {TEXT_MAX * 4} fit")
    if _REGULAR.search(text):
        return FilterInvalid(
            f"{field} {text[:140]!r} is a regular expression, and filters are globs: "
            f"use {suggest_glob(text)[:140]!r}"
        )
    glob = parse_glob(text)
    if isinstance(glob, BadGlob):
        return FilterInvalid(f"{field} {text[:140]!r}: {glob.detail}")
    return glob


# What no glob and hardly any path has. A target whose name looks like this can be named exactly,
# in `targets`. A `.*` behind other characters is left alone: `reports.*` is a good glob.
_REGULAR = re.compile(
    r"^\^|(?<!^)\$$|\\|(?:^|/)\.\*|\.[+?]|\(\?|\[[^]]+\]|\([^)]*\|[^)]*\)|\{\d+,?\d*\}"
)
_WILD = re.compile(r"(?:\\[dDwWsSbB]|\.|\[[^]]*\]|\([^)]*\))(?:[*+?]|\{[^}]*\})?\??")
_RUNS_OF_STARS = re.compile(r"\*{2,}")


def suggest_glob(regular: str) -> str:
    """The glob that comes closest to a regular expression, for the sentence that refuses it."""
    begins, ends = regular.startswith("^"), regular.endswith("$") and not regular.endswith("\\$")
    body = regular[1 if begins else 0 : -1 if ends else None]
    # Characters that a backslash makes ordinary are put aside while the wildcards are replaced.
    kept: list[str] = []

    body = re.sub(r"\\([^A-Za-z0-9])", lambda found: _put_aside(kept, found[1]), body)
    # A bare dot is far more often meant as a dot than as any character.
    body = re.sub(r"\.(?![*+?{])", lambda _: _put_aside(kept, "."), body)
    body = _WILD.sub("*", body)
    body = ("" if begins else "*") + body + ("" if ends else "*")
    body = re.sub("\0(\\d+)\0", lambda found: kept[int(found[1])], body)
    segments = [_RUNS_OF_STARS.sub("*", segment) for segment in body.split("/") if segment]
    segments = ["*" if segment in (".", "..") else segment for segment in segments]
    if len(segments) > 1 and segments[-1] == "*":
        segments[-1] = "**"
    return "/".join(segments) or "**"


def _put_aside(kept: list[str], text: str) -> str:
    """A mark for a text that stays as it is."""
    kept.append(text)
    return f"\0{len(kept) - 1}\0"
