"""Meshes over HTTP in tests: a mesh of its own for each test, and requests in a line."""

from __future__ import annotations

import itertools
from typing import Any

import httpx

_names = itertools.count()


class Shop:
    """A mesh with the members ann and bea, who listen to the topic alerts, and a queue jobs."""

    def __init__(self, http: httpx.Client, name: str | None = None, **settings: Any) -> None:
        self.http = http
        self.name = name or f"shop-{next(_names)}"
        self.root = f"/v1/mesh/{self.name}"
        made = http.put(self.root, json=settings)
        assert made.status_code == 201, made.text
        for path in ("members/ann", "members/bea", "topics/alerts", "queues/jobs"):
            assert http.put(f"{self.root}/{path}").status_code == 201
        for member in ("ann", "bea"):
            assert http.put(f"{self.root}/topics/alerts/members/{member}").status_code == 201

    def send(self, message_id: str | None = "m-1", **fields: Any) -> httpx.Response:
        body = {"sender": "bob", "kind": "topic", "ref": "alerts", "body": "hello", **fields}
        headers = {} if message_id is None else {"Idempotency-Key": message_id}
        return self.http.post(f"{self.root}/send", json=body, headers=headers)

    def get(self, path: str = "", **query: Any) -> Any:
        answer = self.http.get(self.root + path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, status: int = 200, **query: Any) -> Any:
        answer = self.http.post(self.root + path, params=query)
        assert answer.status_code == status, answer.text
        return answer.json()

    def stream(self, path: str) -> str:
        return f"/v1/stream/__mesh/{self.name}/{path}"

    def held(self, path: str) -> list[dict[str, Any]]:
        """The messages of a stream of the mesh."""
        answer = self.http.get(self.stream(path), params={"offset": "-1"})
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()
        return found

    def checked(self) -> list[dict[str, Any]]:
        """Everything that the orphan check finds."""
        found: list[dict[str, Any]] = []
        after: dict[str, Any] = {}
        while True:
            page = self.post("/check", limit=2, **after)
            found += page["findings"]
            if page["next"] is None:
                return found
            after = {"after": page["next"]}


def code(answer: httpx.Response) -> tuple[int, str]:
    """The status and the code of a refusal."""
    return answer.status_code, answer.json()["code"]
