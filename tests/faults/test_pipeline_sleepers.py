"""A driver that is stopped at any moment and wakes after another has taken over: it always loses.

The old driver is stopped by SIGSTOP at a random moment of a batch, its first one included. A new
one starts from the same checkpoint. The old one wakes either as soon as the new one has uploaded
for the first time (`early`), or when the new one has committed batches (`late`). Either way the old
one must end as fenced, the new one must never be, and every row must be there once, in order.
FENCEPOST_FAULT_KILLS=50 (`just faults`) makes it 20 drills.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from uuid import uuid4

import pytest

import fencepost
from tests.faults.pipeline_cluster import Process
from tests.faults.pipeline_driver import FENCED, ROWS, SINK
from tests.pipeline.sink_support import messages
from tests.serving import ServerProcess

ROOT = Path(__file__).parents[2]
SEED_ENV = "FENCEPOST_FAULT_SEED"
DRILLS = 20 if int(os.environ.get("FENCEPOST_FAULT_KILLS", "0")) >= 50 else 6
NEW_BATCHES = 6

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("wakes", ["early", "late"])
def test_a_driver_that_wakes_after_another_took_over_loses_and_the_other_lives(
    tmp_path: Path, wakes: str
) -> None:
    seed = int(os.environ.get(SEED_ENV, random.SystemRandom().randrange(10**9)))
    sys.stdout.write(f"replay: {SEED_ENV}={seed} ./test {__file__} -k {wakes}\n")
    dice = random.Random(f"{seed}/{wakes}")
    for number in range(DRILLS // 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        with ServerProcess(folder / "data") as server:
            # Half of the drills stop the driver in the first batch of its run.
            drill(server, folder, dice, wakes=wakes, batches_before=dice.choice((0, 0, 1, 2)))


def drill(
    server: ServerProcess, folder: Path, dice: random.Random, *, wakes: str, batches_before: int
) -> None:
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "metadata").write_text(json.dumps({"id": str(uuid4())}))
    old = start(server, checkpoint, folder / "old", 0, 0)
    new: Process | None = None
    try:
        old.wait_for(rf"looked {batches_before}\n")
        # Not a wait for anything: the moment of the stop is to be any moment of a batch.
        threading.Event().wait(dice.uniform(0.0, 0.03))
        old.signal(signal.SIGSTOP)
        first = next_batch(server)
        new = start(server, checkpoint, folder / "new", first, NEW_BATCHES)
        new.wait_for(rf"uploaded {first}\n" if wakes == "early" else rf"committed {first + 2}\n")
        old.signal(signal.SIGCONT)

        assert (old.wait(), "fenced: " in old.output) == (FENCED, True), old.output
        assert new.wait() == 0, new.output
    finally:
        old.kill()
        if new is not None:
            new.kill()
    assert messages(server.url, SINK) == list(range((first + NEW_BATCHES) * ROWS))


def next_batch(server: ServerProcess) -> int:
    """Where the checkpoint of the new driver stands: behind the last batch that was published."""
    with fencepost.connect(server.url) as client:
        try:
            batch = client.writer(SINK).batch
        except fencepost.WriterNotFoundError:
            return 0
    return 0 if batch is None else batch + 1


def start(
    server: ServerProcess, checkpoint: Path, scratch: Path, first: int, batches: int
) -> Process:
    scratch.mkdir()
    arguments = [server.url, str(checkpoint), str(scratch), str(first), str(batches)]
    command = [sys.executable, "-m", "tests.faults.pipeline_driver", *arguments]
    return Process(command, {}, ROOT)
