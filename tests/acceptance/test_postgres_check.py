"""`fencepost check` on a database: clean after real work, and what was broken is found."""

import json

import psycopg
import pytest

from fencepost.testing.postgres import shared_server
from tests.acceptance.test_postgres_command import ROOT, TEXT, DatabaseServer
from tests.acceptance.test_serve_command import fencepost
from tests.integration.raw import ask

JSON = "Content-Type: application/json"


def fill(port: int) -> None:
    """Some of everything: JSON and text, producers over two epochs, a closure, a fork, a key."""
    for path, kind in (("json", JSON), ("text", TEXT), ("more", TEXT), ("short", TEXT)):
        assert ask(port, "PUT", ROOT + path, kind).status == 201
    for epoch in (0, 1):
        for seq in range(4):
            producer = ("Producer-Id: p", f"Producer-Epoch: {epoch}", f"Producer-Seq: {seq}")
            reply = ask(port, "POST", ROOT + "json", JSON, *producer, body=b'[1, "two", {}]')
            assert reply.status == 200
    for path in ("text", "more", "text", "more", "short"):
        assert ask(port, "POST", ROOT + path, TEXT, body=b"some text").status == 204
    keyed = ask(port, "POST", ROOT + "text", TEXT, "Idempotency-Key: k", body=b"once")
    assert keyed.status in (200, 204)
    assert (
        ask(port, "PUT", ROOT + "fork", TEXT, "Stream-Forked-From: /v1/stream/text").status == 201
    )
    assert ask(port, "POST", ROOT + "more", TEXT, "Stream-Closed: true").status == 204
    assert ask(port, "DELETE", ROOT + "short").status == 204


BREAKING = {
    "counter_behind": "UPDATE counters SET next_position = 1",
    "data_missing": "UPDATE log SET data = NULL WHERE position = (SELECT max(position) FROM log"
    " WHERE kind = 0)",
    "first_wrong": "UPDATE streams SET first_bytes = 1000 WHERE path = 'fork'",
    "forks_count_wrong": "UPDATE streams SET forks_count = 7 WHERE path = 'text'",
    "messages_missing": "DELETE FROM log WHERE position = (SELECT position FROM log JOIN streams"
    " ON id = stream WHERE path = 'text' ORDER BY position LIMIT 1 OFFSET 1)",
    "producer_gap": "UPDATE log SET producer_seq = 9 WHERE epoch = 0 AND producer_seq = 2",
    "producer_wrong": "UPDATE producers SET seq = 2",
    "lengths_wrong": "UPDATE log SET data = data || 'x'::bytea WHERE epoch = 0"
    " AND producer_seq = 0",
    "tail_wrong": "UPDATE streams SET tail_messages = 3 WHERE path = 'more'",
    "time_backwards": "UPDATE log SET at_ms = 1 WHERE epoch = 1 AND producer_seq = 0",
}


def test_a_database_of_another_program_is_not_to_be_migrated() -> None:
    """`fencepost migrate` would make its tables in a database that was named by mistake."""
    done = fencepost("check", "--store", shared_server().new_database(migrated=False))

    assert done.returncode == 2
    assert done.stderr == (
        "fencepost: this database has no tables of Fencepost: name another one\n"
    )


@pytest.fixture(scope="module")
def url() -> str:
    made = shared_server().new_database()
    with DatabaseServer(made) as server:
        fill(server.port)
        beside = fencepost("check", "--store", made, "--json")
    assert json.loads(beside.stdout)["clean"], beside.stdout
    return made


def test_a_database_after_real_work_has_no_findings(url: str) -> None:
    done = fencepost("check", "--store", url, "--json")

    found = json.loads(done.stdout)
    assert (done.returncode, found["findings"]) == (0, [])
    assert found["data"] == url
    assert found["counts"]["streams"] >= 5
    assert found["counts"]["producers"] == 1


@pytest.mark.parametrize("code", BREAKING)
def test_what_was_broken_is_found(code: str, url: str) -> None:
    copy = shared_server().copy_database(url)
    with psycopg.connect(copy) as target:
        changed = target.execute(BREAKING[code].encode())
        assert changed.rowcount > 0, "the example has nothing to break there"

    done = fencepost("check", "--store", copy, "--json")

    assert done.returncode == 1
    assert code in {finding["code"] for finding in json.loads(done.stdout)["findings"]}
