"""Read the settings of a server: defaults, then a TOML file, the environment, and options.

The file has a table for each layer: [server], [http], [limits], [subscriptions], [auth], [groups],
[mesh], [sessions], [shares], [store].
A key that no layer knows is an error: a misspelt limit is no limit. An environment variable is
FENCEPOST_ and the table and key in capitals, as in FENCEPOST_SERVER_LONG_POLL_MS. Beside the tables
the file may have any number of [[retention]] policies, [[principals]] and [[producer_rules]]; the
last two may come as JSON in FENCEPOST_PRINCIPALS and FENCEPOST_PRODUCER_RULES instead.

[store] is of one of two kinds: a `folder` is SQLite's, a `url` is PostgreSQL's. The last source
that names one chooses the kind, and a key that only the other kind knows is an error too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import platformdirs

from fencepost.cli.profile import read_toml
from fencepost.clock import SystemClock
from fencepost.http.settings import HttpSettings
from fencepost.protocol.globs import BadGlob, parse_glob
from fencepost.protocol.groups import GroupLimits
from fencepost.protocol.limits import Limits
from fencepost.protocol.retention import Policy, Retention
from fencepost.protocol.sends import MeshLimits
from fencepost.protocol.sessions import SessionLimits
from fencepost.protocol.shares import Shares
from fencepost.server.auth import Auth, AuthConfigError
from fencepost.server.settings import (
    AuthSettings,
    GrantSettings,
    PrincipalSettings,
    ProducerRuleSettings,
    ServerSettings,
)
from fencepost.server.subscriptions.settings import SubscriptionSettings
from fencepost.store.opener import AnyStoreSettings
from fencepost.store.settings import PostgresSettings, SqliteSettings

T = TypeVar("T")

TABLES: dict[str, type] = {
    "server": ServerSettings,
    "http": HttpSettings,
    "limits": Limits,
    "subscriptions": SubscriptionSettings,
    "auth": AuthSettings,
    "groups": GroupLimits,
    "mesh": MeshLimits,
    "sessions": SessionLimits,
    "shares": Shares,
    "store": SqliteSettings,
}
_COMPOSED = {
    *("http", "limits", "subscriptions", "auth", "groups", "mesh", "sessions", "shares"),
    *("principals", "producer_rules"),
    *("folder", "url", "vfs", "synchronous", "retention"),
}
"""Fields that are tables of their own, or not for a file to set: an answer is durable, always."""
_MAY_BE_ZERO = {
    "long_poll_ms",
    "sse_ms",
    "drain_ms",
    "log_retention_ms",
    "key_retention_s",
    "producer_retention_s",
    "loop_commit_us_max",
    "chunk_cache_bytes",
    "start_wait_ms",
    "worker_port",
    *("jwt_leeway_s", "appends_per_s", "claims_per_s", "raises_per_s", "open_claims_max"),
    *(field.name for field in fields(Shares)),
    *("abandon_ratio_max", "audit_refusals_per_s", "sends_per_s", "delivery_inline_bytes_max"),
}
ENGINES: dict[str, type] = {"SQLite": SqliteSettings, "PostgreSQL": PostgresSettings}
"""The kinds that [store] can be of."""
_PLACES = ("folder", "url")
"""Settings that say where a store is; which of them is given decides its kind."""
SCHEMES = ("postgresql://", "postgres://")
_LISTS: dict[str, type] = {"principals": PrincipalSettings, "producer_rules": ProducerRuleSettings}


class SettingsError(Exception):
    """A setting is unknown or has the wrong type: the message says which and what is allowed."""


def default_folder() -> Path:
    """The data folder unless a setting names another."""
    return Path(platformdirs.user_data_dir("fencepost", appauthor=False))


def load(
    config: Path | None,
    *,
    folder: Path | None,
    url: str | None = None,
    overrides: dict[str, dict[str, Any]],
) -> tuple[ServerSettings, AnyStoreSettings]:
    """The settings of a server. `overrides` are the command line's, by table and key."""
    tables = _from_file(config) if config is not None else {}
    policies = tuple(_policy(entry) for entry in tables.pop("retention", ()))
    lists = {name: _entries(name, tables.pop(name, [])) for name in _LISTS}
    environment = _from_environment(os.environ)
    places = (
        _place(tables, f"[store] of {config}"),
        _place(environment, "the environment"),
        {"folder": folder, "url": url},
    )
    for table, values in (*environment.items(), *overrides.items()):
        tables.setdefault(table, {}).update(values)
    groups = _make("groups", GroupLimits, tables)
    mesh = _make("mesh", MeshLimits, tables)
    shares = _make("shares", Shares, tables)
    server = ServerSettings(
        http=_make("http", HttpSettings, tables),
        limits=_make("limits", Limits, tables),
        subscriptions=_make("subscriptions", SubscriptionSettings, tables),
        auth=_auth(tables, lists),
        groups=groups,
        mesh=mesh,
        shares=shares,
        sessions=_make("sessions", SessionLimits, tables),
        **_checked("server", ServerSettings, tables),
    )
    store = _store(places, tables, policies)
    return server, replace(store, groups=groups, mesh=mesh, shares=shares)


