"""Every limit of the HTTP front end, by name, with its unit and its default.

What a client can make the front end hold or wait for is bounded by one of these numbers, and going
past one has its own answer. The program that starts the front end makes the settings once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """What one client may ask of the HTTP/1.1 front end and of the ASGI adapter.

    Seconds are measured by a sweep that runs every `sweep_seconds`, so a timeout fires within one
    sweep of its time, early or late.
    """

    target_bytes_max: int = 8 * 1024
    """The longest request target; beyond it 414 `target_too_long`."""

    header_bytes_max: int = 32 * 1024
    """All header lines of a request, or all its trailers; beyond it 431 `header_too_large`."""

    header_count_max: int = 100
    """Header lines in a request; beyond it 431 `header_too_large`."""

    body_bytes_max: int = 16 * 1024 * 1024
    """The largest request body; beyond it 413 `body_too_large`, before it is read whole."""

    open_body_bytes_max: int = 64 * 1024
    """The largest body of a client that sends no token of a principal; beyond it 401."""

    open_bodies_bytes_max: int = 32 * 1024 * 1024
    """Bytes of bodies in flight on connections that have shown no token of a principal; beyond it
    503 `too_many_bodies`."""

    bodies_bytes_max: int = 256 * 1024 * 1024
    """Bytes of all bodies in flight; beyond it 503 `too_many_bodies`. Those of up to
    `open_body_bytes_max` are counted now and then: a 32nd of this may come in between."""

    bodies_bytes_per_principal_max: int = 128 * 1024 * 1024
    """The same of one principal."""

    connections_max: int = 10_000
    """Connections served at once; one more is answered 503 `too_many_connections` and closed."""

    refusals_open_max: int = 64
    """Connections that may linger to read that 503; past it they are cut without an answer."""

    backlog_connections: int = 2048
    """Connections the kernel may queue while the loop is busy."""

    pipeline_depth_max: int = 64
    """Unanswered requests of one connection; beyond it the connection is no longer read."""

    pipeline_bytes_max: int = 4 * 1024 * 1024
    """Bodies of unanswered requests of one connection; beyond it the connection is not read."""

    header_timeout_seconds: float = 20.0
    """From the first byte of a request to the end of its headers; beyond it 408."""

    body_grace_seconds: float = 20.0
    """The time in which a body must keep the pace of `body_bytes_per_second_min`, again and again:
    bytes that came before do not count."""

    body_bytes_per_second_min: int = 1024
    """The slowest sender that is waited for; a slower one gets 408."""

    body_seconds_max: float = 600.0
    """How long a body may take at any pace; beyond it 408."""

    idle_timeout_seconds: float = 75.0
    """A connection without a request is closed after this."""

    write_stall_seconds: float = 30.0
    """A client that takes none of the bytes waiting for it in this time is disconnected."""

    write_buffer_bytes_high: int = 256 * 1024
    """Bytes waiting for a client above which streams are not pulled and requests are not read."""

    write_buffer_bytes_low: int = 64 * 1024
    """Bytes waiting for a client below which both go on."""

    linger_seconds: float = 2.0
    """After a refusal, how long to swallow what the client still sends so that it can read why."""

    linger_bytes_max: int = 4 * 1024 * 1024
    """After a refusal, how many bytes to swallow at most."""

    sweep_seconds: float = 0.25
    """How often timeouts are looked for and the Date header is renewed."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            if getattr(self, limit.name) <= 0:
                raise ValueError(f"{limit.name} must be greater than zero")
        if self.write_buffer_bytes_low > self.write_buffer_bytes_high:
            raise ValueError("write_buffer_bytes_low must not exceed write_buffer_bytes_high")


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSocketSettings:
    """What one WebSocket may cost."""

    message_bytes_max: int = 2 << 20
    """The largest message; beyond it the connection is closed with 1009."""
    fragments_max: int = 1_024
    """Fragments of one message; beyond it the connection is closed with 1008."""
    outgoing_bytes_max: int = 8 << 20
    """Bytes that may wait for a client that does not read; beyond it the connection is cut."""
    close_seconds: float = 5.0
    """How long to wait for the client's answer to a close."""
