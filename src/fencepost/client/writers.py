"""Requests about writers and about the parts that they stage, as generators without I/O.

What a writer is, and what the server holds it to, is in docs/reference/http.md. A commit in its
name is `operations.commit`.
"""

from __future__ import annotations

import msgspec

from fencepost.client.effects import Operation
from fencepost.client.errors import PartError, WriterNotFoundError
from fencepost.client.http import Request, target_of
from fencepost.client.operations import decoded
from fencepost.client.results import WriterInfo
from fencepost.client.retry import Kind, exchange
from fencepost.client.settings import JSON, ClientSettings

_ROOT = "/v1/writers/"


def open_writer(
    settings: ClientSettings, name: str, query: str, *, allow_new: bool, after: int | None = None
) -> Operation[WriterInfo]:
    """Begin a run. An attempt whose answer was lost began one too, which no program uses."""
    asked = {"query": query, "allow_new": allow_new}
    body = msgspec.json.encode(asked if after is None else {**asked, "after": after})
    request = Request("POST", target_of(_ROOT + name), (("Content-Type", JSON),), body)
    answer = yield from exchange(settings, request, Kind.WRITE)
    return decoded(answer.response, WriterInfo)


def find_writer(settings: ClientSettings, name: str) -> Operation[WriterInfo]:
    """A writer as it stands."""
    request = Request("GET", target_of(_ROOT + name))
    answer = yield from exchange(settings, request, Kind.READ)
    return decoded(answer.response, WriterInfo)


def forget_writer(settings: ClientSettings, name: str) -> Operation[None]:
    """Remove a writer; if an attempt may have arrived, finding none means it is done."""
    try:
        yield from exchange(settings, Request("DELETE", target_of(_ROOT + name)), Kind.WRITE)
    except WriterNotFoundError as error:
        if not error.uncertain:
            raise


def unstage(settings: ClientSettings, txn: str, part: str) -> Operation[None]:
    """Drop a part; if an attempt may have arrived, finding none means it is done."""
    request = Request("DELETE", target_of(f"/v1/staging/{txn}/{part}"))
    try:
        yield from exchange(settings, request, Kind.WRITE)
    except PartError as error:
        if error.code != "part_missing" or not error.uncertain:
            raise
