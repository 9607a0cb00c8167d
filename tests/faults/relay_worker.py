"""A relay in a process of its own, which dies or waits where a test says.

Arguments: the URL of the server, the database, the mesh, a folder for signs, and what happens:
`leased` dies with rows in hand, `sent` dies between the server's answer and the row's outcome,
`hold` waits there until the file `gate` is there, `meet` says `ready` and waits before its first
send, `none` works. Two variables take fences out, so that a test can show what they are for: with
FENCEPOST_TEST_TERMS the server is not asked for its terms, and with FENCEPOST_TEST_NO_LEASES the
rows that a relay takes stay there for others.
"""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import fencepost
from fencepost.clock import SystemClock
from fencepost.outbox import database as databases
from fencepost.outbox import delivery
from fencepost.outbox import relay as relays
from fencepost.outbox.database import OutboxDatabase, open_outbox
from fencepost.outbox.relay import Relay, RelaySettings, Terms
from fencepost.outbox.rows import TABLE

LEASE_MS = 1_000


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def main(url: str, address: str, mesh: str, folder: Path, fate: str) -> None:
    turning = OutboxDatabase.turn

    def turn(self: OutboxDatabase, finished: Any, *arguments: Any, **more: Any) -> Any:
        if finished and fate == "sent":
            die()
        if finished and fate == "hold" and not (folder / "gate").exists():
            (folder / "holding").touch()
            while not (folder / "gate").exists():
                time.sleep(0.01)
        done = turning(self, finished, *arguments, **more)
        if done.leases and fate == "leased":
            die()
        if finished and fate == "hold":
            (folder / ("refused" if done.lost else "stored")).touch()
        return done

    OutboxDatabase.turn = turn  # type: ignore[method-assign]
    attempting = delivery.attempt

    async def attempt(*arguments: Any, **more: Any) -> Any:
        if fate == "meet":
            (folder / "sending").touch()
            while not (folder / "gate").exists():
                await asyncio.to_thread(time.sleep, 0.01)
        return await attempting(*arguments, **more)

    relays.attempt = attempt  # type: ignore[attr-defined]
    if "FENCEPOST_TEST_NO_LEASES" in os.environ:
        # The same values, and the row stays pending; its outcome is written whoever has it.
        databases._LEASE = (
            f"update {TABLE} set attempts = attempts + 1"
            " where coalesce(?, '') <> '' and ? > 0 and id = ?"
        )
        databases._FINISH = databases._FINISH.replace(
            "status = 'inflight' and lease_token = ?", "coalesce(?, '') <> ''"
        )
    if "FENCEPOST_TEST_TERMS" in os.environ:

        async def terms_of(*_: Any) -> Terms:
            return Terms("retention_scoped", 7, 144 * 3_600_000)

        relays.terms_of = terms_of  # type: ignore[assignment]
    lease_ms = 60_000 if fate == "meet" else LEASE_MS
    settings = RelaySettings(lease_ms=lease_ms, attempt_ms=lease_ms // 2, poll_ms=50)
    async with fencepost.connect_async(url, retries=fencepost.NO_RETRIES) as client:
        meshes = {mesh: client.mesh(mesh)}
        database = open_outbox(address, SystemClock())
        relay = Relay(database, meshes, sender="shop", clock=SystemClock(), settings=settings)
        if fate == "meet":
            (folder / "ready").touch()
        await relay.run(asyncio.Event())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), sys.argv[5]))
