"""A real `fencepost outbox run` process for tests: on a folder, beside a real server.

The daemon is started as a user starts it, asked over its socket, and stopped or killed. A restart
keeps the folder.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.serving import ServerProcess

READY = re.compile(r"takes sends on the socket (\S+?)(?: and on http://127\.0\.0\.1:(\d+))?\s*$")
WAIT_SECONDS_MAX = 60.0


class OutboxProcess(ServerProcess):
    """One daemon. `url` is the path of its socket, `port` that of its port if it has one."""

    ready_line = READY

    def __init__(
        self,
        folder: Path,
        server_url: str,
        meshes: Sequence[str],
        member: str = "",
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder, arguments=arguments, environment=environment)
        self._server_url = server_url
        self._meshes = meshes
        self._member = member
        self.http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(folder / "outbox.sock")),
            base_url="http://localhost",
            timeout=60,
        )

    def __exit__(self, *what: Any) -> None:
        self.http.close()
        super().__exit__(*what)

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "fencepost", "outbox", "run"]
        for mesh in self._meshes:
            command += ["--mesh", mesh]
        if self._member:
            command += ["--as", self._member]
        return [*command, "--data", str(self.data), "--url", self._server_url, *self.arguments]

    # Asking

    def send(self, message_id: str | None = "m-1", **fields: Any) -> httpx.Response:
        mesh = fields.pop("mesh", None)
        body = {"kind": "topic", "ref": "alerts", "body": "hello", **fields}
        headers = {} if message_id is None else {"Idempotency-Key": message_id}
        params = {} if mesh is None else {"mesh": mesh}
        return self.http.post("/v1/send", json=body, headers=headers, params=params)

    def get(self, path: str, **query: Any) -> Any:
        answer = self.http.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def rows(self, **query: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/v1/outbox", limit=1000, **query)["rows"]
        return found

    def counts(self) -> dict[str, int]:
        found: dict[str, int] = self.get("/v1/health")["rows"]
        return found

    def inbox(self) -> list[dict[str, Any]]:
        found = self.get("/v1/inbox", limit=1000)["messages"]
        return [message["message"] for message in found]

    def row(self, message_id: str = "m-1") -> dict[str, Any]:
        [found] = [row for row in self.rows() if row["client_message_id"] == message_id]
        return found

    def settled(self, message_id: str = "m-1") -> dict[str, Any]:
        """The row of an id once it is done, dead or aborted."""

        def look() -> dict[str, Any] | None:
            row = self.row(message_id)
            return None if row["status"] in _OPEN else row

        found: dict[str, Any] = until(look)
        return found


_OPEN = ("pending", "inflight")


def until(look: Callable[[], Any], seconds_max: float = WAIT_SECONDS_MAX) -> Any:
    """What `look` finds as soon as that is something; fails after a long time without."""
    ends = time.monotonic() + seconds_max
    while time.monotonic() < ends:
        found = look()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"nothing was found within {seconds_max} s")
