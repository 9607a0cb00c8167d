"""`fencepost outbox` with `--database`, as an operator runs it: what it shows and refuses."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from fencepost.outbox import Outbox
from tests.acceptance.shell import Shell
from tests.acceptance.shell import home as home
from tests.integration.outbox_support import SQLITE, connect, database_of, execute, select
from tests.serving import ServerProcess


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture
def database(tmp_path: Path) -> Iterator[str]:
    with database_of(SQLITE, tmp_path) as address:
        yield address


@pytest.fixture
def shell(server: ServerProcess, home: Path, database: str) -> Iterator[Shell]:
    found = Shell(server.url, home)
    found.environment["FENCEPOST_OUTBOX_DATABASE"] = database
    mesh = found.client.mesh("shop")
    mesh.make()
    mesh.make_member("ann")
    yield found
    found.client.close()


def send(database: str, to: str, id: str) -> None:
    connection = connect(database)
    Outbox.table("shop").send(connection, to, {"n": 1}, id=id)
    connection.commit()
    connection.close()


def test_a_dead_row_is_found_mended_and_delivered(
    shell: Shell, database: str, tmp_path: Path
) -> None:
    send(database, "dm:nobody", "lost")
    relay = ("outbox", "relay", "--mesh", "shop", "--once", "--as", "shop", "--json")
    assert shell.lines(*relay)[0]["dead"] == 1
    (dead,) = shell.lines("outbox", "list", "--failed", "--json")
    assert (dead["client_message_id"], dead["status"]) == ("lost", "dead")
    shell.client.mesh("shop").make_member("nobody")
    patched = tmp_path / "send.json"
    patched.write_text(json.dumps({"kind": "dm", "ref": "nobody", "json": {"n": 2}}))

    requeue = ("outbox", "requeue", dead["id"], "--new-id", "found", "--payload", str(patched))
    (changed,) = shell.lines(*requeue, "--json")

    assert changed["old"]["superseded_by"] == changed["new"]["id"]
    first, second = shell.lines("outbox", "inspect", dead["id"], "--json")[0], changed["new"]
    assert first["payload"]["json"] == {"n": 1}
    assert first["request_fingerprint"] != second["request_fingerprint"]
    assert shell.lines(*relay)[0]["delivered"] == 1
    inbox = shell.client.stream("__mesh/shop/inbox/nobody").read().messages()
    assert [(one["client_message_id"], one["json"]) for one in inbox] == [("found", {"n": 2})]


def test_a_dropped_row_is_not_sent(shell: Shell, database: str) -> None:
    send(database, "dm:ann", "dropped")
    assert shell.run("outbox", "drop", "1").stdout == "row 1 is aborted: dropped\n"
    said = shell.refusal("outbox", "drop", "1")
    assert "row 1 is aborted" in said
    done = shell.run("outbox", "relay", "--mesh", "shop", "--once", "--as", "shop")
    assert done.stdout == "0 delivered, 0 dead\n"
    (row,) = shell.lines("outbox", "list", "--aborted", "--json")
    assert row["aborted_by"]


def test_relays_of_different_users_send_as_one_sender(shell: Shell, database: str) -> None:
    """A row that the relay of one user sent before it died comes again from that of another."""
    shell.environment["LOGNAME"] = "ada"
    send(database, "dm:ann", "paid-7")
    assert "1 delivered" in shell.run("outbox", "relay", "--mesh", "shop", "--once").stdout
    execute(database, "update fencepost_outbox set status = 'pending'")
    shell.environment["LOGNAME"] = "ben"

    assert "1 delivered" in shell.run("outbox", "relay", "--mesh", "shop", "--once").stdout

    inbox = shell.client.stream("__mesh/shop/inbox/ann").read().messages()
    assert [one["sender"] for one in inbox if one["client_message_id"] == "paid-7"] == ["outbox"]


BAD_INPUT = [
    (("list", "--after", "x"), 2, "--after is the number of a row"),
    (("inspect", "99"), 1, "there is no row '99'"),
    (("inspect", "x"), 1, "there is no row 'x'"),
    (("requeue", "1"), 2, "say --auto, or name a --new-id"),
    (("requeue", "1", "--auto", "--new-id", "x"), 2, "one of the two"),
    (("requeue", "1", "--new-id", ""), 2, "empty"),
    (("requeue", "1", "--new-id", "one"), 1, "the id 'one' was used"),
    (("requeue", "1", "--auto", "--payload", "missing"), 2, "cannot be read"),
    (("requeue", "1", "--auto", "--payload", "BROKEN"), 2, "a send is a JSON object"),
    (("requeue", "1", "--auto", "--payload", "ELSEWHERE"), 2, "keeps its destination"),
    (("relay",), 2, "which mesh?"),
    (("relay", "--mesh", "missing", "--once"), 1, "missing"),
    (("relay", "--mesh", "shop", "--once", "--max-age-hours", "8737"), 2, "above_dedupe_window"),
    (("relay", "--mesh", "shop", "--database", "missing.db"), 2, "there is no database file"),
    (("relay", "--mesh", "shop", "--database", "mysql://x"), 2, "is no database of an outbox"),
    (
        ("relay", "--mesh", "shop", "--database", "postgresql://127.0.0.1:1/x"),
        3,
        "the database cannot be used",
    ),
    (("relay", "--mesh", "shop", "--once", "--url", "http://127.0.0.1:1"), 3, "cannot reach"),
    (("schema", "--dialect", "mysql"), 2, "--dialect is sqlite or postgresql"),
    (("schema", "--dialect", "sqlite", "--alembic", "--django"), 2, "not both"),
]


@pytest.mark.parametrize(
    ("command", "code", "said"), BAD_INPUT, ids=[" ".join(row[0]) for row in BAD_INPUT]
)
def test_bad_input_is_one_sentence_and_changes_nothing(
    shell: Shell, database: str, tmp_path: Path, command: tuple[str, ...], code: int, said: str
) -> None:
    send(database, "dm:ann", "one")
    before = select(database, "select * from fencepost_outbox")
    files = {"BROKEN": "[1", "ELSEWHERE": '{"kind": "dm", "ref": "ben", "body": "x"}'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    arguments = [str(tmp_path / part) if part in files else part for part in command]

    assert said in shell.refusal("outbox", *arguments, code=code)

    assert select(database, "select * from fencepost_outbox") == before


def test_a_table_of_a_newer_version_is_refused(shell: Shell, database: str) -> None:
    execute(database, "update fencepost_outbox_state set version = 2")
    for command in (("relay", "--mesh", "shop"), ("list",), ("drop", "1")):
        assert "has version 2" in shell.refusal("outbox", *command, code=2)


def test_a_relay_shows_metrics_and_ends_cleanly(shell: Shell, database: str) -> None:
    send(database, "dm:gone", "dead")
    send(database, "dm:ann", "fine")
    command = ("outbox", "relay", "--mesh", "shop", "--as", "shop", "--metrics-port", "0")
    process = subprocess.Popen(
        [sys.executable, "-m", "fencepost", *command],
        env=shell.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stderr.readline())
        assert found is not None
        for line in process.stderr:
            if "dm:gone is dead" in line:
                break
        shown = ""
        while "fencepost_outbox_delivered_total 1.0" not in shown:
            with urllib.request.urlopen(found[0]) as answer:
                shown = answer.read().decode()
        process.send_signal(signal.SIGTERM)
        printed = process.stdout.read()
        assert process.wait() == 0

    assert 'fencepost_outbox_rows{mesh="shop",status="dead"} 1.0' in shown
    assert 'fencepost_outbox_oldest_seconds{mesh="shop",status="dead"}' in shown
    assert "fencepost_outbox_dead_total 1.0" in shown
    assert printed == "1 delivered, 1 dead\n"
