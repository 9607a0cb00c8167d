"""Requests about subscriptions, as generators without I/O, and the records that they answer with.

What a subscription and a wake are is in docs/guides/subscriptions.md. A claim whose answer was lost
is held until its lease ends, under the worker's own name. An ack that ends a wake and is repeated
finds the wake over, and then counts as done: `WakeAcked.uncertain` says that this was so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from fencepost.client.effects import Operation
from fencepost.client.errors import SubscriptionNotFoundError, WakeFencedError, require
from fencepost.client.http import PATH_SAFE, Request
from fencepost.client.operations import decoded, encode_json
from fencepost.client.retry import Kind, exchange
from fencepost.client.settings import JSON, ClientSettings

ROOT = "/v1/stream/__ds"


class SubscribedStream(msgspec.Struct, frozen=True, kw_only=True):
    """A stream that a subscription watches, and how far its workers are."""

    path: str
    link_type: Literal["explicit", "glob"]
    acked_offset: str


class WebhookInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where a subscription calls, and the key that it signs with."""

    url: str
    signing: dict[str, str] = {}


class SubscriptionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A subscription: what it watches, whom it wakes, and where its delivery stands."""

    id: str
    type: Literal["webhook", "pull-wake"]
    lease_ttl_ms: int
    created_at: datetime
    status: Literal["active", "failed"]
    pattern: str | None = None
    webhook: WebhookInfo | None = None
    wake_stream: str | None = None
    description: str | None = None
    streams: list[SubscribedStream] = []
    """The first 10,000 streams, in the order of their paths; a list of subscriptions has none."""
    streams_total: int | None = None
    pending_streams: int | None = None
    generation: int | None = None
    holder: str | None = None
    attempts: int = 0
    next_attempt_at: datetime | None = None
    lease_expires_at: datetime | None = None
    is_new: bool | None = None
    """After `create`: whether it made the subscription; None when a lost answer hides that."""


class WakeStream(msgspec.Struct, frozen=True, kw_only=True):
    """A stream with work: read it after `acked_offset`; at the wake it ended at `tail_offset`."""

    path: str
    acked_offset: str
    tail_offset: str
    link_type: Literal["explicit", "glob"] = "glob"
    has_pending: bool = True


class WakeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A wake as a claim answers it."""

    wake_id: str
    generation: int
    token: str
    streams: list[WakeStream]
    lease_ttl_ms: int


class WebhookDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """A wake as a webhook receives it."""

    subscription_id: str
    wake_id: str
    generation: int
    streams: list[WakeStream]
    callback_url: str
    callback_token: str


class WakeAcked(msgspec.Struct, frozen=True, kw_only=True):
    """An ack was applied; `next_wake` says whether there is more work already."""

    next_wake: bool = False
    uncertain: bool = False
    """Whether an attempt before may have ended the wake: then this one found it over."""


def configuration(
    *,
    pattern: str | None,
    streams: Iterable[str],
    webhook: str | None,
    wake_stream: str | None,
    lease_ttl_ms: int | None,
    description: str | None,
) -> dict[str, Any]:
    """The body of a PUT; raises `InvalidArgumentError` for what no subscription can be."""
    listed = list(streams)
    require(pattern is not None or bool(listed), "a subscription has a pattern, streams, or both")
    require(
        (webhook is None) != (wake_stream is None),
        "a subscription has a webhook or a wake_stream, and not both",
    )
    values = {
        "type": "webhook" if wake_stream is None else "pull-wake",
        "pattern": pattern,
        "streams": listed or None,
        "webhook": None if webhook is None else {"url": webhook},
        "wake_stream": wake_stream,
        "lease_ttl_ms": lease_ttl_ms,
        "description": description,
    }
    return {name: value for name, value in values.items() if value is not None}


def check_id(name: str) -> str:
    """The id of a subscription."""
    require(name != "", "the id of a subscription is not empty")
    return name


def _target(name: str, what: str = "") -> str:
    escaped = quote(name, safe="")
    return f"{ROOT}/subscriptions/{escaped}{what}"


