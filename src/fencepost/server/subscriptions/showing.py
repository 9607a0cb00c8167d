"""How subscriptions and wakes look in JSON, for those who ask and for those who are woken."""

from __future__ import annotations

import heapq
from datetime import UTC, datetime
from urllib.parse import quote

from fencepost.protocol.subscriptions import Link, Seen, Subscription
from fencepost.server.subscriptions.keys import SigningKey


def shown_streams(subscription: Subscription) -> list[tuple[Link, Seen]]:
    """The streams of the current wake that are still what they were and not done with."""
    return [
        (link, seen)
        for seen in subscription.wake.snapshot
        if (link := subscription.links.get(seen.path)) is not None
        and link.stream_id == seen.stream_id
        and link.is_pending
    ]


def show_wake(subscription: Subscription) -> list[dict[str, object]]:
    """The streams of the current wake, as a worker is told about them."""
    return [
        {
            "path": link.path,
            "link_type": link.type,
            "acked_offset": str(link.acked),
            "tail_offset": str(seen.tail),
            "has_pending": seen.tail.bytes > link.acked.bytes,
        }
        for link, seen in shown_streams(subscription)
    ]


def callback_url(subscription: Subscription) -> str:
    """Where a webhook's worker reports back."""
    return f"{subscription.base_url}/subscriptions/{quote(subscription.name, safe='')}/callback"


def show_subscription(
    subscription: Subscription, signing: SigningKey, *, after: str, streams_max: int
) -> dict[str, object]:
    """A subscription as GET and PUT answer it, with the streams whose path comes after `after`."""
    config, wake = subscription.config, subscription.wake
    paths = heapq.nsmallest(streams_max, (path for path in subscription.links if path > after))
    return {
        "id": subscription.name,
        "subscription_id": subscription.name,
        "type": config.type,
        "pattern": config.pattern,
        "streams": [_show_link(subscription.links[path]) for path in paths],
        "streams_total": len(subscription.links),
        "webhook": None
        if config.webhook_url is None
        else {
            "url": config.webhook_url,
            "signing": {
                "alg": "ed25519",
                "kid": signing.kid,
                "jwks_url": f"{subscription.base_url}/jwks.json",
            },
        },
        "wake_stream": config.wake_stream,
        "lease_ttl_ms": config.lease_ttl_ms,
        "created_at": _time(subscription.created_ms),
        "status": wake.status,
        "description": config.description,
        "generation": wake.generation,
        "pending_streams": len(subscription.pending),
        "holder": wake.holder,
        "attempts": wake.attempts,
        "next_attempt_at": _time(wake.next_attempt_ms),
        "lease_expires_at": _time(wake.lease_until_ms),
    }


def _show_link(link: Link) -> dict[str, object]:
    return {"path": link.path, "link_type": link.type, "acked_offset": str(link.acked)}


def _time(instant_ms: int | None) -> str | None:
    if instant_ms is None:
        return None
    instant = datetime.fromtimestamp(instant_ms / 1000, UTC)
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")
