"""SIGKILL while streams are truncated by policy and by request, and their rows are purged.

After every kill the folder must be whole, and no append that was answered may be missing.
FENCEPOST_FAULT_KILLS=200 makes it the long run (`just faults`).
"""

import os
import random
import signal
import threading
from pathlib import Path

from fencepost.store.sqlite.check import check
from tests.integration.raw import Connection, ask
from tests.serving import ServerProcess

KILLS_DEFAULT = 6


def test_a_server_killed_while_it_truncates_and_purges_leaves_a_whole_folder(
    tmp_path: Path,
) -> None:
    config = tmp_path / "fencepost.toml"
    config.write_text(
        "[store]\nsweep_interval_ms = 1\nretention_interval_ms = 1\nlog_retention_ms = 0\n"
        '[[retention]]\nmatch = "kept/**"\nmax_bytes = 3000\n'
    )
    folder = tmp_path / "data"
    server = ServerProcess(folder, arguments=["--config", str(config), "--log-level", "error"])
    dice = random.Random(11)
    sent = 0
    statuses: set[int] = set()
    for _ in range(int(os.environ.get("FENCEPOST_FAULT_KILLS", KILLS_DEFAULT))):
        server.start()
        kill = threading.Timer(dice.uniform(0.3, 0.9), os.kill, (server.pid, signal.SIGKILL))
        ask(server.port, "PUT", "/v1/stream/kept/s", "Content-Type: text/plain")
        kill.start()
        try:
            with Connection(server.port) as client:
                while True:
                    reply = client.ask(
                        "POST",
                        "/v1/stream/kept/s",
                        "Content-Type: text/plain",
                        "Producer-Id: p",
                        "Producer-Epoch: 0",
                        f"Producer-Seq: {sent}",
                        body=b"%06d%b" % (sent, b"x" * 194),
                    )
                    statuses.add(reply.status)
                    sent += 1
                    if sent % 50 == 0:
                        tail = reply.headers["stream-next-offset"]
                        client.ask("POST", f"/v1/stream/kept/s?truncate&before={tail}")
        except (ConnectionError, AssertionError, TimeoutError):
            kill.join()
        server.kill()

        report = check(folder)

        assert report.findings == []
    server.start()
    head = ask(server.port, "HEAD", "/v1/stream/kept/s")
    # The request in flight at the last kill may or may not have been stored.
    assert int(head.headers["stream-next-offset"].partition("_")[0]) in (sent, sent + 1)
    server.stop()
    assert check(folder).findings == []
    assert check(folder).counts["rows"] < sent
    assert statuses <= {200, 204}, "stored, or stored before the kill and sent again"
    assert sent > 50