def load_store(config: Path | None, *, folder: Path | None, url: str | None) -> AnyStoreSettings:
    """The store alone, for a command that works on it without a server."""
    if folder is not None and url is not None:
        raise SettingsError(TWO_STORES)
    return load(config, folder=folder, url=url, overrides={})[1]


TWO_STORES = "--data is a SQLite folder and --store a PostgreSQL database: give one of them"


def _place(tables: dict[str, dict[str, Any]], source: str) -> dict[str, Any]:
    """Take out of [store] what says where the store is."""
    store = tables.get("store", {})
    place = {name: store.pop(name) for name in _PLACES if name in store}
    if len(place) > 1:
        raise SettingsError(
            f"{source} has both a folder (SQLite) and a url (PostgreSQL): give one of them"
        )
    return place


def _store(
    places: tuple[dict[str, Any], ...],
    tables: dict[str, dict[str, Any]],
    policies: tuple[Policy, ...],
) -> AnyStoreSettings:
    named = [place for source in places for place in source.items() if place[1] is not None]
    where, value = named[-1] if named else ("folder", default_folder())
    if not isinstance(value, str | Path):
        # Not shown: whatever it is, a url may hold a password.
        raise SettingsError(f"[store] {where} must be of type str")
    if where == "folder":
        checked = _checked("store", SqliteSettings, tables)
        return SqliteSettings(folder=Path(value).expanduser(), retention=policies, **checked)
    url = str(value)
    if not url.startswith(SCHEMES):
        raise SettingsError(
            "the url of a store begins with postgresql://; for SQLite name a folder with --data"
        )
    return PostgresSettings(
        url=url, retention=policies, **_checked("store", PostgresSettings, tables)
    )


def _from_file(config: Path) -> dict[str, dict[str, Any]]:
    tables = read_toml(config, f"the config file {config}", SettingsError)
    for name, values in tables.items():
        if name in ("retention", *_LISTS) and isinstance(values, list):
            continue
        if name not in TABLES or not isinstance(values, dict):
            known = ", ".join(f"[{table}]" for table in TABLES)
            raise SettingsError(f"the config file {config} has {name!r}; it may have {known}")
    return tables


def _from_environment(environment: os._Environ[str]) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    kinds = [*TABLES.items(), *(("store", kind) for kind in ENGINES.values())]
    for table, kind in kinds:
        for field in fields(kind):
            value = environment.get(f"FENCEPOST_{table}_{field.name}".upper())
            if value is not None and (field.name not in _COMPOSED or field.name in _PLACES):
                tables.setdefault(table, {})[field.name] = value
    return tables


def _entries(name: str, entries: object) -> tuple[Any, ...]:
    """The [[principals]] or [[producer_rules]]: the environment's, else the file's."""
    variable = f"FENCEPOST_{name}".upper()
    where = f"[[{name}]]"
    if variable in os.environ:
        where = variable
        try:
            entries = msgspec.json.decode(os.environ[variable])
        except msgspec.DecodeError as error:
            raise SettingsError(f"{variable} is not JSON: {error}") from None
    if not isinstance(entries, list):
        raise SettingsError(f"{where} is a list of tables")
    return tuple(_entry(where, _LISTS[name], entry) for entry in entries)


