"""What `fencepost mesh`, `send` and `inbox` say of mistakes: each names the command that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

import fencepost
from tests.acceptance.test_cli_outbox import Terminal
from tests.serving import ServerProcess


@pytest.fixture
def terminal(server_process: ServerProcess, tmp_path: Path) -> Terminal:
    with fencepost.connect(server_process.url) as client:
        mesh = client.mesh("yard")
        mesh.make()
        mesh.make_member("ann")
        mesh.make_topic("alerts", ["ann"])
    return Terminal(server_process.url, tmp_path)


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("send topic:none x --mesh yard", "fencepost mesh list MESH"),
        ("send topic:alerts x --mesh none", "fencepost mesh create"),
        ("mesh member none ann", "fencepost mesh create"),
        ("inbox zed --mesh yard", "has no member 'zed'"),
        ("inbox zed --mesh yard", "fencepost mesh list yard"),
        ("subscriptions show none", "`fencepost subscriptions` shows"),
    ],
)
def test_what_is_not_there_is_named_with_the_command_that_helps(
    terminal: Terminal, command: str, advice: str
) -> None:
    assert advice in terminal.run(*command.split(), code=1)


def test_a_destination_without_its_kind_is_told_the_kinds(terminal: Terminal) -> None:
    said = terminal.run("send", "ann", "x", "--mesh", "yard", code=2)

    assert "topic:NAME, dm:MEMBER or queue:NAME, not 'ann'" in said


def test_a_used_id_is_told_as_the_option_that_it_is(terminal: Terminal) -> None:
    terminal.run("send", "topic:alerts", "one", "--id", "m-1", "--mesh", "yard")

    said = terminal.run("send", "topic:alerts", "two", "--id", "m-1", "--mesh", "yard", code=1)

    assert "--id" in said
    assert "--key" not in said


def test_a_json_body_is_shown_as_json(terminal: Terminal, server_process: ServerProcess) -> None:
    with fencepost.connect(server_process.url) as client:
        client.mesh("yard").send("dm:ann", {"paid": True}, id="json-1", sender="bob")

    assert '{"paid": true}' in terminal.run("inbox", "ann", "--mesh", "yard")
