"""`fencepost demo`: the whole product in a minute or two, on this machine, through failures.

A server is started; orders are produced into it while it is killed; reactions take goods from
shelves while one of their workers is killed; a Spark query prices the orders while the server and
then the query itself are killed; a table is made of the result; everything is held against
everything. The exit code is 0 only if not a single order is missing, doubled or wrong.
Nothing is left running, and the folder is removed unless it is to be kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import fencepost
from fencepost.cli import demo_shop
from fencepost.cli.interrupts import ended_as_by_ctrl_c
from fencepost.cli.render import REFUSED

ORDERS_DEFAULT = 20_000
ORDERS_MIN, ORDERS_MAX = 1_000, 10_000_000
BATCHES = 8
"""Micro-batches that the query makes of the orders."""
START_SECONDS_MAX = 60.0
SPARK_SECONDS_MAX = 600.0
POLL_SECONDS = 0.2
READY = re.compile(r"listening on (http://\S+?:(\d+))")
COUNTRIES = (("DE", "EUR"), ("FR", "EUR"), ("GB", "GBP"), ("SE", "SEK"), ("PL", "PLN"))


class DemoError(Exception):
    """A step could not be done; the message says which and what was said."""


class Claim(NamedTuple):
    """A line of the last table: what was to be shown, and whether it was."""

    what: str
    shown: str
    holds: bool


class Server:
    """A real `fencepost serve` in a process of its own, to be killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self.port = 0
        self.url = ""
        self.kills = 0

    def start(self) -> None:
        log = (self._folder / "server.log").open("a")
        command = [sys.executable, "-m", "fencepost", "serve", "--port", str(self.port)]
        with log:
            self._process = subprocess.Popen(
                [*command, "--data", str(self._folder / "data")],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = READY.search(line)
            if found is not None:
                self.url, self.port = found[1], int(found[2])
                return
        raise DemoError(f"the server did not start; see {self._folder / 'server.log'}")

    def kill_and_restart(self) -> None:
        """End it without a chance to finish anything, and start it on the same folder and port."""
        self.end(signal.SIGKILL)
        self.kills += 1
        self.start()

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(how)
            process.wait(START_SECONDS_MAX)
            assert process.stdout is not None
            process.stdout.close()


class Query:
    """The Spark job in a process of its own, to be killed with its JVM."""

    def __init__(
        self, folder: Path, scratch: str, url: str, rows_per_batch: int, *more: str
    ) -> None:
        self._log_path = folder / "spark.log"
        command = [sys.executable, "-m", "fencepost.pipeline.demo", "--url", url]
        command += ["--folder", str(folder), "--rows-per-batch", str(rows_per_batch), *more]
        with self._log_path.open("a") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "TMPDIR": scratch},
                start_new_session=True,
            )

    @property
    def ended(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(START_SECONDS_MAX)

    def failed(self) -> DemoError:
        said = self._log_path.read_text(errors="replace").strip().splitlines()[-15:]
        return DemoError("the Spark job ended early; the end of its log:\n" + "\n".join(said))


def demo(
    orders: Annotated[
        int,
        typer.Option(min=ORDERS_MIN, max=ORDERS_MAX, help="How many orders the demo produces."),
    ] = ORDERS_DEFAULT,
    keep: Annotated[
        Path | None,
        typer.Option(help="Keep data, table, plot and logs in this new folder."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")] = False,
) -> None:
    """Show the whole product through failures: a server, a producer, a Spark pipeline, an audit."""
    console = Console(stderr=True)
    if keep is not None and keep.exists():
        console.print(f"fencepost: {keep} exists: name a new folder with --keep", style="red")
        raise typer.Exit(2)
    folder = Path(tempfile.mkdtemp(prefix="fencepost-demo-")) if keep is None else keep
    folder.mkdir(parents=True, exist_ok=True)
    server = Server(folder)
    began = time.monotonic()
    try:
        with ended_as_by_ctrl_c(), _progress(console) as progress:
            claims = _show(folder, server, orders, progress)
    except (DemoError, fencepost.FencepostError) as error:
        console.print(f"fencepost: the demo could not go on: {error}", style="red", markup=False)
        raise typer.Exit(REFUSED) from None
    finally:
        server.end()
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    clean = all(claim.holds for claim in claims)
    _tell(claims, clean, time.monotonic() - began, keep, as_json=as_json)
    if not clean:
        raise typer.Exit(REFUSED)


def _show(folder: Path, server: Server, orders: int, progress: Progress) -> list[Claim]:
    step = progress.add_task("starting a server", total=None)
    _check_spark()
    server.start()
    progress.update(step, description=f"a server at {server.url}", total=1, completed=1)
    produced = _produce(server, orders, progress)
    kills = server.kills
    sold = _sell(folder, server, progress)
    # A Spark that is killed removes nothing. Not below a folder to keep, whose path may be long:
    # Spark makes sockets in it.
    with tempfile.TemporaryDirectory(
        prefix="fencepost-spark-", ignore_cleanup_errors=True
    ) as scratch:
        found = _price(folder, scratch, server, orders, progress)
    expected = {"orders": orders, "different": orders, "total": orders * (orders - 1) // 2}
    audited = found["audited"]
    return [
        Claim(
            f"the server was killed {kills} times while orders were written",
            f"{found['orders']['orders']:,} of {produced:,} orders stored, none twice",
            found["orders"] == expected,
        ),
        Claim(
            "a worker was killed while reactions took goods from shelves",
            f"{sold.taken} goods taken for {demo_shop.ORDERS} orders, none twice",
            sold == (demo_shop.ORDERS, demo_shop.ORDERS),
        ),
        Claim(
            "the server, then the query, was killed in the middle of pricing",
            f"{found['priced']['orders']:,} priced orders, none lost, none doubled",
            found["priced"] == expected,
        ),
        Claim(
            "a Delta table was kept of them",
            f"{found['table']['orders']:,} rows, the same orders",
            found["table"] == expected,
        ),
        Claim(
            "every stream and producer was audited",
            f"{audited['messages']:,} messages in {audited['streams']} streams, "
            f"{sum(audited['defects'].values())} defects",
            not audited["defects"],
        ),
    ]


def _check_spark() -> None:
    from fencepost.pipeline.errors import PipelineError
    from fencepost.pipeline.java import find_java
    from fencepost.pipeline.sessions import check_pyspark

    try:
        check_pyspark()
        find_java()
    except PipelineError as error:
        raise DemoError(str(error)) from None


def _produce(server: Server, orders: int, progress: Progress) -> int:
    """Write orders exactly once, with the server killed under them twice."""
    step = progress.add_task("producing orders", total=orders)
    kill_at = {orders // 3, 2 * orders // 3}
    restarting: threading.Thread | None = None
    try:
        with fencepost.connect(server.url) as client:
            stream = client.create("demo/orders", content_type="application/json")
            with stream.producer("shop", batch_bytes_max=16 << 10) as producer:
                for number in range(orders):
                    country, currency = COUNTRIES[number % len(COUNTRIES)]
                    amount = round(5 + number * 7919 % 20_000 / 100, 2)
                    producer.append(
                        {"id": number, "country": country, "currency": currency, "amount": amount}
                    )
                    if number in kill_at:
                        if restarting is not None:
                            restarting.join()
                        restarting = threading.Thread(target=server.kill_and_restart)
                        restarting.start()
                        progress.update(
                            step, description="producing orders (the server was killed)"
                        )
                    if number % 500 == 0:
                        progress.update(step, completed=number)
    finally:
        # Also when it is interrupted: a server that is only just being started could not be ended.
        if restarting is not None:
            restarting.join()
    progress.update(step, description="orders produced", completed=orders)
    return orders


def _sell(folder: Path, server: Server, progress: Progress) -> demo_shop.Sold:
    """Have reactions answer orders, with one of their two workers killed."""
    step = progress.add_task("workers answer orders (one is killed)", total=None)
    sold = demo_shop.sell(server.url, folder / "workers.log")
    progress.update(step, description="orders answered, a worker was killed", total=1, completed=1)
    return sold


def _price(
    folder: Path, scratch: str, server: Server, orders: int, progress: Progress
) -> dict[str, Any]:
    """Run the query, killing the server after a batch and the query after another."""
    rows_per_batch = -(-orders // BATCHES)
    step = progress.add_task("Spark prices them (starting a JVM)", total=BATCHES)
    report = folder / "report.json"
    first = Query(folder, scratch, server.url, rows_per_batch)
    try:
        _until(first, lambda: _batches(server), 2, progress, step)
        progress.update(step, description="Spark prices them (the server was killed)")
        server.kill_and_restart()
        _until(first, lambda: _batches(server), 4, progress, step)
    finally:
        first.kill()
    progress.update(step, description="Spark prices them (the query was killed, and started again)")
    more = ["--report", str(report), "--plot", str(folder / "audit.png")]
    second = Query(folder, scratch, server.url, rows_per_batch, *more)
    try:
        _until(second, lambda: _batches(server), BATCHES, progress, step)
        progress.update(step, description="orders priced")
        last = progress.add_task("keeping a Delta table, auditing all of it", total=None)
        _until(second, lambda: int(second.ended is not None), 1, progress, last)
        if second.ended != 0:
            raise second.failed()
    finally:
        second.kill()
    progress.update(last, description="table kept, streams audited", total=1, completed=1)
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def _batches(server: Server) -> int:
    """How many micro-batches are committed, as the server says."""
    with fencepost.connect(server.url) as client:
        try:
            batch = client.writer("demo-priced").batch
        except fencepost.WriterNotFoundError:
            return 0
    return 0 if batch is None else batch + 1


def _until(
    query: Query, measure: Callable[[], int], enough: int, progress: Progress, step: Any
) -> None:
    deadline = time.monotonic() + SPARK_SECONDS_MAX
    while (done := measure()) < enough:
        if query.ended not in (None, 0):
            raise query.failed()
        if time.monotonic() > deadline:
            raise DemoError(f"nothing happened for {SPARK_SECONDS_MAX:.0f} seconds")
        progress.update(step, completed=done)
        time.sleep(POLL_SECONDS)
    progress.update(step, completed=done)


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield progress


def _tell(
    claims: list[Claim], clean: bool, seconds: float, keep: Path | None, *, as_json: bool
) -> None:
    if as_json:
        shown = {"clean": clean, "seconds": round(seconds, 1)}
        typer.echo(json.dumps({**shown, "claims": [claim._asdict() for claim in claims]}))
        return
    console = Console()
    table = Table("what happened", "what was found", "", title=f"In {seconds:.0f} seconds")
    for claim in claims:
        table.add_row(claim.what, claim.shown, "[green]holds" if claim.holds else "[red]BROKEN")
    console.print(table)
    onward = Table.grid(padding=(0, 2))
    if keep is not None:
        onward.add_row(f"./run serve --data {keep / 'data'}", "the server of this demo, again")
        onward.add_row(str(keep), "its table, its plot (audit.png), its logs")
    onward.add_row("./run serve", "a server of your own")
    onward.add_row("docs/start.md", "the first stream, from Python")
    onward.add_row("docs/guides/pipeline.md", "a pipeline of your own on Spark")
    onward.add_row("docs/guides/pipeline-guarantees.md", "what is promised")
    console.print(Panel(onward, title="where to go next", title_align="left"))
