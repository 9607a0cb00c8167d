"""`python -m benchmarks.targets`: what reactions of an app cost for each event, by their targets.

Processor time of the server (the embedded store) and of one worker that settles, for a reaction
whose targets are the streams of its events, and for computed targets, few and many. The handler
does nothing. How fast anything was decides nothing.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fencepost
from benchmarks import machine
from fencepost.events import App, AppSettings, Context, Entity, Event, Recorded
from tests.serving import ServerProcess

TICKS = os.sysconf("SC_CLK_TCK")


class Placed(Event):
    number: int


class Order(Entity, stream="orders/{id}"):
    pass


def processor_seconds(pid: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def settle(events: int, to: Callable[[Recorded[Any]], str] | None) -> str:
    """Processor time for each event of 50 streams, in commits of 100."""
    app = App("shop", entities=[Order], events=[Placed], settings=AppSettings(start="first"))

    @app.reaction(Placed, to=to)
    def nothing(event: Recorded[Placed], context: Context) -> None:
        pass

    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(Path(folder) / "data") as server,
        fencepost.connect(server.url) as client,
        app.open(client) as shop,
    ):
        for first in range(0, events, 100):
            placed = [Placed(number=first + n) for n in range(100)]
            shop.commit(f"orders/{first // 100 % 50}", placed)
        began, own, at = processor_seconds(server.pid), time.process_time(), time.perf_counter()
        shop.settle(timeout=600)
        seconds = time.perf_counter() - at
        served = (processor_seconds(server.pid) - began) / events * 1e6
        worked = (time.process_time() - own) / events * 1e6
    return f"server {served:.0f} us, worker {worked:.0f} us, {events / seconds:,.0f} events/s"


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=5_000)
    options = parser.parse_args()
    print(machine.facts(Path(tempfile.gettempdir())))
    print(f"streams of the events: {settle(options.events, None)}", flush=True)
    for count in (10, 500):
        found = settle(options.events, lambda event, count=count: f"t/{event.data.number % count}")
        print(f"{count} computed targets: {found}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
