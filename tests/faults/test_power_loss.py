"""Power loss: whatever moment the disk stops at, every answer that was given is on it.

SIGKILL proves little, because the page cache survives it. Here a VFS records every write and sync
of a store under concurrent requests, and from that record come the disks that a power loss may
leave: nothing that was not synced, the first part of it, any sectors of it, or (SIGKILL) all of it.
Each is opened and held against a model. The same check must fail when SQLite does not sync.

FENCEPOST_FAULT_SEEDS=N runs N seeds; FENCEPOST_FAULT_SEED=S runs seed S alone.
"""

import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from fencepost.testing.disk import (
    Disk,
    Image,
    Mark,
    Operation,
    Sync,
    everything,
    nothing,
    some_prefix,
    some_sectors,
    write_image,
)
from tests.faults.recovery import LostError, check
from tests.faults.workload import Answered, Asked, Decided, History, drive

ROUNDS = 14
POINTS_PER_SEED = 60
SEEDS_DEFAULT = 4
KILLS_PER_SEED = 10


def seeds() -> list[int]:
    alone = os.environ.get("FENCEPOST_FAULT_SEED")
    if alone is not None:
        return [int(alone)]
    # The long run is asked for by its number of kills, and has more of this too.
    kills = int(os.environ.get("FENCEPOST_FAULT_KILLS", "0"))
    count = os.environ.get("FENCEPOST_FAULT_SEEDS", max(SEEDS_DEFAULT, kills // KILLS_PER_SEED))
    return list(range(int(count)))


class Crash(NamedTuple):
    """A disk after a crash, and what had been said by then."""

    at: int
    where: str
    variant: str
    image: Image
    answered_count: int
    asked_count: int


def where(operations: Sequence[Operation], at: int) -> str:
    """What the crash comes before or after, in words that a coverage count can use."""
    if at == len(operations):
        return "at the end"
    operation = operations[at]
    before = operations[at - 1] if at else None
    if isinstance(before, Mark) and isinstance(before.label, Answered):
        return "after answer"
    if isinstance(operation, Mark):
        match operation.label:
            case Asked():
                return "before decide"
            case Decided():
                return "after decide"
            case Answered():
                return "before answer"
            case other:
                raise AssertionError(other)
    if isinstance(operation, Sync):
        return f"before sync of {operation.file.rpartition('.')[2]}"
    if isinstance(before, Sync):
        return f"after sync of {before.file.rpartition('.')[2]}"
    return f"before {type(operation).__name__.lower()}"


def points(operations: Sequence[Operation], dice: random.Random, count: int) -> list[int]:
    """Places to crash at: the same number for every kind of place, as far as there are so many."""
    kinds: dict[str, list[int]] = {}
    for at in range(len(operations) + 1):
        kinds.setdefault(where(operations, at), []).append(at)
    chosen: set[int] = set()
    while len(chosen) < min(count, len(operations)):
        for places in kinds.values():
            chosen.add(dice.choice(places))
    return sorted(chosen)


def crashes(history: History, seed: int) -> Iterator[Crash]:
    """The disks that this history may leave, in the order of their crash points."""
    dice = random.Random(seed)
    operations = history.log.operations
    variants = {
        "nothing unsynced": nothing,
        "a prefix": some_prefix(dice),
        "some sectors": some_sectors(dice),
        "everything (SIGKILL)": everything,
    }
    disk = Disk()
    answered_count = asked_count = done = 0
    for at in points(operations, dice, POINTS_PER_SEED):
        disk.advance(operations, at)
        for operation in operations[done:at]:
            if isinstance(operation, Mark) and isinstance(operation.label, Answered):
                answered_count = max(answered_count, operation.label.number + 1)
            elif isinstance(operation, Mark) and isinstance(operation.label, Asked):
                asked_count = operation.label.number + 1
        done = at
        for variant, survives in variants.items():
            image = disk.cut(survives)
            yield Crash(at, where(operations, at), variant, image, answered_count, asked_count)


@pytest.mark.parametrize("seed", seeds())
async def test_every_answer_survives_a_power_loss_at_any_moment(seed: int, tmp_path: Path) -> None:
    history = await drive(tmp_path / "first", seed=seed, rounds=ROUNDS, on_loop=seed % 4 == 3)

    covered: Counter[str] = Counter()
    seen: set[tuple[int, int, int]] = set()
    for number, crash in enumerate(crashes(history, seed)):
        # Variants of one moment often leave the same bytes; one look at them is enough.
        key = (hash(frozenset(crash.image.items())), crash.answered_count, crash.asked_count)
        if key in seen:
            continue
        seen.add(key)
        folder = tmp_path / str(number)
        write_image(crash.image, folder)
        try:
            await check(
                folder,
                history,
                answered_count=crash.answered_count,
                asked_count=crash.asked_count,
            )
        except Exception as error:
            error.add_note(
                f"crash {crash.where} (operation {crash.at}), the disk kept {crash.variant};"
                f" replay: FENCEPOST_FAULT_SEED={seed} ./test tests/faults/test_power_loss.py"
            )
            raise
        covered[crash.where] += 1

    for place in (
        "before decide",
        "after decide",
        "before write",
        "before sync of db-wal",
        "after sync of db-wal",
        "before answer",
        "after answer",
        "before sync of db",
    ):
        assert covered[place], f"no crash came {place}: {covered}"


@pytest.mark.parametrize("synchronous", ["OFF", "NORMAL"])
async def test_without_syncs_the_same_check_finds_lost_answers(
    synchronous: str, tmp_path: Path
) -> None:
    """The check above can fail: below FULL, answers do not wait for the disk."""
    history = await drive(tmp_path / "first", seed=0, rounds=ROUNDS, synchronous=synchronous)

    lost = 0
    for number, crash in enumerate(crashes(history, 0)):
        if crash.variant != "nothing unsynced" or crash.answered_count == 0:
            continue
        folder = tmp_path / str(number)
        write_image(crash.image, folder)
        try:
            await check(
                folder,
                history,
                answered_count=crash.answered_count,
                asked_count=crash.asked_count,
            )
        except LostError:
            lost += 1

    assert lost > 10, "the check does not notice that answers were lost"


async def test_a_power_loss_during_the_very_first_start_leaves_a_folder_that_opens(
    tmp_path: Path,
) -> None:
    """The file turns to WAL under a rollback journal; no mixture of the two may stay behind."""
    history = await drive(tmp_path / "first", seed=0, rounds=0)
    operations = history.log.operations
    turned = next(
        at
        for at, operation in enumerate(operations)
        if isinstance(operation, Sync) and operation.file.endswith("-wal")
    )

    dice = random.Random(0)
    disk = Disk()
    images: list[Image] = []
    for at in range(turned + 2):
        disk.advance(operations, at)
        variants = [nothing, everything, *(some_sectors(dice) for _ in range(8))]
        for survives in variants:
            image = disk.cut(survives)
            if image not in images:
                images.append(image)

    assert len(images) > 20
    for number, image in enumerate(images):
        folder = tmp_path / str(number)
        write_image(image, folder)
        assert await check(folder, history, answered_count=0, asked_count=0) == 0
