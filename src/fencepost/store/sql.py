"""Named SQL: each query lives in a .sql file under a line that says its name.

A query begins at `-- name: some_name`; comment lines below it are its description.
"""

from __future__ import annotations

import re
from importlib import resources

_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)


def load_queries(package: str, file: str) -> dict[str, str]:
    """The queries of one file, by name."""
    text = resources.files(package).joinpath(file).read_text()
    parts = _NAME.split(text)[1:]
    names = parts[::2]
    assert len(set(names)) == len(names), f"a query name is used twice in {file}"
    return {name: _statement(body) for name, body in zip(names, parts[1::2], strict=True)}


def load_migrations(package: str) -> list[tuple[int, str, str]]:
    """The migrations of a package in order: number, name, SQL."""
    found = []
    for entry in resources.files(package).iterdir():
        match = re.fullmatch(r"(\d{4})_(\w+)\.sql", entry.name)
        if match:
            found.append((int(match[1]), match[2], entry.read_text()))
    return sorted(found)


def _statement(body: str) -> str:
    lines = [line for line in body.splitlines() if not line.lstrip().startswith("--")]
    return "\n".join(lines).strip().rstrip(";")
