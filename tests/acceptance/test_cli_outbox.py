"""`fencepost outbox` with a daemon, as a person runs it, and the first screen of its guide."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fencepost
from fencepost.outbox import IdUsedError, Outbox, topic
from tests.outboxing import OutboxProcess, until
from tests.serving import ServerProcess

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/guides/outbox.md"


class Terminal:
    """Runs `fencepost` with a home of its own."""

    def __init__(self, url: str, folder: Path) -> None:
        self.environment = {
            **os.environ,
            "HOME": str(folder / "home"),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "FENCEPOST_URL": url,
            "FENCEPOST_OUTBOX_FOLDER": str(folder / "outbox"),
        }

    def run(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "fencepost", *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def lines(self, *arguments: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.run(*arguments, "--json").splitlines()]


@pytest.fixture
def terminal(server_process: ServerProcess, tmp_path: Path) -> Terminal:
    with fencepost.connect(server_process.url) as client:
        client.mesh("shop").make()
        client.mesh("shop").make_member("ben")
    return Terminal(server_process.url, tmp_path)


@pytest.fixture
def outbox(
    terminal: Terminal, server_process: ServerProcess, tmp_path: Path
) -> Iterator[OutboxProcess]:
    with OutboxProcess(tmp_path / "outbox", server_process.url, ["shop"], "ben") as process:
        until(lambda: process.get("/v1/health")["status"] == "ok")
        yield process


def test_the_first_screen_of_the_guide(terminal: Terminal, tmp_path: Path) -> None:
    """The commands are those of the page; what stands for a row is one that is dead."""
    page = GUIDE.read_text()
    screen = re.search(r"```sh\n(.*?)```", page, re.DOTALL)
    assert screen is not None
    member, run, send, recover = screen[1].strip().splitlines()
    script = [
        "set -eu",
        f"fencepost() {{ '{sys.executable}' -m fencepost \"$@\"; }}",
        member,
        run,
        "until fencepost outbox status > /dev/null 2>&1; do sleep 0.1; done",
        send,
        "until fencepost outbox list --failed --json | grep -q alert-17; do sleep 0.1; done",
        'ROW=$(fencepost outbox list --failed --json | sed \'s/.*"id":"\\([^"]*\\)".*/\\1/\')',
        recover.replace("ROW", '"$ROW"'),
    ]
    with (tmp_path / "printed").open("w") as out:
        process = subprocess.Popen(
            ["sh", "-c", "\n".join(script)],
            env=terminal.environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(120)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
    printed = (tmp_path / "printed").read_text()
    assert code == 0, printed
    assert "alert-17 is with the outbox of this machine" in printed
    assert "is sent in its place" in printed


def test_a_list_of_several_statuses_is_in_one_order(terminal: Terminal, tmp_path: Path) -> None:
    """A hundred rows that wait must not hide one that failed before them."""
    with OutboxProcess(tmp_path / "outbox", "http://127.0.0.1:9", ["shop"]) as outbox:
        first, *_ = [outbox.send(f"m-{number}").json()["id"] for number in range(3)]
        terminal.run("outbox", "drop", first)

        both = ("outbox", "list", "--pending", "--aborted")
        shown = [row["client_message_id"] for row in terminal.lines(*both, "--limit", "2")]

    assert shown == ["m-0", "m-1"]


def test_a_send_goes_through_the_outbox_if_one_answers_and_says_so(
    terminal: Terminal, outbox: OutboxProcess
) -> None:
    first = terminal.run("send", "dm:ben", "hello", "--id", "m-1")
    again = terminal.run("send", "dm:ben", "hello", "--id", "m-1", "--mesh", "shop")
    other = terminal.run("send", "dm:ben", "other", "--id", "m-1", code=1)
    direct = terminal.run("send", "dm:ben", "hi", "--mesh", "shop", "--sender", "ben")

    assert "m-1 is with the outbox of this machine, and is delivered when possible" in first
    assert "outbox of this machine already" in again or "was delivered before" in again
    assert "fingerprint_mismatch" in other
    assert "is stored as" in direct
    until(lambda: len(outbox.inbox()) == 2)


def test_rows_are_listed_inspected_requeued_and_dropped(
    terminal: Terminal, outbox: OutboxProcess, tmp_path: Path
) -> None:
    outbox.send("lost", kind="queue", ref="nowhere")
    outbox.send("lost-too", kind="queue", ref="nowhere")
    row, other = outbox.settled("lost"), outbox.settled("lost-too")

    assert "destination_not_found" in terminal.run("outbox", "list", "--failed")
    [shown] = terminal.lines("outbox", "inspect", row["id"])
    assert shown["payload"] == {
        "kind": "queue",
        "ref": "nowhere",
        "priority": "next",
        "body": "hello",
    }
    terminal.run("outbox", "requeue", row["id"], code=2)
    (tmp_path / "payload.json").write_text('{"kind": "queue", "ref": "elsewhere", "body": ""}')
    wrong = terminal.run(
        *("outbox", "requeue", row["id"], "--auto", "--payload", str(tmp_path / "payload.json")),
        code=1,
    )
    assert "keeps its destination" in wrong
    requeued = terminal.run("outbox", "requeue", row["id"], "--new-id", "found")
    assert "is sent in its place as found" in requeued
    assert "aborted" in terminal.run("outbox", "inspect", row["id"])
    assert "stays used" in terminal.run("outbox", "drop", other["id"])
    assert len(terminal.lines("outbox", "list", "--aborted")) == 2
    assert "row_not_open" in terminal.run("outbox", "drop", other["id"], "--json", code=1)


def test_status_shows_the_meshes_and_why_there_is_no_daemon(
    terminal: Terminal, server_process: ServerProcess, tmp_path: Path
) -> None:
    folder = tmp_path / "outbox"
    said = terminal.run("outbox", "status", code=3)
    assert "Start one with `fencepost outbox run`" in said
    assert "say --database" in said
    with OutboxProcess(folder, server_process.url, ["shop"], "ben") as process:
        until(lambda: process.get("/v1/health")["status"] == "ok")
        shown = terminal.run("outbox", "status")
        assert "shop" in shown
        assert "connected" in shown

    refused = OutboxProcess(
        folder,
        server_process.url,
        ["shop"],
        environment={"FENCEPOST_OUTBOX_MAX_AGE_HOURS_OVERRIDE": "99999"},
    )
    with pytest.raises(AssertionError, match="outbox_max_age_above_dedupe_window"):
        refused.start()
    refused.http.close()
    assert "outbox_max_age_above_dedupe_window" in terminal.run("outbox", "status", code=3)


def test_a_program_sends_through_the_socket(outbox: OutboxProcess) -> None:
    with Outbox.daemon(socket=outbox.data / "outbox.sock") as local:
        taken = local.send("dm:ben", {"a": 1}, id="p-1")
        again = local.send("dm:ben", {"a": 1}, id="p-1")
        with pytest.raises(IdUsedError) as refused:
            local.send("dm:ben", {"a": 2}, id="p-1")
        local.send(topic("nowhere"), b"bytes", id="p-2")
        dead = until(lambda: list(local.rows(status="dead")))
        requeued = local.requeue(dead[0].id)
        dropped = until(lambda: list(local.rows(status="dead")))[0]
        local.drop(dropped.id, by="ann")

        assert (taken.duplicate, again.duplicate) == (False, True)
        assert "fingerprint_mismatch" in refused.value.conflict
        assert requeued.old.superseded_by == requeued.new.id
        assert local.inspect(dropped.id).aborted_by == "ann"
        messages = until(lambda: list(local.inbox()))
        assert messages[0].message["json"] == {"a": 1}
        assert local.status()["member"] == "ben"


async def test_the_async_client_is_the_same(outbox: OutboxProcess) -> None:
    async with Outbox.daemon_async(socket=outbox.data / "outbox.sock") as local:
        taken = await local.send("dm:ben", "hello", id="a-1")

        assert [row.client_message_id async for row in local.rows()] == ["a-1"]
        assert taken.mesh == "shop"


def test_the_unit_is_hardened_and_holds_no_token(terminal: Terminal) -> None:
    terminal.environment["FENCEPOST_TOKEN"] = "secret-token"
    unit = terminal.run("outbox", "install-service", "--mesh", "shop", "--as", "ben", "--print")

    assert "secret-token" not in unit
    for line in ("NoNewPrivileges=yes", "ProtectSystem=strict", "UMask=0077", "[Install]"):
        assert line in unit.splitlines()
    assert "outbox run --mesh shop --as ben" in unit
    written = terminal.run("outbox", "install-service", "--mesh", "shop")
    assert "systemctl --user enable --now fencepost-outbox" in written
