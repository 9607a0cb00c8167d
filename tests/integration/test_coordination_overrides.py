"""Overrides on a real server: the four scenarios, each with a reason that the audit stream has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fencepost
from fencepost import Client, FencepostError, Stream
from fencepost.coordination import (
    AsyncOverrides,
    ClaimLostError,
    Overrides,
    Resources,
    TaskClaims,
)
from tests.integration.auth_support import ALL, ROOT, place, principal, token
from tests.serving import ServerProcess

Plain = dict[str, Any]


@pytest.fixture(name="client")
def _client(server_process: ServerProcess) -> Iterator[Client]:
    with fencepost.connect(server_process.url) as client:
        yield client


@pytest.fixture(name="stream")
def _stream(client: Client, request: pytest.FixtureRequest) -> Stream:
    return client.create(f"overrides/{request.node.name}")


@pytest.fixture(name="root")
def _root(stream: Stream) -> Overrides:
    return Overrides(stream, "root")


@pytest.fixture(name="rows")
def _rows(stream: Stream) -> Resources[Plain]:
    return Resources(stream, "doc")


def bump(value: Plain | None) -> Plain:
    return {"n": (value or {"n": 0})["n"] + 1}


def test_a_crashed_executor_loses_its_task_at_once(stream: Stream, root: Overrides) -> None:
    ada, bob = TaskClaims(stream, "ada"), TaskClaims(stream, "bob")
    claim = ada.claim("build")
    assert claim

    assert root.free("build", reason="the machine burned")

    with pytest.raises(ClaimLostError):
        ada.heartbeat(claim)
    seen = bob.get("build")
    assert seen is not None
    assert (seen.status, seen.epoch, seen.version) == ("available", 1, 0)
    assert (seen.previous_owner, seen.reason) == ("ada", "the machine burned")
    again = bob.claim("build")
    assert again
    assert (again.epoch, again.version) == (1, 1)
    bob.complete(again)
    assert not root.free("build", reason="it is completed")
    assert not root.free("unheard of", reason="there is none")


def test_a_correction_is_written_over_everything_and_updates_go_on_from_it(
    stream: Stream, root: Overrides, rows: Resources[Plain]
) -> None:
    other: Resources[Plain] = Resources(stream, "doc")
    rows.update("a", bump)
    other.update("a", bump)

    row = root.correct("doc", "a", {"n": 100}, reason="it was wrong")

    assert (row.value, row.epoch, row.version) == ({"n": 100}, 1, 0)
    after = rows.update("a", bump)
    assert (after.value, after.epoch, after.version) == ({"n": 101}, 1, 1)
    assert other.update("a", bump).value == {"n": 102}
    stored = list(stream.read())[2]["value"]
    assert stored["override"] == {"by": "root", "reason": "it was wrong"}


def test_versions_begin_again_with_the_migrated_value(
    root: Overrides, rows: Resources[Plain]
) -> None:
    for _time in range(3):
        rows.update("a", bump)

    row = root.restart_versions(
        "doc", "a", reason="schema 2", migrate=lambda old: {"n": old["n"], "schema": 2}
    )

    assert (row.value, row.epoch, row.version) == ({"n": 3, "schema": 2}, 1, 0)
    assert root.restart_versions("doc", "a", reason="again").epoch == 2
    with pytest.raises(FencepostError, match="no doc/b"):
        root.restart_versions("doc", "b", reason="there is none")


def test_a_clean_baseline_leaves_exactly_what_it_says(
    stream: Stream, root: Overrides, rows: Resources[Plain]
) -> None:
    for key in ("kept", "gone", "deleted"):
        rows.update(key, bump)
    rows.delete("deleted")
    others: Resources[Plain] = Resources(stream, "other")
    others.update("untouched", bump)

    changed = root.baseline("doc", {"kept": {"n": 7}, "new": {"n": 8}}, reason="corrupted")

    assert changed == 3
    rows.refresh()
    assert {row.key: (row.value, row.epoch, row.version) for row in rows.rows()} == {
        "kept": ({"n": 7}, 1, 0),
        "new": ({"n": 8}, 0, 0),
    }
    assert rows.update("gone", bump).epoch == 1
    assert [row.key for row in others.rows()] == ["untouched"]
    assert root.baseline("nothing", {}, reason="nothing to do") == 0


@pytest.mark.parametrize("reason", ["", "  ", "two\nlines"])
def test_an_override_needs_a_reason(root: Overrides, reason: str) -> None:
    for override in (
        lambda: root.free("a", reason=reason),
        lambda: root.correct("doc", "a", {}, reason=reason),
        lambda: root.restart_versions("doc", "a", reason=reason),
        lambda: root.baseline("doc", {}, reason=reason),
    ):
        with pytest.raises(FencepostError, match="reason"):
            override()


def test_overrides_are_in_the_audit_stream(tmp_path: Path) -> None:
    """Rows are shared and their epochs guarded, so that only an override raises one."""
    rule = {"match": "row:*", "going_on": "shared", "raising": "never"}
    one = principal("one", ("jobs", ALL))
    with place(tmp_path, ROOT, one, rules=[rule]) as here:
        with (
            fencepost.connect(here.process.url, token=token("one")) as client,
            fencepost.connect(here.process.url, token=token("root")) as powerful,
        ):
            jobs = client.create("jobs")
            claims, rows = TaskClaims(jobs, "one"), Resources[Plain](jobs, "doc")
            claim = claims.claim("build")
            assert claim
            rows.update("a", bump)
            root = Overrides(powerful.stream("jobs"), "root")

            assert root.free("build", reason="crashed")
            root.correct("doc", "a", {"n": 5}, reason="corrected")
            root.restart_versions("doc", "a", reason="restarted")
            root.baseline("doc", {"a": {"n": 1}}, reason="cleaned")

            again = claims.claim("build")
            assert again, "what was freed is anyone's"
            claims.complete(again)
            assert rows.update("a", bump).value == {"n": 2}
        events = here.audit()
    assert [(event["type"], event["producer"], event["reason"]) for event in events] == [
        ("override", "task:build", "crashed"),
        ("override", "row:doc:a", "corrected"),
        ("override", "row:doc:a", "restarted"),
        ("override", "row:doc:a", "cleaned"),
    ]
    assert [event["new_epoch"] for event in events] == [1, 1, 2, 3]


async def test_the_async_twin_does_the_same(server_process: ServerProcess, path: str) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        root = AsyncOverrides(await client.create(path), "root")

        assert (await root.correct("doc", "a", {"n": 1}, reason="new")).value == {"n": 1}
        assert (await root.restart_versions("doc", "a", reason="again")).epoch == 1
        assert await root.baseline("doc", {}, reason="empty") == 1
        assert not await root.free("build", reason="nobody has it")
