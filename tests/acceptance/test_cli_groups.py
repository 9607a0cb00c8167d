"""`fencepost groups` as an operator runs it: look, repair, replay, delete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fencepost import EventFailure, LeaseAck
from tests.acceptance.shell import Shell
from tests.acceptance.shell import home as home
from tests.serving import ServerProcess

NO_WAIT = {"kind": "fixed", "base_ms": 0, "cap_ms": 0, "jitter": 0.0}


@pytest.fixture
def shell(tmp_path: Path, home: Path) -> Iterator[Shell]:
    with ServerProcess(tmp_path) as server:
        found = Shell(server.url, home)
        yield found
        found.client.close()


def stuck(shell: Shell) -> list[int]:
    """A group with one blocked target, one parked event and one target that is ready."""
    group = shell.client.group("billing")
    group.make(["orders/**"], retries_max=0, backoff=NO_WAIT)
    positions = []
    for n in range(3):
        done = shell.client.stream(f"orders/{n}").append({"n": n}, auto_create=True)
        assert done.position is not None
        positions.append(done.position)
    for lease in group.claim("ann", streams_max=3).leases:
        position = lease.events[0].position
        if lease.target == "orders/2":
            group.release([lease.token])
            continue
        park = lease.target == "orders/1"
        failure = EventFailure(position=position, error="boom", park=park)
        group.ack(LeaseAck(token=lease.token, failure=failure))
    return positions


def test_an_operator_sees_what_stands_still_and_frees_it(shell: Shell) -> None:
    positions = stuck(shell)

    assert [line["group"] for line in shell.lines("groups", "--json")] == ["billing"]
    assert "billing" in shell.run("groups").stdout
    [shown] = shell.lines("groups", "show", "billing", "--json")
    assert (shown["stats"]["blocked"], shown["stats"]["parked"]) == (1, 1)
    assert "blocked" in shell.run("groups", "show", "billing").stdout
    [blocked] = shell.lines("groups", "blocked", "billing", "--json")
    assert (blocked["target"], blocked["error"]) == ("orders/0", "boom")
    [parked] = shell.lines("groups", "parked", "billing", "--json")
    assert (parked["target"], parked["position"]) == ("orders/1", positions[1])
    assert "boom" in shell.run("groups", "blocked", "billing").stdout
    assert "boom" in shell.run("groups", "parked", "billing").stdout

    unblock = ("groups", "unblock", "billing", "--target", "orders/*")
    assert shell.lines(*unblock, "--dry-run", "--json") == [{"would_change": 1}]
    assert shell.lines(*unblock, "--json") == [{"changed": 1}]
    assert shell.lines(*unblock, "--json") == [{"changed": 0}]
    replay = ("groups", "replay", "billing")
    assert shell.lines(*replay, "--dry-run", "--json") == [{"would_change": 1}]
    assert shell.lines(*replay, "--json") == [{"changed": 1}]


def test_an_operator_resets_skips_defers_prioritizes_parks_and_deletes(shell: Shell) -> None:
    positions = stuck(shell)
    name = "billing"

    assert shell.lines("groups", "skip", name, "--blocked", "--json") == [{"changed": 1}]
    assert shell.lines("groups", "reset", name, "orders/0", "--json") == [{"changed": 1}]
    assert shell.lines("groups", "prioritize", name, "5", "--all", "--json") == [{"changed": 3}]
    assert shell.lines("groups", "defer", name, "0", "--all", "--json") == [{"changed": 0}]
    park = ("groups", "park", name, "orders/2", str(positions[2]), "--json")
    assert shell.lines(*park) == [{"changed": 1}]
    assert "orders/2" in shell.run("groups", "parked", name).stdout
    assert shell.lines("groups", "delete", name, "--yes", "--json") == [
        {"group": name, "deleted": True}
    ]
    assert shell.lines("groups", "--json") == []


def test_what_is_meant_must_be_said(shell: Shell) -> None:
    stuck(shell)

    assert "--all" in shell.run("groups", "reset", "billing", code=2).stderr
    regular = shell.run("groups", "unblock", "billing", "--target", "^orders", code=1).stderr
    assert "orders*" in regular
    assert shell.run("groups", "show", "nothing", code=1).stderr
