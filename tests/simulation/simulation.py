"""A simulation: lives of a store under random clients and faults, and what must hold at the end.

`python -m tests.simulation.simulation SEED [LIVES]` runs one seed, and prints what it came to.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from fencepost.store.contract import Chunk, StreamInfo
from fencepost.store.settings import SqliteSettings
from fencepost.store.sqlite.check import check
from fencepost.store.sqlite.store import SqliteStore
from fencepost.testing.disk import write_image
from tests.simulation.clients import (
    FENCED,
    STREAMS,
    BrokenPromiseError,
    Client,
    Committer,
    KeyedWriter,
    Producer,
    Reader,
    Worker,
)
from tests.simulation.world import World

LIVES = 6


class Result(NamedTuple):
    """What a seed came to."""

    decisions: int
    messages: int
    simulated_s: float
    digest: str
    """Of everything that happened, and of the bytes on the disk."""


def clients_of(world: World) -> list[Client]:
    newest = [0]
    return [
        *(Producer(world, f"producer-{n}") for n in range(3)),
        *(KeyedWriter(world, f"keyed-{n}") for n in range(2)),
        Committer(world, "committer"),
        *(Worker(world, f"worker-{n}", newest) for n in range(2)),
        *(Reader(world, f"reader-{n}") for n in range(2)),
    ]


def simulate(
    seed: int, *, lives: int = LIVES, synchronous: str = "FULL", folder: Path | None = None
) -> Result:
    """Run a seed. Raises what is wrong, with the command that shows it again."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="simulation-") as place:
        try:
            return _simulate(seed, lives, synchronous, Path(place))
        except Exception as error:
            error.add_note(f"replay: just simulate {seed} {lives}")
            raise


def _simulate(seed: int, lives: int, synchronous: str, folder: Path) -> Result:
    world = World(seed, folder)
    try:
        world.begin()
        world.synchronous = synchronous
        clients = clients_of(world)
        for _ in range(lives):
            world.live([client.run for client in clients])
        for client in clients:
            client.is_ending = True
        world.live([client.run for client in clients], last=True)
        end = folder / "end"
        write_image(world.files(), end)
        found = world.loop.run_until_complete(_read_all(world, end))
        _hold_against(world, clients, found)
        findings = check(end).findings
        if findings:
            raise BrokenPromiseError(f"check finds {findings[:3]}")
    finally:
        world.loop.close()
    whole = hashlib.sha256("\n".join(world.trace).encode())
    for name, data in sorted(world.files().items()):
        whole.update(name.encode() + hashlib.sha256(data).digest())
    messages = sum(len(one) for one in found.values())
    return Result(world.decisions, messages, world.loop.time(), whole.hexdigest())


async def _read_all(world: World, folder: Path) -> dict[str, list[Any]]:
    """The messages of every stream, read by a store that knows nothing but the disk."""
    store = SqliteStore(SqliteSettings(folder=folder), world.clock)
    found: dict[str, list[Any]] = {}
    for path in (*STREAMS, FENCED):
        info = await store.look(path, touch=False)
        if not isinstance(info, StreamInfo):
            continue
        at, parts = info.first, []
        while at != info.tail:
            chunk = await store.read(info, at, bytes_max=1 << 20)
            if not isinstance(chunk, Chunk):
                raise BrokenPromiseError(f"{path} at {at}: {chunk}")
            parts.append(chunk.data)
            at = chunk.next
        found[path] = json.loads(b"[%b]" % b",".join(parts))
    await store.close()
    return found


def _hold_against(world: World, clients: list[Client], found: dict[str, list[Any]]) -> None:
    """What clients were told and shown, against what is there."""
    sent: set[str] = set().union(*(client.sent for client in clients))
    for path, messages in found.items():
        counted = Counter(messages)
        twice = [message for message, count in counted.items() if count > 1]
        if twice:
            raise BrokenPromiseError(f"{path} has {twice[0][:60]} {counted[twice[0]]} times")
        if strange := counted.keys() - sent:
            raise BrokenPromiseError(f"{path} has {next(iter(strange))[:60]}, which was never sent")
    for client in clients:
        _hold_client(client, found)
    numbers = [int(message.partition(":")[0]) for message in found.get(FENCED, ())]
    if numbers != sorted(numbers):
        raise BrokenPromiseError("a stale lease wrote behind a newer one")


def _hold_client(client: Client, found: dict[str, list[Any]]) -> None:
    for path in (*STREAMS, FENCED):
        messages = found.get(path, [])
        told = [receipt for receipt in client.receipts if receipt.stream == path]
        for receipt in told:
            place = receipt.place
            if place is None:
                if receipt.message in messages:
                    continue
                place = len(messages)
            if place >= len(messages) or messages[place] != receipt.message:
                raise BrokenPromiseError(
                    f"{client.name} was told that {receipt.message[:60]} is message {place} of"
                    f" {path}: it is not"
                )
        if isinstance(client, Producer):
            own = [one for one in messages if one.startswith(f"{client.name}:")]
            if own != [receipt.message for receipt in told]:
                raise BrokenPromiseError(f"{client.name} has another order in {path}")
        if isinstance(client, Reader):
            shown = json.loads(b"[%b]" % client.shown[path])
            if shown != messages[: len(shown)]:
                raise BrokenPromiseError(f"{client.name} read in {path} what is not there")
    if isinstance(client, Committer):
        first, second = set(found.get(STREAMS[0], ())), set(found.get(STREAMS[1], ()))
        for left, right in client.pairs:
            if (left in first) != (right in second):
                raise BrokenPromiseError(f"half of a commit is there: {left[:60]}")


def main() -> None:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else random.randrange(1 << 32)
    lives = int(sys.argv[2]) if len(sys.argv) > 2 else LIVES
    result = simulate(seed, lives=lives)
    print(  # noqa: T201  this is a command
        f"seed {seed}: {result.decisions} requests, {result.messages} messages,"
        f" {result.simulated_s:.1f} simulated seconds, {lives} power losses; {result.digest}"
    )


if __name__ == "__main__":
    main()
