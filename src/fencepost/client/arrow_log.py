"""The log as Arrow: a page at a time, as the bytes that came, for programs that have `pyarrow`.

A page is a whole Arrow IPC stream. It is not looked into here: the client does not need `pyarrow`,
and what reads columns (Spark's workers) takes the bytes without a copy.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fencepost.client.effects import Operation
from fencepost.client.errors import ProtocolError
from fencepost.client.http import Request, target_of
from fencepost.client.retry import Kind, exchange
from fencepost.client.settings import ClientSettings

ARROW = "application/vnd.apache.arrow.stream"


class ArrowPage(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the log: go on after `next`; `head` is the newest position there is."""

    data: bytes
    """An Arrow IPC stream; empty when a wait ended without news."""
    next: int
    head: int
    up_to_date: bool
    pruned: int | None
    """The newest position in the range whose row is gone, if pruned rows were to be skipped."""


def arrow_page(
    settings: ClientSettings,
    query: list[tuple[str, str]],
    *,
    after: int | Literal["now"],
    wait: bool,
) -> Operation[ArrowPage]:
    """The next page after a position; with `wait`, as soon as there is something in it."""
    asked = [*query, ("after", str(after))]
    if wait:
        asked.append(("live", "long-poll"))
    request = Request("GET", target_of("/v1/log", asked), (("Accept", ARROW),), live=wait)
    response = (yield from exchange(settings, request, Kind.READ)).response
    following, head = response.integer("log-next"), response.integer("log-head")
    if following is None or head is None:
        raise ProtocolError("the answer has no Log-Next: this server may have no log")
    return ArrowPage(
        data=response.body,
        next=following,
        head=head,
        up_to_date=response.is_true("log-up-to-date"),
        pruned=response.integer("log-pruned"),
    )
