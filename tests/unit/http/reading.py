"""Reads bytes as a connection does, without a socket: by heads that repeat, or by the parser alone.

`both_ways` is what tests of `heads.py` rest on: whatever arrives, and in whatever pieces, both give
the same requests and end the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fencepost.clock import SystemClock
from fencepost.http.front import Front
from fencepost.http.messages import Answer, Request
from fencepost.http.parser import RequestReader, Stopped, Upgraded
from fencepost.http.settings import HttpSettings
from fencepost.http.wire import Refusal

SPACED = ("bad_request", "the request line has more than one space between its parts")


class Reading(NamedTuple):
    """What came of some bytes: the requests, and how the reading ended."""

    requests: list[tuple[object, ...]]
    end: tuple[object, ...]


class ParserAlone(RequestReader):
    """A reader that keeps no head."""

    __slots__ = ()

    def _keep_head(self, _data: bytes, at: int) -> int:
        return at


class _Nothing:
    def handle(self, request: Request, answer: Callable[[Answer], None]) -> None:
        raise AssertionError("the reader hands its requests to the test")


def new_front(settings: HttpSettings) -> Front:
    """What a reader shares with others, with a clock that stands still."""
    loop = asyncio.new_event_loop()
    try:
        return Front(_Nothing(), settings, SystemClock(), loop)
    finally:
        loop.close()


def read(kind: type[RequestReader], front: Front, pieces: Sequence[bytes | memoryview]) -> Reading:
    """The requests in these pieces, and what the reader says to the last one that it takes."""
    requests: list[tuple[object, ...]] = []

    def take(request: Request, keep_alive: bool, version: str) -> None:
        parts = (request.method, request.path, request.query, list(request.headers.items()))
        more = (request.repeated, bytes(request.body), request.peer, request.upgrade is None)
        requests.append((*parts, *more, keep_alive, version))

    reader = kind(front, "somewhere", take)
    end: tuple[object, ...] = ("open",)
    for piece in pieces:
        if not piece:
            continue
        try:
            reader.feed(piece)
        except Refusal as refusal:
            end = (refusal.status, refusal.code, refusal.detail, refusal.headers)
            break
        except Stopped:
            end = ("stopped",)
            break
        except Upgraded as upgraded:
            end = ("upgraded", upgraded.rest)
            break
        end = ("open", reader.between_requests, reader.body_bytes_left, reader.continue_owed)
    reader.close()
    return Reading(requests, end)


def is_alike(one: Reading, other: Reading) -> bool:
    """Whether two readings of the same bytes agree.

    Where a head is split, the parser does not know where its request line stands, and refuses it
    when any line like it in what was fed has two spaces. How far it looks depends on the pieces, so
    either may refuse such bytes sooner; what was read before that is the same.
    """
    if one == other:
        return True
    shorter, longer = sorted((one, other), key=lambda reading: len(reading.requests))
    before = longer.requests[: len(shorter.requests)]
    return shorter.end[1:3] == SPACED and shorter.requests == before


def both_ways(front: Front, pieces: Sequence[bytes | memoryview]) -> tuple[Reading, Reading]:
    """By heads that repeat, and by the parser alone."""
    return read(RequestReader, front, pieces), read(ParserAlone, front, pieces)
