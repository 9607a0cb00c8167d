"""`fencepost subscriptions` as an operator runs it, and as a shell script that works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.shell import Shell
from tests.acceptance.shell import home as home
from tests.serving import ServerProcess


@pytest.fixture
def shell(tmp_path: Path, home: Path) -> Iterator[Shell]:
    with ServerProcess(tmp_path) as server:
        found = Shell(server.url, home)
        yield found
        found.client.close()


def by(wake: dict[str, Any]) -> list[str]:
    """The options that name a wake."""
    generation = str(wake["generation"])
    proof = ["--wake-token", wake["wake_token"]]
    return ["--wake-id", wake["wake_id"], "--generation", generation, *proof]


def test_a_subscription_is_made_worked_for_and_deleted(shell: Shell) -> None:
    shell.client.create("wakes")
    create = ("subscriptions", "create", "jobs", "--pattern", "jobs/*", "--wake-stream", "wakes")
    [made] = shell.lines(*create, "--lease-ms", "60000", "--json")
    assert (made["id"], made["lease_ttl_ms"], made["is_new"]) == ("jobs", 60000, True)
    assert [line["id"] for line in shell.lines("subscriptions", "--json")] == ["jobs"]
    assert "jobs/*" in shell.run("subscriptions").stdout

    shell.client.stream("jobs/1").append({"n": 1}, auto_create=True)
    assert "jobs/1" in shell.run("subscriptions", "show", "jobs").stdout
    [wake] = shell.lines("subscriptions", "claim", "jobs", "--worker", "ann", "--json")
    named = by(wake)
    tail = wake["streams"][0]["tail_offset"]
    assert shell.lines("subscriptions", "ack", "jobs", *named, "--json") == [
        {"acked": 0, "next_wake": False}
    ]
    assert shell.lines("subscriptions", "release", "jobs", *named, "--json") == [
        {"subscription": "jobs", "released": True}
    ]
    [wake] = shell.lines("subscriptions", "claim", "jobs", "--worker", "bob", "--json")
    named = [*by(wake), "--offset", f"jobs/1={tail}", "--done"]
    assert shell.lines("subscriptions", "ack", "jobs", *named, "--json") == [
        {"acked": 1, "next_wake": False}
    ]
    [shown] = shell.lines("subscriptions", "show", "jobs", "--json")
    assert shown["streams"][0]["acked_offset"] == tail

    shell.run("subscriptions", "add", "jobs", "special/one", "special/two")
    shell.run("subscriptions", "remove", "jobs", "special/one")
    [shown] = shell.lines("subscriptions", "show", "jobs", "--json")
    assert [one["path"] for one in shown["streams"]] == ["jobs/1", "special/two"]
    assert shell.lines("subscriptions", "delete", "jobs", "--yes", "--json") == [
        {"subscription": "jobs", "deleted": True}
    ]
    assert shell.lines("subscriptions", "--json") == []
