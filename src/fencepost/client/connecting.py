"""The front door: `connect` and `connect_async` make a client from a URL."""

from __future__ import annotations

import os
import ssl as tls
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from fencepost.client.aio import AsyncClient
from fencepost.client.errors import require
from fencepost.client.http import Address, parse_url
from fencepost.client.proxies import parse_proxy, proxy_of
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
    proxy: str | Literal[False] | None = None,
) -> Client:
    """A client for the server at `url`. Nothing is sent before it is used.

    Args:
        token: Sent as `Authorization: Bearer`; a text, or a function that gives one.
        headers: Sent with every request; values may be functions as well.
        params: Added to every query string; values may be functions as well.
        timeouts: Seconds that connecting and answers may take.
        retries: How often and how long a request that may be repeated is repeated.
        on_error: Told of every attempt that failed, refused by the server or without an answer:
            it may return `RetryWith(headers=...)` to send the request again, False to give up at
            once, or None for what happens without it. A producer has an `on_error` of its own.
        ssl: How to check an https server; the system's certificates by default.
        proxy: The URL of a proxy; False: none. By default the one that `HTTP_PROXY`,
            `HTTPS_PROXY` or `ALL_PROXY` names, unless the server is on this machine or in
            `NO_PROXY`.
    """
    return Client(_settings(url, token, headers, params, timeouts, retries, on_error, ssl, proxy))


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
    proxy: str | Literal[False] | None = None,
) -> AsyncClient:
    """The async twin of `connect`; functions for values may be async here."""
    return AsyncClient(
        _settings(url, token, headers, params, timeouts, retries, on_error, ssl, proxy)
    )


def _settings(
    url: str,
    token: Value | None,
    headers: Mapping[str, Value] | None,
    params: Mapping[str, Value] | None,
    timeouts: Timeouts | None,
    retries: Retries | None,
    on_error: OnFailure | None,
    ssl: tls.SSLContext | None,
    proxy: str | Literal[False] | None,
) -> ClientSettings:
    retries, timeouts = retries or Retries(), timeouts or Timeouts()
    require(isinstance(retries, Retries), f"retries is a fencepost.Retries, not {retries!r}")
    require(isinstance(timeouts, Timeouts), f"timeouts is a fencepost.Timeouts, not {timeouts!r}")
    return ClientSettings(
        address=_proxied(parse_url(url, ssl), proxy),
        token=token,
        headers=dict(headers or {}),
        params=dict(params or {}),
        timeouts=timeouts,
        retries=retries,
        on_error=on_error,
    )


def _proxied(address: Address, given: str | Literal[False] | None) -> Address:
    if given is False:
        return address
    if given is not None:
        return replace(address, proxy=parse_proxy(given))
    secure = address.ssl is not None
    found = proxy_of(address.host, address.port, secure=secure, environment=os.environ)
    return replace(address, proxy=found)
