"""A driver of the sink that the sleep drills stop and wake: a process of its own, without Spark.

It plans, uploads and commits batch after batch as Spark does, until it is fenced (exit code 4) or
has written as many as it was asked for. Arguments: the server's URL, the checkpoint folder, the
scratch folder, the first batch, and the number of batches, 0 for no end. It prints each step.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fencepost.pipeline.errors import FencedRunError
from tests.pipeline.sink_driver import Driver

FENCED = 4
SINK = "drills/out"
ROWS = 3


def rows_of(batch: int) -> list[str]:
    return [str(batch * ROWS + index) for index in range(ROWS)]


def main(url: str, checkpoint: str, scratch: str, first: int, batches: int) -> int:
    os.environ["SPARK_LOCAL_DIRS"] = scratch
    server: Any = SimpleNamespace(url=url)
    driver = Driver(server, Path(scratch), stream=SINK, checkpointLocation=checkpoint)
    driver.query = json.loads(Path(checkpoint, "metadata").read_text())["id"]
    try:
        for batch in range(first, first + batches) if batches else count(first):
            writer = driver.writer()
            say(f"looked {batch}")
            staged = driver.stage(batch, rows_of(batch), writer=writer)
            say(f"uploaded {batch}")
            driver.writer().commit(list(staged), batch)
            say(f"committed {batch}")
    except FencedRunError as error:
        say(f"fenced: {error}")
        return FENCED
    return 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    url, checkpoint, scratch, first, batches = sys.argv[1:]
    sys.exit(main(url, checkpoint, scratch, int(first), int(batches)))
