"""Every defect of dedupe rows that can be planted is found, counted and told by its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import apsw
import httpx
import psycopg
import pytest

from fencepost.store.sqlite.connection import FILE
from tests.engines import empty_store as empty_store
from tests.engines import engine as engine
from tests.engines import server_at
from tests.integration.mesh_support import Shop
from tests.serving import ServerProcess

PLANTED = [
    # The row of a message is gone: the message could be stored again.
    "DELETE FROM sends WHERE client_id = 'row-lost'",
    "DELETE FROM sends WHERE client_id = 'sent-twice'",
    # A row stands for another message, and for none.
    "UPDATE sends SET fingerprint = (SELECT fingerprint FROM sends WHERE client_id = 'sound')"
    " WHERE client_id = 'other-content'",
    "UPDATE sends SET messages = messages + 5, bytes = bytes + 5000 WHERE client_id = 'no-message'",
    "UPDATE sends SET sender = 'eve' WHERE client_id = 'other-sender'",
]
FOUND = {
    "send_missing": 2,  # row-lost, and the message of other-sender
    "send_without_message": 3,  # other-content, no-message, and the row of other-sender
    "send_repeated": 2,  # sent-twice, and the message of no-message
}


def execute(store: Path | str, statements: list[str]) -> None:
    if isinstance(store, Path):
        connection = apsw.Connection(str(store / FILE))
        if statements[-1].startswith("UPDATE sends SET sender"):
            # Where a row is found follows its columns.
            statements = [*statements, "UPDATE send_places SET sender = 'eve' WHERE sender = 'ned'"]
        for statement in statements:
            connection.execute(statement)
        connection.close()
        return
    with psycopg.connect(store, autocommit=True) as database:
        for statement in statements:
            database.execute(statement)


@pytest.fixture
def damaged(empty_store: Path | str) -> Iterator[ServerProcess]:
    """A server on a mesh with every defect, some of them in the topic, others in a queue."""
    with server_at(empty_store) as server, httpx.Client(base_url=server.url) as http:
        shop = Shop(http, "shop")
        for name in ("sound", "row-lost", "sent-twice", "other-content"):
            assert shop.send(name, body=name).status_code == 201
        sent = shop.send("no-message", kind="queue", ref="jobs")
        assert sent.status_code == 201
        assert shop.send("other-sender", kind="dm", ref="ann", sender="ned").status_code == 201
        assert shop.checked() == []
    execute(empty_store, PLANTED)
    with server_at(empty_store) as server, httpx.Client(base_url=server.url) as http:
        body = {"sender": "bob", "kind": "topic", "ref": "alerts", "body": "sent-twice"}
        again = http.post(
            "/v1/mesh/shop/send", json=body, headers={"Idempotency-Key": "sent-twice"}
        )
        assert again.status_code == 201, "its row is gone, so it is new"
        yield server


def run(server: ServerProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fencepost", "messages", *arguments]
    return subprocess.run(
        [*command, "--mesh", "shop", "--url", server.url],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_planted_defect_is_found_counted_and_the_missing_rows_are_rebuilt(
    damaged: ServerProcess,
) -> None:
    checked = run(damaged, "check", "--json")
    table = run(damaged, "check")

    assert (checked.returncode, table.returncode) == (1, 1)
    findings = json.loads(checked.stdout)["report"]["findings"]
    assert Counter(finding["code"] for finding in findings) == FOUND
    for code in FOUND:
        assert code in table.stdout
    with httpx.Client(base_url=damaged.url) as http:
        assert 'fencepost_mesh_orphans{mesh="shop"} 7.0' in http.get("/metrics").text

    dry = run(damaged, "rebuild", "--json")
    written = run(damaged, "rebuild", "--yes", "--json")
    left = run(damaged, "check", "--json")

    assert (json.loads(dry.stdout)["missing"], json.loads(dry.stdout)["written"]) == (2, 0)
    assert json.loads(written.stdout)["written"] == 2
    codes = Counter(finding["code"] for finding in json.loads(left.stdout)["report"]["findings"])
    # With its own row back, the message of other-sender has two rows.
    assert codes == {"send_without_message": 3, "send_repeated": 3}
    with httpx.Client(base_url=damaged.url) as http:
        body = {"sender": "bob", "kind": "topic", "ref": "alerts", "body": "row-lost"}
        retried = http.post(
            "/v1/mesh/shop/send", json=body, headers={"Idempotency-Key": "row-lost"}
        )
        assert (retried.status_code, retried.json()["duplicate"]) == (200, True)
