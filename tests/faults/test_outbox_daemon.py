"""The daemon under kills, lost answers, servers that come and go, hooks that hang, power loss."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fencepost.outbox.daemon import rows
from fencepost.outbox.daemon.database import File, Writer, load_queries, make_folder, open_file
from fencepost.outbox.states import Row
from fencepost.testing.disk import Disk, Image, Mark, everything, nothing, some_sectors, write_image
from fencepost.testing.vfs import FaultVfs
from tests.engines import engine as engine
from tests.integration.mesh_support import Shop
from tests.outboxing import OutboxProcess, until
from tests.serving import ServerProcess

FAILPOINT = "FENCEPOST_OUTBOX_FAILPOINT"
# httpcore leaves a unix socket that could not be connected to the collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket.socket.* family=1:pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(scope="module")
def http(server_process: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server_process.url, timeout=30) as client:
        yield client


@pytest.fixture
def shop(http: httpx.Client) -> Shop:
    return Shop(http)


class Daemons:
    """Daemons on one folder, one after the other."""

    def __init__(self, folder: Path, url: str, mesh: str) -> None:
        self.folder, self.url, self.mesh = folder, url, mesh

    def __call__(self, failpoint: str = "", *arguments: str, member: str = "ann") -> OutboxProcess:
        environment = {FAILPOINT: failpoint} if failpoint else {}
        return OutboxProcess(
            *(self.folder, self.url, [self.mesh], member),
            arguments=arguments,
            environment=environment,
        )


@pytest.fixture
def daemons(tmp_path: Path, server_process: ServerProcess, shop: Shop) -> Daemons:
    return Daemons(tmp_path / "outbox", server_process.url, shop.name)


def held(shop: Shop, message_id: str) -> int:
    """How often the inbox of bea has a message."""
    return [entry["client_message_id"] for entry in shop.held("inbox/bea")].count(message_id)


def ended(process: OutboxProcess) -> None:
    """The daemon has killed itself."""
    assert process.wait() == -9
    process.http.close()


# Scenarios of the spec, by their numbers.


def test_1_a_kill_between_the_commit_and_the_answer(daemons: Daemons, shop: Shop) -> None:
    killed = daemons("accepted")
    killed.start()
    with pytest.raises(httpx.TransportError):
        killed.send("m-1")
    ended(killed)

    with daemons() as outbox:
        again = outbox.send("m-1")

        assert again.status_code in (200, 202)
        assert again.json()["duplicate"]
        assert outbox.settled()["status"] == "done"
        assert len(outbox.rows()) == 1
    assert held(shop, "m-1") == 1


def test_2_and_4_a_kill_between_the_answer_of_the_server_and_the_row(
    daemons: Daemons, shop: Shop
) -> None:
    killed = daemons("answered")
    killed.start()
    with contextlib.suppress(httpx.TransportError):
        killed.send("m-1")
    ended(killed)
    assert held(shop, "m-1") == 1

    with daemons() as outbox:
        row = outbox.settled()

        assert (row["status"], row["attempts"]) == ("done", 2)
    assert held(shop, "m-1") == 1
    assert shop.checked() == []


def test_5_every_cell_of_the_lookup_table_over_the_socket(tmp_path: Path) -> None:
    """A server that is frozen keeps one row in flight, and the next one of its lane pending."""
    with ServerProcess(tmp_path / "data") as server:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            shop = Shop(client)
        with Daemons(tmp_path / "outbox", server.url, shop.name)() as outbox:
            until(lambda: outbox.get("/v1/health")["status"] == "ok")
            outbox.send("done")
            stored_as = outbox.settled("done")["broker_message_id"]
            for name in ("dead", "aborted"):
                outbox.send(name, ref="nowhere")
                outbox.settled(name)
            outbox.http.post(f"/v1/outbox/{outbox.row('aborted')['id']}/drop", json={})
            os.kill(server.pid, signal.SIGSTOP)
            try:
                for name in ("inflight", "pending"):
                    outbox.send(name)
                until(lambda: outbox.row("inflight")["status"] == "inflight")
                answers = {
                    (name, same): cell(outbox, name, same)
                    for name in ("pending", "inflight", "done", "dead", "aborted")
                    for same in (True, False)
                }
            finally:
                os.kill(server.pid, signal.SIGCONT)
            until(lambda: outbox.counts() == {"done": 3, "dead": 1, "aborted": 1})

    assert answers == {
        ("pending", True): (202, None, None),
        ("pending", False): (409, "outbox_pending_fingerprint_mismatch", None),
        ("inflight", True): (202, None, None),
        ("inflight", False): (409, "outbox_inflight_fingerprint_mismatch", None),
        ("done", True): (200, None, stored_as),
        ("done", False): (409, "outbox_done_fingerprint_mismatch", None),
        ("dead", True): (409, "outbox_dead_fingerprint_match", None),
        ("dead", False): (409, "outbox_dead_fingerprint_mismatch", None),
        ("aborted", True): (409, "outbox_aborted_fingerprint_match", None),
        ("aborted", False): (409, "outbox_aborted_fingerprint_mismatch", None),
    }


def cell(outbox: OutboxProcess, name: str, same: bool) -> tuple[int, str | None, str | None]:
    """What the same send again is answered, or another one under its id."""
    ref = "nowhere" if name in ("dead", "aborted") else "alerts"
    answer = outbox.send(name, ref=ref, body="hello" if same else "another")
    found = answer.json()
    if answer.status_code == 409:
        assert found["code"] == "idempotency_key_reused"
        assert re.fullmatch("[0-9a-f]{16}", found["fingerprint_prefix"])
    return answer.status_code, found.get("conflict"), found.get("broker_message_id")


def test_16_and_22_a_server_that_is_away_and_one_without_dedupe(tmp_path: Path) -> None:
    """Sends are taken while the server is away; without dedupe the daemon ends with 10."""
    server = ServerProcess(tmp_path / "data")
    server.start()
    with httpx.Client(base_url=server.url, timeout=30) as client:
        shop = Shop(client)
        server.stop()
        daemons = Daemons(tmp_path / "outbox", server.url, shop.name)
        with daemons() as outbox:
            for number in range(5):
                assert outbox.send(f"m-{number}").status_code == 202
            assert outbox.counts() == {"pending": 5}
            server.restart()
            until(lambda: outbox.counts() == {"done": 5})
            assert [held(shop, f"m-{number}") for number in range(5)] == [1] * 5

            server.stop()
            assert outbox.send("late").status_code == 202
            server.environment = {"FENCEPOST_MESH_DEDUPE": "false"}
            server.restart()
            assert outbox.wait() == 10
            server.stop()
            server.environment = {}
            server.restart()
            outbox.start()
            assert outbox.settled("late")["status"] == "done"
            assert held(shop, "late") == 1
            assert sum(outbox.counts().values()) == 6
    server.stop()


def test_17_a_message_that_is_delivered_twice_is_one_row_and_one_run_of_a_hook(
    daemons: Daemons, shop: Shop, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    config = tmp_path / "outbox.toml"
    write = f"import sys, json; open({str(ran)!r}, 'a').write(json.load(sys.stdin)['id'] + '\\n')"
    config.write_text(
        "[hooks.count]\non = 'message'\n"
        f"command = [{json.dumps(sys.executable)}, '-c', {json.dumps(write)}]\n"
    )
    with daemons("", "--config", str(config)) as first:
        until(lambda: first.get("/v1/health")["status"] == "ok")  # now the hook has its place
    killed = daemons("stored", "--config", str(config))
    killed.start()
    with contextlib.suppress(httpx.TransportError):
        killed.send("m-1")
    ended(killed)

    with daemons("", "--config", str(config)) as outbox:
        outbox.send("m-2")
        until(lambda: len(outbox.inbox()) == 2)
        until(lambda: ran.exists() and len(ran.read_text().split()) == 2)

        assert [entry["client_message_id"] for entry in outbox.inbox()] == ["m-1", "m-2"]
        assert "fencepost_outbox_inbox_duplicates_total 1.0" in outbox.http.get("/v1/metrics").text
    assert len(set(ran.read_text().split())) == 2


@pytest.mark.parametrize(
    ("feature", "code"),
    [
        ("[features.require.key_epoch]\nversion = 1", 10),
        ("[features.require.max_payload]\nversion = 9", 11),
        ("[features.require.max_payload]\nversion = 1\ninline_bytes = 1_000_000_000_000", 12),
    ],
)
def test_18_what_a_mesh_lacks_ends_the_daemon_with_a_code_of_its_own(
    daemons: Daemons, tmp_path: Path, feature: str, code: int
) -> None:
    config = tmp_path / "outbox.toml"
    config.write_text(feature)
    done = subprocess.run(
        daemons("", "--config", str(config))._command(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == code, done.stderr
    assert f"{4000 + code} " in done.stderr
    left = json.loads((daemons.folder / "last_exit.json").read_text())
    assert (left["exit_code"], left["close_code"]) == (code, 4000 + code)


def test_21_hooks_that_hang_fail_or_flood_do_not_touch_deliveries(
    daemons: Daemons, tmp_path: Path
) -> None:
    scripts = {
        "hangs": "import time; time.sleep(600)",
        "floods": "import sys\nwhile True: sys.stdout.write('x' * 10_000)",
        "fails": "raise SystemExit(3)",
        "answers": 'print(\'{"topic": "not allowed"}\')',
    }
    config = tmp_path / "outbox.toml"
    config.write_text(
        "\n".join(
            f"[hooks.{name}]\non = ['message']\ntimeout_ms = 2000\nattempts_max = 1\n"
            f"command = [{json.dumps(sys.executable)}, '-c', {json.dumps(script)}]"
            for name, script in scripts.items()
        )
    )
    with daemons("", "--config", str(config)) as outbox:
        until(lambda: outbox.get("/v1/health")["status"] == "ok")
        for number in range(3):
            outbox.send(f"m-{number}")

        until(lambda: outbox.counts() == {"done": 3})
        until(lambda: len(outbox.inbox()) == 3)
        runs = until(lambda: runs_of(outbox) if len(runs_of(outbox)) >= 8 else None)

    outcomes = {name: {outcome for hook, outcome in runs if hook == name} for name in scripts}
    assert outcomes == {
        "hangs": {"timed_out"},
        "floods": {"too_much_output"},
        "fails": {"failed"},
        "answers": {"answer_refused"},
    }


def runs_of(outbox: OutboxProcess) -> list[tuple[str, str]]:
    found = outbox.get("/v1/hooks/runs", limit=1000)["runs"]
    hooks = {run["hook"] for run in found}
    return [(run["hook"], run["outcome"]) for run in found] if len(hooks) == 4 else []


def test_a_hook_may_answer_the_sender_once(daemons: Daemons, shop: Shop, tmp_path: Path) -> None:
    config = tmp_path / "outbox.toml"
    script = "import sys, json; print(json.dumps({'reply': 'got ' + json.load(sys.stdin)['body']}))"
    config.write_text(
        "[hooks.echo]\non = ['message']\nmay = ['reply']\n"
        f"command = [{json.dumps(sys.executable)}, '-c', {json.dumps(script)}]"
    )
    with daemons("", "--config", str(config)) as outbox:
        until(lambda: outbox.get("/v1/health")["status"] == "ok")
        shop.send("question", sender="bea", kind="dm", ref="ann")

        until(lambda: any(row["destination"] == "dm:bea" for row in outbox.rows(status="done")))

    [answer] = shop.held("inbox/bea")
    assert (answer["body"], answer["sender"]) == ("got hello", "ann")
    assert answer["reply_to"] == shop.held("inbox/ann")[0]["broker_message_id"]


def test_a_normal_start_has_no_failpoints(daemons: Daemons) -> None:
    script = (
        "import sys, fencepost.cli.outbox_run, fencepost.outbox.daemon.running\n"
        "assert 'fencepost.outbox.daemon.failpoints' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    unknown = daemons("elsewhere")
    with pytest.raises(AssertionError, match="accepted, answered, stored"):
        unknown.start()
    unknown.http.close()


def test_a_slow_destination_does_not_hold_up_the_others(daemons: Daemons, shop: Shop) -> None:
    """A destination whose row waits for its next attempt; the rows of others pass it."""
    with daemons() as outbox:
        outbox.send("dead-end", kind="queue", ref="nowhere")
        for number in range(10):
            outbox.send(f"m-{number}", ref="alerts")

        until(lambda: outbox.counts() == {"dead": 1, "done": 10})


# Power loss.


def test_what_was_answered_is_there_after_a_power_loss(tmp_path: Path) -> None:
    history = asyncio.run(accept_with(FaultVfs(), tmp_path / "work"))

    lost = [check_crash(image, answered, tmp_path) for image, answered in crashes(history, 1)]

    assert len(lost) > 20
    assert sum(lost) == 0


def test_the_same_check_finds_lost_answers_without_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost.outbox.daemon.database._SYNCHRONOUS", "OFF")
    history = asyncio.run(accept_with(FaultVfs(), tmp_path / "work"))

    lost = [check_crash(image, answered, tmp_path) for image, answered in crashes(history, 1)]

    assert sum(lost) > 0


async def accept_with(vfs: FaultVfs, folder: Path) -> FaultVfs:
    """Have a writer accept rows from several callers at once, and mark what was answered."""
    make_folder(folder)
    path = folder / "outbox.db"
    queries = load_queries("outbox.sql")
    file = open_file(path, queries, vfs=vfs.name, first=lambda _: None)
    writer = Writer(file, path, vfs.name)

    async def caller(name: int) -> None:
        for number in range(12):
            row = a_row(name, number)

            def job(file: File, row: Row = row) -> object:
                return rows.do_accept(file, row)

            await writer.write(job)
            vfs.log.mark(row.id)

    await asyncio.gather(*(caller(name) for name in range(4)))
    await writer.close()
    return vfs


def a_row(name: int, number: int) -> Row:
    return Row(
        id=f"{name:013}{number:013}",
        mesh="shop",
        client_message_id=f"{name}-{number}",
        request_fingerprint=b"\x11" * 32,
        destination="topic:alerts",
        payload=b'{"kind":"topic"}' * 20,
        priority="next",
        enqueued_ms=1,
        next_attempt_ms=1,
    )


def crashes(vfs: FaultVfs, seed: int) -> Iterator[tuple[Image, list[str]]]:
    """Disks that a power loss may leave, each with what had been answered by then."""
    dice = random.Random(seed)
    operations = vfs.log.operations
    points = sorted(dice.sample(range(len(operations)), min(30, len(operations))))
    disk = Disk()
    for point in [*points, len(operations)]:
        disk.advance(operations, point)
        answered = [str(one.label) for one in operations[:point] if isinstance(one, Mark)]
        for variant in (nothing, everything, some_sectors(dice)):
            yield disk.cut(variant), answered


def check_crash(image: Image, answered: list[str], tmp_path: Path) -> int:
    """Open what a crash has left; how many answered rows it lost."""
    folder = tmp_path / f"crash-{time.monotonic_ns()}"
    folder.mkdir()
    write_image(image, folder)
    queries = load_queries("outbox.sql")
    try:
        file = open_file(folder / "outbox.db", queries, vfs=None, first=lambda _: None)
    except Exception:
        return len(answered)
    found = {row["id"] for row in rows.listed(file, None, None, "", 10_000)}
    file.raw.close()
    return len(set(answered) - found)
