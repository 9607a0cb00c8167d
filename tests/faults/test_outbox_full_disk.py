"""A real disk that fills up under the outbox daemon: what was answered is delivered, once.

The disk is a tmpfs of a few megabytes. Where this process may not mount one, the test ends early:
`test_daemon_deliveries` and `test_daemon_rows` show the same on a file system that counts.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

import fencepost
from tests.integration.mesh_support import Shop
from tests.outboxing import OutboxProcess, until
from tests.serving import ServerProcess

BODY = "x" * 20_000
ROOM_BYTES, BALLAST_BYTES = 9_000_000, 6_000_000


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A file system of a few megabytes; false where none may be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={ROOM_BYTES}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def test_sends_that_were_answered_outlive_a_full_disk(tmp_path: Path) -> None:
    """Nothing is lost when no room is left at all, and all goes on as soon as there is some."""
    limit = {
        "FENCEPOST_OUTBOX_DISK_PERCENT_MAX": "100",
        "FENCEPOST_OUTBOX_REQUESTS_PER_S": "100000",
    }
    with (
        small_disk(tmp_path / "disk") as mounted,
        ServerProcess(tmp_path / "data") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        if not mounted:
            return
        shop = Shop(http, "shop")
        place = tmp_path / "disk" / "outbox"
        ballast = tmp_path / "disk" / "ballast"
        ballast.write_bytes(bytes(BALLAST_BYTES))
        taken: list[str] = []
        with OutboxProcess(place, server.url, ["shop"], "ann", environment=limit) as outbox:
            until(lambda: outbox.get("/v1/health")["status"] == "ok")
            server.kill()
            for number in range(1_000):
                answer = outbox.send(f"m-{number}", body=BODY)
                if answer.status_code != 202:
                    break
                taken.append(f"m-{number}")
            assert len(taken) < 1_000, "the disk did not fill up"
            again = outbox.send(taken[-1], body=BODY)
            assert again.status_code in (202, 503, 507), again.text
            outbox.kill()
            outbox.restart()
            refused = outbox.send("late", body=BODY)
            assert refused.status_code in (503, 507), refused.text
            server.restart()
            ballast.unlink()

            until(lambda: outbox.counts() == {"done": len(taken)})

            with fencepost.connect(server.url) as client:
                messages = client.stream("__mesh/shop/topic/alerts").read().messages()
            found = Counter(message["client_message_id"] for message in messages)
            assert found == Counter(taken)
            assert shop.checked() == []
