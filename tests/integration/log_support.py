"""What tests of the log share: a small client over one connection, and ways to read to the end."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.body.splitlines()]

    @property
    def next(self) -> int:
        return int(self.headers["log-next"])

    @property
    def at_head(self) -> bool:
        return self.headers.get("log-up-to-date") == "true"


class Client:
    """One connection to a server."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(
        self, method: str, target: str, body: str | bytes | None = None, **headers: str
    ) -> Reply:
        self._connection.request(
            method, target, body, {name.replace("_", "-"): value for name, value in headers.items()}
        )
        answer = self._connection.getresponse()
        named = {name.lower(): value for name, value in answer.getheaders()}
        return Reply(answer.status, named, answer.read())

    def create(self, path: str, content_type: str = JSON, **headers: str) -> None:
        reply = self.ask("PUT", f"/v1/stream/{quote(path)}", Content_Type=content_type, **headers)
        assert reply.status == 201, reply.body

    def append(
        self, path: str, body: str | bytes, content_type: str = JSON, **headers: str
    ) -> Reply:
        reply = self.ask(
            "POST", f"/v1/stream/{quote(path)}", body, Content_Type=content_type, **headers
        )
        assert reply.status in (200, 204), reply.body
        return reply

    def log(self, query: str = "", **headers: str) -> Reply:
        return self.ask("GET", f"/v1/log?{query}", **headers)

    def read_all(self, query: str = "", after: int = -1) -> list[dict[str, Any]]:
        """Every line from `after` to the head, or to `until` when the query names it."""
        return [json.loads(line) for line in self.raw_lines(query, after)]

    def raw_lines(self, query: str = "", after: int = -1) -> Iterator[bytes]:
        while True:
            reply = self.log(f"{query}&after={after}")
            assert reply.status == 200, reply.body
            yield from reply.body.splitlines()
            if reply.at_head or reply.next == after or f"until={reply.next}" in query:
                return
            after = reply.next

    def plan(self, query: str = "") -> Any:
        reply = self.ask("GET", f"/v1/log/plan?{query}")
        assert reply.status == 200, reply.body
        return reply.json()

    def close(self) -> None:
        self._connection.close()
