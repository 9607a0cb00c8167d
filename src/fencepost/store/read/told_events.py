"""Finding the events that computed targets were told of, for all leases of an answer together.

One query finds what each target was told of next, a second one the appends in which those events
lie, and a third one reads as many of these as the answer takes. An append that holds events of many
targets is read once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from fencepost.protocol.told import Stretch, Told, stretches
from fencepost.store.group_contract import EventSpan
from fencepost.store.read.log_selection import run
from fencepost.store.sql import Connection, Row


class Place(NamedTuple):
    """The append that an event lies in."""

    row: int
    """Its position."""
    path: str
    content_type: str


class Ahead(NamedTuple):
    """What lies ahead of the targets of some leases."""

    pieces: Mapping[int, list[Told | Stretch]]
    """By the number of the lease."""
    until: Mapping[int, int]
    """How far the pieces reach."""
    places: Mapping[int, Place]
    """Where the events are, those that are gone from the log left out."""
    rows: Mapping[int, Row]
    """The appends that were read, by their positions."""


NOTHING_AHEAD = Ahead({}, {}, {}, {})


def look_ahead(
    connection: Connection, spans: Mapping[int, EventSpan], rows_max: int, bytes_max: int
) -> Ahead:
    """What the targets of some leases were told of next, up to `rows_max` events of each."""
    numbers = list(spans)
    asked = [(*(spans[n].told or ()), spans[n].after, spans[n].until) for n in numbers]
    told: dict[int, list[Told]] = {n: [] for n in numbers}
    for place, *row in run(connection, "told_ahead", leases=json.dumps(asked), limit=rows_max):
        told[numbers[place]].append(Told(*row))
    # Where there may be more than was read, what lies behind it is not known here.
    until = {
        n: found[-1].position if len(found) == rows_max else spans[n].until
        for n, found in told.items()
    }
    pieces = {n: stretches(found, spans[n].after, until[n]) for n, found in told.items()}
    places, sizes = _places(connection, {one.position for found in told.values() for one in found})
    fetched = _that_fit([one for n in numbers for one in told[n]], places, sizes, bytes_max)
    rows = run(connection, "events_at", positions=json.dumps(fetched)) if fetched else []
    return Ahead(pieces, until, places, {row[0]: row for row in rows})


def _places(connection: Connection, positions: set[int]) -> tuple[dict[int, Place], dict[int, int]]:
    """The appends that hold some positions, and how large each append is."""
    places: dict[int, Place] = {}
    sizes: dict[int, int] = {}
    if positions:
        asked = json.dumps(sorted(positions))
        for position, row, size, path, content_type in run(
            connection, "rows_over", positions=asked
        ):
            places[position] = Place(row, path, content_type)
            sizes[row] = size
    return places, sizes


def _that_fit(
    told: list[Told], places: Mapping[int, Place], sizes: Mapping[int, int], bytes_max: int
) -> list[int]:
    """The first of the appends, as many as an answer takes, and at least one."""
    chosen: dict[int, None] = {}
    left_bytes = bytes_max
    for one in told:
        place = places.get(one.position)
        if place is None or place.row in chosen:
            continue
        if left_bytes <= 0:
            break
        chosen[place.row] = None
        left_bytes -= sizes[place.row]
    return list(chosen)
