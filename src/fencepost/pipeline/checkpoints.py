"""What the checkpoint of a query says about a batch, if it is a folder of this machine.

Spark writes the file `offsets/N` before it runs batch N: a version, a line about the batch, and for
each source the offset where the batch ends. The batch begins where the batch before it ends. So the
driver can say which positions of the log a batch was read from. A restored older checkpoint gives
batches the same numbers and cuts them at other positions, and the server refuses them by that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fencepost.client.results import PositionRange

POSITION_MAX = 2**53 - 1


def local_folder(checkpoint: str | None) -> Path | None:
    """The folder of a checkpoint; None where it is not on this machine."""
    place = (checkpoint or "").removeprefix("file://").removeprefix("file:")
    return None if not place or "://" in place else Path(place)


def batch_range(checkpoint: str | None, batch: int) -> PositionRange | None:
    """The positions that a batch was read from, if its only source is a stream of Fencepost.

    Where the first batch began is not in the checkpoint.
    """
    folder = local_folder(checkpoint)
    if folder is None:
        return None
    end = _only_offset(folder / "offsets" / str(batch))
    until = _position(end)
    if until is None:
        return None
    if batch == 0:
        return PositionRange(until=until)
    start = _only_offset(folder / "offsets" / str(batch - 1))
    if start is None:
        return None
    after = _position(start)
    return None if after is not None and after > until else PositionRange(after=after, until=until)


def _only_offset(file: Path) -> dict[str, Any] | None:
    """The offset of the only source of a query; None if there are several, or it is not ours."""
    try:
        lines = file.read_text().splitlines()[2:]
        offset = json.loads(lines[0]) if len(lines) == 1 else None
    except (OSError, ValueError):
        return None
    ours = isinstance(offset, dict) and len(offset) == 1 and set(offset) <= {"position", "start"}
    return offset if ours else None


def _position(offset: dict[str, Any] | None) -> int | None:
    found = None if offset is None else offset.get("position")
    return found if isinstance(found, int) and -1 <= found <= POSITION_MAX else None
