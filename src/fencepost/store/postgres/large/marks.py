"""Marks: the names that requests and large commits have in common, as numbers.

Two names may have one number; whoever waits for the wrong one merely waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

from fencepost.protocol.commits import Commit, Part


def _mark(kind: bytes, *names: str) -> int:
    hashed = blake2b(kind, digest_size=8)
    for name in names:
        hashed.update(b"\0" + name.encode())
    return int.from_bytes(hashed.digest(), "big", signed=True)


def of_path(path: str) -> int:
    """A stream."""
    return _mark(b"stream", path)


def of_part(part: Part) -> int:
    """A staged part."""
    return _mark(b"part", *part)


def of_writer(name: str) -> int:
    """A writer."""
    return _mark(b"writer", name)


def of_key(principal: str, key: str) -> int:
    """The key of a whole commit."""
    return _mark(b"key", principal, key)


def of_lane(name: str) -> int:
    """Requests that must keep their order, whatever they are about."""
    return _mark(b"lane", name)


def of_commit(request: Commit) -> Iterator[int]:
    """Everything that a commit names."""
    paths, parts = request.names()
    yield from map(of_path, paths)
    yield from map(of_part, parts)
    if request.writer is not None:
        yield of_writer(request.writer.name)
    if request.key is not None:
        yield of_key(request.principal, request.key)
