"""A driver that drains an app on Spark for the kill tests: a process of its own.

One argument, a JSON object: see `Job`. It claims and hands out leases for ever, and is started
again when it is killed. `slow_seconds` makes every handler slow, so that a kill or a freeze finds
handlers at work.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from fencepost.pipeline import session
from fencepost.pipeline.reactions import drain
from tests.faults.pipeline_query import FAILED, say

APP = "tests.faults.pipeline_reaction_app:app"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to run."""

    master: str
    url: str
    conf: dict[str, Any] = {}
    rounds: bool = False
    """End when nothing is left to do."""


def main(job: Job) -> int:
    spark = session("reactions", master=job.master, conf={"spark.ui.enabled": False, **job.conf})
    spark.sparkContext.setLogLevel("ERROR")
    say("started")
    try:
        done = drain(spark, APP, options={"url": job.url}, streams=2, follow=not job.rounds)
    except Exception as error:
        say(f"failed: {error}")
        return FAILED
    say(f"drained: {done}")
    return 0


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Job)))
