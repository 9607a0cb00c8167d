"""The front door: `connect` and `connect_async` make a client from a URL."""

from __future__ import annotations

import ssl as tls
from collections.abc import Mapping

from fencepost.client.aio import AsyncClient
from fencepost.client.http import parse_url
from fencepost.client.settings import ClientSettings, OnFailure, Retries, Timeouts, Value
from fencepost.client.sync import Client


def connect(
    url: str,
    *,
    token: Value | None = None,
    headers: Mapping[str, Value] | None = None,
    params: Mapping[str, Value] | None = None,
    timeouts: Timeouts | None = None,
    retries: Retries | None = None,
    on_error: OnFailure | None = None,
    ssl: tls.SSLContext | None = None,
) -> Client:
    """A client for the server at `url`. Nothing is sent before it is used.

    Args:
        token: Sent as `Authorization: Bearer`; a text, or a function that gives one.
        headers: Sent with every request; values may be functions as well.
        params: Added to every query string; values may be functions as well.
        timeouts: Seconds that connecting and answers may take.
        retries: How often and how long a request that may be repeated is repeated.
        on_error: Told of every answer that is an error, not of lost connections: it may return
            `RetryWith(headers=...)` to send the request again, False to
            give up at once, or None for what happens without it.
        ssl: How to check an https server; the system's certificates by default.
    """
    return Client(_settings(url, token, headers, params, timeouts, retries, on_error, ssl))


def connect_async(
    url: str,
    *,
    token: Value | None = None,
    headers: Mapping[str, Value] | None = None,
    params: Mapping[str, Value] | None = None,
    timeouts: Timeouts | None = None,
    retries: Retries | None = None,
    on_error: OnFailure | None = None,
    ssl: tls.SSLContext | None = None,
) -> AsyncClient:
    """The async twin of `connect`; functions for values may be async here."""
    return AsyncClient(_settings(url, token, headers, params, timeouts, retries, on_error, ssl))


def _settings(
    url: str,
    token: Value | None,
    headers: Mapping[str, Value] | None,
    params: Mapping[str, Value] | None,
    timeouts: Timeouts | None,
    retries: Retries | None,
    on_error: OnFailure | None,
    ssl: tls.SSLContext | None,
) -> ClientSettings:
    return ClientSettings(
        address=parse_url(url, ssl),
        token=token,
        headers=dict(headers or {}),
        params=dict(params or {}),
        timeouts=timeouts or Timeouts(),
        retries=retries or Retries(),
        on_error=on_error,
    )
