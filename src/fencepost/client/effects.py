"""The requests that an operation makes of its driver: the border between core and world.

An operation is a generator. It yields one of these, is sent the answer (or has the failure thrown
into it as `ConnectionFailedError`), and returns its result. The two drivers are the only code that
carries an effect out, which is why sync and async cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

import msgspec

from fencepost.client.http import Request, Response

T = TypeVar("T")


class Send(msgspec.Struct, frozen=True):
    """Send a request and give back the whole response."""

    request: Request


class Open(msgspec.Struct, frozen=True):
    """Send a request and give back a `Channel` once the headers of its response are there."""

    request: Request


class Next(msgspec.Struct, frozen=True):
    """The next piece of a channel's body; None when it ended as it should."""

    channel: Channel


class Shut(msgspec.Struct, frozen=True):
    """Give a channel up."""

    channel: Channel


class Sleep(msgspec.Struct, frozen=True):
    """Wait so many seconds."""

    seconds: float


class Call(msgspec.Struct, frozen=True):
    """Call something the user gave us; the async driver awaits what it returns, if it can be."""

    function: Callable[[], Any]


class Channel:
    """A response whose body is still arriving; what it is read from is the driver's business."""

    __slots__ = ("connection", "request", "response")

    def __init__(self, request: Request, response: Response, connection: Any) -> None:
        self.request = request
        self.response = response
        self.connection = connection


Effect = Send | Open | Next | Shut | Sleep | Call
Operation = Generator[Effect, Any, T]