def _entry(where: str, kind: type[T], entry: object) -> T:
    """One table of a list; a text stands for a list of one."""
    if not isinstance(entry, dict):
        raise SettingsError(f"{where} is a list of tables")
    known = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for key, value in entry.items():
        if key not in known:
            raise SettingsError(f"{where} has no setting {key!r}; it has {', '.join(known)}")
        given[key] = value
        if key == "grants":
            grants = value if isinstance(value, list) else [value]
            given[key] = [_entry(f"{where} grants", GrantSettings, grant) for grant in grants]
        elif known[key].startswith("tuple") and isinstance(value, str):
            given[key] = [value]
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{where}: {error}") from None


def _auth(tables: dict[str, dict[str, Any]], lists: dict[str, tuple[Any, ...]]) -> AuthSettings:
    values: dict[str, Any] = {**lists, **_checked("auth", AuthSettings, tables)}
    auth = AuthSettings(**values)
    if auth != AuthSettings():
        try:
            Auth(auth, SystemClock())
        except AuthConfigError as error:
            raise SettingsError(str(error)) from None
    return auth


def _make(table: str, kind: type[T], tables: dict[str, dict[str, Any]]) -> T:
    try:
        return kind(**_checked(table, kind, tables))
    except ValueError as error:
        raise SettingsError(f"[{table}] {error}") from None


def _checked(table: str, kind: type, tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    known = {field.name: field.type for field in fields(kind) if field.name not in _COMPOSED}
    checked: dict[str, Any] = {}
    for key, value in tables.get(table, {}).items():
        if key not in known:
            raise SettingsError(_unknown(table, kind, key, known))
        if str(known[key]) == "tuple[str, ...]":
            checked[key] = _texts(table, key, value)
            continue
        wanted = {"int": int, "float": float, "str": str, "bool": bool}[str(known[key])]
        try:
            checked[key] = msgspec.convert(value, wanted, strict=False)
        except msgspec.ValidationError:
            raise SettingsError(
                f"[{table}] {key} must be of type {wanted.__name__}, not {value!r}"
            ) from None
        if wanted in (int, float) and not _in_range(key, checked[key]):
            raise SettingsError(f"[{table}] {key} must be greater than zero, not {value!r}")
    return checked


def _unknown(table: str, kind: type, key: str, known: Iterable[str]) -> str:
    if table == "store":
        [own] = (engine for engine, settings in ENGINES.items() if settings is kind)
        for other, settings in ENGINES.items():
            if key not in _COMPOSED and key in {field.name for field in fields(settings)}:
                return (
                    f"[store] {key!r} is a setting of {other}, and this store is {own}: take it out"
                    " (a folder makes it SQLite, a url PostgreSQL)"
                )
    return f"[{table}] has no setting {key!r}; it has {', '.join(sorted(known))}"


def _texts(table: str, key: str, value: object) -> tuple[str, ...]:
    """Several texts: a list in a file, separated by commas in the environment."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise SettingsError(f"[{table}] {key} must be a list of texts, not {value!r}")
    return tuple(value)


_BOUNDS = {"max_age_s": "age_s", "max_bytes": "bytes", "max_messages": "messages"}


def _policy(entry: object) -> Policy:
    """A [[retention]] table: a pattern, and one bound or more."""
    if not isinstance(entry, dict) or not isinstance(entry.get("match"), str):
        raise SettingsError('[[retention]] needs match = "a pattern of stream paths"')
    glob = parse_glob(entry["match"])
    if isinstance(glob, BadGlob):
        raise SettingsError(f"[[retention]] match = {entry['match']!r}: {glob.detail}")
    bounds: dict[str, int] = {}
    for key, value in entry.items():
        if key == "match":
            continue
        if key not in _BOUNDS:
            raise SettingsError(
                f"[[retention]] has no setting {key!r}; it has match, {', '.join(_BOUNDS)}"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SettingsError(f"[[retention]] {key} must be a whole number from 1, not {value!r}")
        bounds[_BOUNDS[key]] = value
    if not bounds:
        raise SettingsError(f"[[retention]] needs one of {', '.join(_BOUNDS)}")
    return Policy(glob, Retention(**bounds))


def _in_range(key: str, number: float) -> bool:
    return number > 0 or (number == 0 and key in _MAY_BE_ZERO)  # and not NaN
