"""Where settings come from: defaults, then a TOML file, then the environment, then options.

The file has a table for each layer: [server], [http], [limits], [subscriptions], [store]. A key
that no layer knows is an error, because a misspelt limit is no limit. An environment variable is
FENCEPOST_ and the table and key in capitals, as in FENCEPOST_SERVER_LONG_POLL_MS. Beside the tables
the file may have any number of [[retention]] policies, which only a file can hold.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import platformdirs

from fencepost.protocol.globs import BadGlob, parse_glob
from fencepost.protocol.limits import Limits
from fencepost.protocol.retention import Policy, Retention
from fencepost.server.settings import HttpSettings, ServerSettings
from fencepost.server.subscriptions.settings import SubscriptionSettings
from fencepost.store.sqlite.settings import SqliteSettings

T = TypeVar("T")

TABLES: dict[str, type] = {
    "server": ServerSettings,
    "http": HttpSettings,
    "limits": Limits,
    "subscriptions": SubscriptionSettings,
    "store": SqliteSettings,
}
_COMPOSED = {"http", "limits", "subscriptions", "folder", "vfs", "synchronous", "retention"}
"""Fields that are tables of their own, or not for a file to set: an answer is durable, always."""
_MAY_BE_ZERO = {
    "long_poll_ms",
    "sse_ms",
    "drain_ms",
    "log_retention_ms",
    "key_retention_s",
    "producer_retention_s",
    "loop_commit_us_max",
}


class SettingsError(Exception):
    """A setting is unknown or has the wrong type: the message says which and what is allowed."""


def default_folder() -> Path:
    """Where data lives when nobody says."""
    return Path(platformdirs.user_data_dir("fencepost", appauthor=False))


def load(
    config: Path | None, *, folder: Path | None, overrides: dict[str, dict[str, Any]]
) -> tuple[ServerSettings, SqliteSettings]:
    """The settings of a server. `overrides` are the command line's, by table and key."""
    tables = _from_file(config) if config is not None else {}
    policies = tuple(_policy(entry) for entry in tables.pop("retention", ()))
    for table, values in (*_from_environment(os.environ).items(), *overrides.items()):
        tables.setdefault(table, {}).update(values)
    file_folder = tables.get("store", {}).pop("folder", None)
    if not isinstance(file_folder, str | None):
        raise SettingsError(f"[store] folder must be of type str, not {file_folder!r}")
    chosen = folder or (Path(file_folder).expanduser() if file_folder else default_folder())
    server = ServerSettings(
        http=_make("http", HttpSettings, tables),
        limits=_make("limits", Limits, tables),
        subscriptions=_make("subscriptions", SubscriptionSettings, tables),
        **_checked("server", ServerSettings, tables),
    )
    store = _checked("store", SqliteSettings, tables)
    return server, SqliteSettings(folder=chosen, retention=policies, **store)


def _from_file(config: Path) -> dict[str, dict[str, Any]]:
    try:
        with config.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"the config file {config} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the config file {config} is not TOML: {error}") from None
    for name, values in tables.items():
        if name == "retention" and isinstance(values, list):
            continue
        if name not in TABLES or not isinstance(values, dict):
            known = ", ".join(f"[{table}]" for table in TABLES)
            raise SettingsError(f"the config file {config} has {name!r}; it may have {known}")
    return tables


def _from_environment(environment: os._Environ[str]) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    for table, kind in TABLES.items():
        for field in fields(kind):
            value = environment.get(f"FENCEPOST_{table}_{field.name}".upper())
            if value is not None and (field.name not in _COMPOSED or field.name == "folder"):
                tables.setdefault(table, {})[field.name] = value
    return tables


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
            raise SettingsError(
                f"[{table}] has no setting {key!r}; it has {', '.join(sorted(known))}"
            )
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
