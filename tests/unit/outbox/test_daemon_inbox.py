"""inbox.db: each message once, and a damaged file moved aside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fencepost.outbox.daemon.database import make_folder
from fencepost.outbox.daemon.inbox import Inbox
from fencepost.testing import SimClock


def an_inbox(folder: Path, clock: SimClock, arrived: list[int] | None = None) -> Inbox:
    told = [] if arrived is None else arrived
    return Inbox.open(folder, clock, vfs=None, arrived=lambda: told.append(1))


def entry(message_id: str, sender: str = "bob") -> dict[str, Any]:
    return {"client_message_id": message_id, "sender": sender, "body": "a\nb"}


async def test_a_message_is_stored_once_and_told_once(tmp_path: Path) -> None:
    arrived: list[int] = []
    inbox = an_inbox(tmp_path, SimClock(), arrived)

    assert await inbox.add("shop", [entry("m-1"), entry("m-2")]) == 2
    assert await inbox.add("shop", [entry("m-2")]) == 0
    assert await inbox.add("shop", [entry("m-1", "eve")]) == 1
    assert await inbox.add("ops", [entry("m-1")]) == 1

    assert (len(arrived), inbox.stored, inbox.duplicates) == (3, 4, 1)
    assert [row["mesh"] for row in (await inbox.listed(None, 0, 10)).messages] == ["shop"] * 3 + [
        "ops"
    ]
    await inbox.close()


async def test_a_damaged_file_is_moved_aside_and_numbers_go_on(tmp_path: Path) -> None:
    clock = SimClock()
    inbox = an_inbox(tmp_path, clock)
    await inbox.add("shop", [entry("m-1")])
    before = await inbox.last()
    await inbox.close()
    (tmp_path / "inbox.db").write_bytes(b"rotten" * 1000)
    clock.advance(1000)

    inbox = an_inbox(tmp_path, clock)

    assert (await inbox.listed(None, 0, 10)).messages == []
    assert (tmp_path / f"inbox.db.{clock.wall_ms()}").exists()
    await inbox.add("shop", [entry("m-1")])
    assert await inbox.last() > before
    await inbox.close()


async def test_old_messages_are_swept(tmp_path: Path) -> None:
    make_folder(tmp_path / "deep/er")
    clock = SimClock()
    inbox = an_inbox(tmp_path / "deep/er", clock)
    await inbox.add("shop", [entry("m-1")])
    clock.advance(1000)
    await inbox.add("shop", [entry("m-2")])

    await inbox.sweep(clock.now_ms())

    assert await inbox.count() == 1
    await inbox.close()
