"""A server with principals, and a way to be each of them."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from tests.engines import server_at
from tests.serving import ServerProcess

ALL = ("read", "append", "create", "close", "delete", "claim")


def token(name: str) -> str:
    return f"fp_{name}_0123456789abcdef"


def principal(name: str, *grants: tuple[str, Iterable[str]], **more: object) -> dict[str, Any]:
    """A principal as FENCEPOST_PRINCIPALS has it: `grants` are a glob and verbs each."""
    return {
        "name": name,
        "token_sha256": hashlib.sha256(token(name).encode()).hexdigest(),
        "grants": [{"streams": [glob], "verbs": list(verbs)} for glob, verbs in grants],
        **more,
    }


ROOT = principal("root", ("**", ["admin"]))
ANN = principal("ann", ("orders/**", ALL), ("wakes/ann", ALL))
BOB = principal("bob", ("bills/**", ALL), ("wakes/bob", ALL))
ADA = principal("ada", ("orders/**", ["read", "append", "claim"]))


class As:
    """A client of a server, with the token of a principal or without one."""

    def __init__(self, url: str, name: str | None) -> None:
        headers = {} if name is None else {"Authorization": f"Bearer {token(name)}"}
        self.client = httpx.Client(base_url=url, headers=headers, timeout=30)

    def __enter__(self) -> "As":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.client.get(path, **more)

    def create(self, path: str, **headers: str) -> httpx.Response:
        sent = {"Content-Type": "application/json", **named(headers)}
        return self.client.put(f"/v1/stream/{path}", headers=sent)

    def append(self, path: str, value: object = 1, **headers: str) -> httpx.Response:
        sent = {"Content-Type": "application/json", **named(headers)}
        return self.client.post(f"/v1/stream/{path}", content=json.dumps(value), headers=sent)

    def send(
        self, path: str, producer: str, epoch: int, seq: int, value: object = 1, **headers: str
    ) -> httpx.Response:
        """An append with producer headers."""
        tuple_ = {"producer_id": producer, "producer_epoch": str(epoch), "producer_seq": str(seq)}
        return self.append(path, value, **tuple_, **headers)

    def commit(self, *items: dict[str, Any], **headers: str) -> httpx.Response:
        body = {"appends": [{"content_type": "application/json", **item} for item in items]}
        return self.client.post("/v1/commit", json=body, headers=named(headers))


def asked_token(view: As, stream: object, **more: object) -> httpx.Response:
    """The answer to a request for a read token."""
    return view.client.post("/v1/tokens", json={"stream": stream, **more})


def named(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


def code(answer: httpx.Response) -> tuple[int, str]:
    """Status and code of a refusal."""
    return answer.status_code, answer.json()["code"] if answer.content else ""


FORBIDDEN = (403, "forbidden")


class Place:
    """A running server, seen by whom one likes."""

    def __init__(self, process: ServerProcess) -> None:
        self.process = process
        self._views: dict[str | None, As] = {}

    def __call__(self, name: str | None) -> As:
        if name not in self._views:
            self._views[name] = As(self.process.url, name)
        return self._views[name]

    def audit(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self("root").get("/v1/stream/__audit").json()
        return found

    def restart(self) -> None:
        self.process.stop()
        self.close()
        self.process.restart()

    def close(self) -> None:
        for view in self._views.values():
            view.client.close()
        self._views.clear()


@contextmanager
def place(
    store: Path | str,
    *principals: dict[str, Any],
    rules: Iterable[dict[str, Any]] = (),
    arguments: Iterable[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    **settings: object,
) -> Iterator[Place]:
    """A server with these principals on a folder or a database; `settings` are those of [auth]."""
    given = {
        **environment,
        "FENCEPOST_PRINCIPALS": json.dumps(principals),
        "FENCEPOST_PRODUCER_RULES": json.dumps(list(rules)),
        **{f"FENCEPOST_AUTH_{key.upper()}": str(value) for key, value in settings.items()},
    }
    sent = ("--long-poll-ms", "200", *arguments)
    with server_at(store, sent, given) as process:
        found = Place(process)
        try:
            yield found
        finally:
            found.close()
