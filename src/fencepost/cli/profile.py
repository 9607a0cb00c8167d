"""Find the server for a command: by an option, the environment, a file, else this machine.

The file is TOML with `url` and `token`, in the user's configuration folder or where
FENCEPOST_CONFIG says. A token in the file belongs to the url beside it: it is not sent to a server
that was named by an option or the environment, unless the file names that one too, or none.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

DEFAULT_URL = "http://127.0.0.1:4437"
URL_VARIABLE, TOKEN_VARIABLE, FILE_VARIABLE = "FENCEPOST_URL", "FENCEPOST_TOKEN", "FENCEPOST_CONFIG"


class ProfileError(Exception):
    """The configuration file cannot be used. Correct it, or name another one."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A server, and what to show it."""

    url: str
    token: str | None = field(default=None, repr=False)


def default_file() -> Path:
    """Where the file is unless FENCEPOST_CONFIG says otherwise."""
    return platformdirs.user_config_path("fencepost", appauthor=False) / "client.toml"


def resolve(url: str | None, token: str | None, environment: Mapping[str, str]) -> Profile:
    """The server to talk to; an empty variable counts as none."""
    url = url or environment.get(URL_VARIABLE) or None
    token = token or environment.get(TOKEN_VARIABLE) or None
    if url is not None and token is not None:
        return Profile(url, token)
    named = environment.get(FILE_VARIABLE)
    known = _from_file(
        Path(named).expanduser() if named else default_file(), must_exist=bool(named)
    )
    chosen = url or known.get("url") or DEFAULT_URL
    if token is None and _same(chosen, known.get("url") or chosen):
        token = known.get("token")
    return Profile(chosen, token)


def _same(one: str, other: str) -> bool:
    return one.rstrip("/") == other.rstrip("/")


def _from_file(file: Path, *, must_exist: bool) -> dict[str, str]:
    with suppress(PermissionError):  # Reading it then says so.
        if not file.exists():
            if must_exist:
                raise ProfileError(f"there is no file {file}, which {FILE_VARIABLE} names")
            return {}
    values = read_toml(file, f"the file {file}", ProfileError)
    for name, value in values.items():
        if name not in ("url", "token"):
            raise ProfileError(f"the file {file} has {name!r}; it may have url and token")
        if not isinstance(value, str):
            raise ProfileError(f"{name} in the file {file} must be a text, not {value!r}")
    return values


def read_toml(file: Path, name: str, error: type[Exception]) -> dict[str, Any]:
    """The contents of a TOML file; raises `error` with a sentence that calls the file `name`."""
    try:
        with file.open("rb") as opened:
            return tomllib.load(opened)
    except OSError as failure:
        raise error(f"{name} cannot be read: {failure.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as failure:
        raise error(f"{name} is not TOML: {failure}") from None
