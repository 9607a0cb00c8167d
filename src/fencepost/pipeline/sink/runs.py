"""What the driver remembers about a run of a query between its batches: the epoch, above all.

Spark calls the driver's side of a sink in processes that come and go, so memory does not last from
one batch to the next. But all of them are on the driver's machine and see the scratch folder that
Spark keeps for this driver and removes with it. There a run, known by Spark's run id, writes down
the epoch it was given when it committed first. A run that finds no note has never opened its
writer. So a driver that was replaced keeps its old epoch for ever, and is refused by it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fencepost.pipeline.sink.errors import SinkError
from fencepost.pipeline.sink.identity import Identity

SCRATCH_VARIABLE = "SPARK_LOCAL_DIRS"


class Note(msgspec.Struct):
    """A run of one writer."""

    epoch: int | None = None
    batch: int | None = None
    """The last batch that this run committed or found committed."""
    write: str | None = None
    """Which write that was."""
    mismatches: int = 0
    """Batches that came again with other rows."""


class RunFile:
    """The note of one run, held while it is open: nobody else reads or changes it meanwhile."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        data = os.pread(descriptor, 1 << 16, 0)
        # An empty file is new. A torn one cannot be: it is written in one call, below a page.
        self.note = msgspec.json.decode(data, type=Note) if data else Note()

    def save(self) -> None:
        """Keep the note for the batches to come."""
        data = msgspec.json.encode(self.note)
        os.pwrite(self._descriptor, data, 0)
        os.ftruncate(self._descriptor, len(data))


@contextmanager
def run_file(folder: Path, url: str, identity: Identity) -> Iterator[RunFile]:
    """The note about `identity`'s run at the server `url`, and the right to change it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise SinkError(f"{folder} is somebody else's folder: set spark.local.dir to one of yours")
    named = hashlib.sha256("\0".join((url, identity.name, identity.run)).encode()).hexdigest()
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder / f"{named}.json", flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Scratch folders are swept by age on some systems: a run that lives is never old.
        os.utime(descriptor)
        yield RunFile(descriptor)
    finally:
        os.close(descriptor)


def notes_folder(environment: dict[str, str] | None = None) -> Path:
    """Where this driver keeps its notes."""
    found = os.environ if environment is None else environment
    for scratch in found.get(SCRATCH_VARIABLE, "").split(","):
        if scratch and Path(scratch).is_dir():
            return Path(scratch) / "fencepost-runs"
    return Path(tempfile.gettempdir()) / f"fencepost-runs-{os.getuid()}"