def create(
    settings: ClientSettings, name: str, values: Mapping[str, Any]
) -> Operation[SubscriptionInfo]:
    """Make a subscription; fine if it exists with this configuration."""
    headers = (("Content-Type", JSON),)
    request = Request("PUT", _target(name), headers, encode_json(values))
    answer = yield from exchange(settings, request, Kind.WRITE)
    made = decoded(answer.response, SubscriptionInfo)
    is_new = True if answer.response.status == 201 else None if answer.uncertain else False
    return msgspec.structs.replace(made, is_new=is_new)


def show(settings: ClientSettings, name: str) -> Operation[SubscriptionInfo]:
    """A subscription as it stands."""
    answer = yield from exchange(settings, Request("GET", _target(name)), Kind.READ)
    return decoded(answer.response, SubscriptionInfo)


def delete(settings: ClientSettings, name: str) -> Operation[None]:
    """End a subscription; if an attempt may have arrived, finding none means it is done."""
    try:
        yield from exchange(settings, Request("DELETE", _target(name)), Kind.WRITE)
    except SubscriptionNotFoundError as error:
        if not error.uncertain:
            raise


def link(settings: ClientSettings, name: str, paths: Iterable[str]) -> Operation[None]:
    """Watch more streams, from their tails on."""
    body = encode_json({"streams": list(paths)})
    request = Request("POST", _target(name, "/streams"), (("Content-Type", JSON),), body)
    yield from exchange(settings, request, Kind.WRITE)


def unlink(settings: ClientSettings, name: str, path: str) -> Operation[None]:
    """Watch a stream no longer by its name; a pattern may still take it in."""
    target = _target(name, "/streams/" + quote(path, safe=PATH_SAFE))
    yield from exchange(settings, Request("DELETE", target), Kind.WRITE)


def claim(settings: ClientSettings, name: str, worker: str) -> Operation[WakeInfo]:
    """Take the work of a subscription."""
    body = encode_json({"worker": worker})
    request = Request("POST", _target(name, "/claim"), (("Content-Type", JSON),), body)
    answer = yield from exchange(settings, request, Kind.WRITE)
    return decoded(answer.response, WakeInfo)


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """What proves that a worker has a wake: where to speak about it, and as whom."""

    name: str
    wake_id: str
    generation: int
    token: str
    endpoint: Literal["ack", "callback"]

    def request(self, endpoint: str, **values: Any) -> Request:
        """A request of the worker."""
        body = encode_json({"wake_id": self.wake_id, "generation": self.generation, **values})
        headers = (("Content-Type", JSON), ("Authorization", f"Bearer {self.token}"))
        return Request("POST", _target(self.name, f"/{endpoint}"), headers, body)


def ack(
    settings: ClientSettings, ticket: Ticket, offsets: Mapping[str, str], *, done: bool
) -> Operation[WakeAcked]:
    """Say how far the work is; without `done` the lease begins anew."""
    acks = [{"stream": path, "offset": offset} for path, offset in offsets.items()]
    request = ticket.request(ticket.endpoint, acks=acks, done=done)
    try:
        answer = yield from exchange(settings, request, Kind.WRITE)
    except WakeFencedError as error:
        if done and error.uncertain:
            return WakeAcked(uncertain=True)
        raise
    return decoded(answer.response, WakeAcked)


def release(settings: ClientSettings, ticket: Ticket) -> Operation[None]:
    """Give the work back; if an attempt may have arrived, finding the wake over means it is."""
    try:
        yield from exchange(settings, ticket.request("release"), Kind.WRITE)
    except WakeFencedError as error:
        if not error.uncertain:
            raise


def webhook_keys(settings: ClientSettings) -> Operation[dict[str, Any]]:
    """The public keys that webhooks are signed with, as a JSON Web Key Set."""
    answer = yield from exchange(settings, Request("GET", f"{ROOT}/jwks.json"), Kind.READ)
    found: dict[str, Any] = decoded(answer.response, dict[str, Any])
    return found
