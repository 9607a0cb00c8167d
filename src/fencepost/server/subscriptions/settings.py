"""Every limit of subscriptions, by name, with its unit and its default."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fencepost.protocol.timing import LEASE_MS_MAX, LEASE_MS_MIN

LOCALHOST_CHOICES = ("auto", "allow", "refuse")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionSettings:
    """What subscriptions may cost, and where webhooks may go."""

    webhook_allow_localhost: str = "auto"
    """Whether webhooks may go to http://localhost and http://127.0.0.x: `allow`, `refuse`, or
    `auto`, which allows it when the server itself listens on this machine only and has no
    principals."""

    subscriptions_max: int = 10_000
    """Subscriptions that may exist; one more is refused with `limit_exceeded`."""

    explicit_streams_max: int = 10_000
    """Streams that one subscription may name; links by pattern are bounded by the streams."""

    name_bytes_max: int = 256
    """Bytes of a subscription's id, and of a worker's name."""

    pattern_bytes_max: int = 1_024
    """Bytes of a pattern."""

    description_bytes_max: int = 4_096
    """Bytes of a description."""

    url_bytes_max: int = 2_048
    """Bytes of a webhook's URL."""

    acks_max: int = 10_000
    """Acks that one request may hold."""

    lease_ms_min: int = LEASE_MS_MIN
    lease_ms_max: int = LEASE_MS_MAX
    """The bounds of `lease_ttl_ms`."""

    wake_streams_max: int = 1_000
    """Pending streams that one wake lists; what is left over is for the next wake."""

    shown_streams_max: int = 10_000
    """Streams that one GET of a subscription lists; `?after=PATH` shows the next ones."""

    deliveries_max: int = 64
    """Webhook requests under way at once; more wait for their turn."""

    deliveries_per_principal_max: int = 32
    """Webhook requests of one principal under way at once; principals take turns."""

    deliveries_per_host_max: int = 16
    """Webhook requests to one host and port under way at once."""

    delivery_timeout_ms: int = 15_000
    """How long one webhook request may take as a whole; never longer than the lease."""

    resolve_timeout_ms: int = 2_000
    """How long a webhook's host may take to resolve when its subscription is created."""

    response_bytes_max: int = 64 * 1024
    """How much of a webhook's answer is read."""

    token_ttl_ms: int = 24 * 3_600_000
    """How long a callback or claim token can be used, however often its lease is extended."""

    calm_ms: int = 1_000
    """After a failed commit, how long no new wake is issued, lest a full disk be hammered."""

    def __post_init__(self) -> None:
        if self.webhook_allow_localhost not in LOCALHOST_CHOICES:
            raise ValueError(
                f"webhook_allow_localhost is one of {', '.join(LOCALHOST_CHOICES)},"
                f" not {self.webhook_allow_localhost!r}"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value <= 0:
                raise ValueError(f"{field.name} must be greater than zero")
        if self.lease_ms_min > self.lease_ms_max:
            raise ValueError("lease_ms_min must not exceed lease_ms_max")
