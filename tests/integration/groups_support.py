"""Groups over HTTP in tests: a group with streams of its own, and a worker's requests in a line."""

from __future__ import annotations

import itertools
import json
import re
import urllib.request
from typing import Any

from tests.integration.raw import Connection
from tests.serving import ServerProcess
from tests.unit.http.rawhttp import Reply

JSON = "application/json"
_names = itertools.count()


def fresh() -> str:
    """A name that no other test uses."""
    return f"group-{next(_names)}"


def body_of(reply: Reply, status: int = 200) -> dict[str, Any]:
    assert reply.status == status, (reply.status, reply.body)
    found: dict[str, Any] = json.loads(reply.body)
    return found


def metrics_of(server: ServerProcess, group: str) -> dict[str, float]:
    """The metrics of a group, without its name in the labels."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(rf'^fencepost_group_(\w+){{group="{group}"(?:,(.*))?}} (\S+)$', text, re.M)
    return {f"{name} {labels}".strip(): float(value) for name, labels, value in found}


class Team:
    """A group over the streams below its own name."""

    def __init__(self, wire: Connection, **settings: Any) -> None:
        self.wire = wire
        self.name = fresh()
        self.settings = {
            "sources": [f"{self.name}/**"],
            "backoff": {"kind": "fixed", "base_ms": 0, "cap_ms": 1_000, "jitter": 0.0},
            **settings,
        }
        body_of(self.put(), 201)

    def put(self, **changes: Any) -> Reply:
        body = json.dumps({**self.settings, **changes}).encode()
        return self.wire.ask("PUT", f"/v1/groups/{self.name}", body=body)

    def post(self, what: str, **body: Any) -> Reply:
        raw = json.dumps(body).encode()
        return self.wire.ask("POST", f"/v1/groups/{self.name}/{what}", body=raw)

    def get(self, what: str = "", query: str = "") -> dict[str, Any]:
        path = f"/v1/groups/{self.name}" + (f"/{what}" if what else "") + query
        return body_of(self.wire.ask("GET", path))

    def append(self, stream: str, value: Any = None, **headers: str) -> Reply:
        """Append an event to a stream of this group, which is made for it."""
        data = json.dumps({"name": "Happened", "data": value, "meta": {}}).encode()
        given = {"Content-Type": JSON, "Stream-Auto-Create": "true", **headers}
        sent = [f"{name.replace('_', '-')}: {text}" for name, text in given.items()]
        return self.wire.ask("POST", f"/v1/stream/{self.name}/{stream}", *sent, body=data)

    def fill(self, *streams: str) -> list[int]:
        """One event for each of these streams; their positions."""
        replies = [self.append(stream, stream) for stream in streams]
        assert {reply.status for reply in replies} == {204}, replies
        return [int(reply.headers["stream-position"]) for reply in replies]

    def claim(self, worker: str = "ann", **more: Any) -> list[dict[str, Any]]:
        leases: list[dict[str, Any]] = body_of(self.post("claim", worker=worker, **more))["leases"]
        return leases

    def ack(self, lease: dict[str, Any], **more: Any) -> dict[str, Any]:
        item = {"token": lease["token"], "at": lease["read_to"], **more}
        found: dict[str, Any] = body_of(self.post("ack", items=[item]))["items"][0]
        return found

    def fail(self, lease: dict[str, Any], **more: Any) -> dict[str, Any]:
        failure = {"position": lease["events"][0]["position"], "error": "boom", **more}
        return self.ack(lease, at=None, failure=failure)
