"""`fencepost backup` and `restore`: copies that are whole, taken while others write."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from fencepost.store.sqlite import backup as copies
from fencepost.store.sqlite.check import check, open_to_read
from fencepost.store.sqlite.connection import FILE, FolderInUseError, FolderLock
from fencepost.testing.clock import SimClock
from tests.contract.subject import SqliteEngine, Subject
from tests.integration.folders import furnish
from tests.integration.log_support import JSON, Client
from tests.integration.raw import Connection, ask
from tests.serving import ServerProcess

PRODUCERS = 8
HALF = f"{2:016}_{2:016}"
"""The place between two chunks of two messages each, at the beginning of a stream."""
COMMAND = (sys.executable, "-m", "fencepost")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


class Load:
    """Producers that append as fast as they are answered, each with a count of its answers."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stop = threading.Event()
        self.answered = [0] * PRODUCERS
        self.slowest_s = 0.0
        self._progress = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(PRODUCERS)
        ]

    def __enter__(self) -> Load:
        for stream in ("a", "b"):
            ask(self._port, "PUT", f"/v1/stream/load/{stream}", "Content-Type: text/plain")
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, appends: int) -> list[int]:
        """Wait until so many more appends of each producer were answered; the counts by then."""
        with self._progress:
            wanted = [count + appends for count in self.answered]
            assert self._progress.wait_for(
                lambda: all(map(int.__ge__, self.answered, wanted)), timeout=60
            )
            return list(self.answered)

    def _run(self, number: int) -> None:
        with Connection(self._port) as connection:
            seq = 0
            while not self._stop.is_set():
                asked = time.monotonic()
                reply = connection.ask(
                    "POST",
                    f"/v1/stream/load/{'ab'[number % 2]}",
                    "Content-Type: text/plain",
                    f"Producer-Id: p{number}",
                    "Producer-Epoch: 0",
                    f"Producer-Seq: {seq}",
                    body=b"%d/%d %b" % (number, seq, b"x" * 500),
                )
                assert reply.status == 200, reply
                seq += 1
                with self._progress:
                    self.answered[number] = seq
                    self.slowest_s = max(self.slowest_s, time.monotonic() - asked)
                    self._progress.notify_all()


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Load]]:
    """A server under load, and its data folder."""
    folder: Path = tmp_path_factory.mktemp("busy") / "data"
    # The write-ahead log is too long all the time: a backup that reads it must hold no writer up.
    limits = {
        "FENCEPOST_STORE_CHECKPOINT_WAL_BYTES": "65536",
        "FENCEPOST_STORE_WAL_BYTES_MAX": "131072",
    }
    with ServerProcess(folder, environment=limits) as server, Load(server.port) as load:
        load.wait_for(20)
        yield folder, load


def seqs(file: Path) -> list[int]:
    """The number of batches that each producer has in a copy."""
    connection = apsw.Connection(str(file), flags=apsw.SQLITE_OPEN_READONLY)
    query = (
        "SELECT id, seq + 1 FROM producers UNION ALL SELECT producer, seq + 1 FROM batches_behind"
    )
    found: dict[str, int] = {}
    for name, count in connection.execute(query):
        found[str(name)] = max(int(str(count)), found.get(str(name), 0))
    connection.close()
    return [found.get(f"p{number}", 0) for number in range(PRODUCERS)]


def test_a_copy_taken_under_load_is_whole_and_has_every_answered_append(
    busy: tuple[Path, Load], tmp_path: Path
) -> None:
    folder, load = busy
    for attempt in range(3):
        destination = tmp_path / f"copy-{attempt}.db"
        before = load.wait_for(5)

        done = run("backup", destination, "--data", folder, "--json")

        assert done.returncode == 0, done
        assert json.loads(done.stdout)["bytes"] == destination.stat().st_size
        assert all(map(int.__ge__, seqs(destination), before))
        report = check(destination)
        assert report.findings == []
        assert report.counts["messages"] >= sum(before)
    # Nothing beside the copies: no journals, no partial files.
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        f"copy-{attempt}.db" for attempt in range(3)
    ]


def _live(port: int, stop: threading.Event, refused: list[object]) -> None:
    """Streams that are made, filled, truncated, forked and deleted, and whose rows are purged."""
    client = Client(port)
    number = 0
    while not stop.is_set():
        number += 1
        path, txn = f"lives/{number % 7}", f"t{number}"
        for chunk in range(2):
            staged = f"/v1/staging/{txn}/p?chunk={chunk}"
            client.ask("POST", staged, f"[1,{chunk}]", Content_Type=JSON)
        whole = {"content_type": JSON, "auto_create": True}
        writer = {"id": "w", "epoch": number, "seq": 0}
        appends = [
            {"stream": path, "parts": [{"txn": txn, "part": "p"}], "producer": writer, **whole},
            {"stream": "lives/long", "data": [number, number], "key": f"k{number}", **whole},
        ]
        committed = client.ask("POST", "/v1/commit", json.dumps({"appends": appends}))
        replies = [
            committed,
            client.append(path, "1", Idempotency_Key=f"k{number}"),
            client.ask("POST", f"/v1/stream/{path}?truncate&before={HALF}"),
            client.ask("POST", "/v1/stream/lives/long?truncate&before=now"),
            client.ask("PUT", "/v1/stream/fork", Stream_Forked_From=f"/v1/stream/{path}"),
            client.ask("DELETE", "/v1/stream/fork"),
            client.ask("DELETE", f"/v1/stream/{path}"),
        ]
        refused += [reply for reply in replies if reply.status >= 300]
    client.close()


def test_a_copy_taken_while_streams_come_and_go_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    at_once = {
        "FENCEPOST_STORE_LOG_RETENTION_MS": "1",
        "FENCEPOST_STORE_SWEEP_INTERVAL_MS": "1",
        "FENCEPOST_STORE_KEY_RETENTION_S": "1",
        "FENCEPOST_STORE_STAGING_TTL_S": "1",
    }
    stop, refused = threading.Event(), list[object]()
    with ServerProcess(folder, environment=at_once) as server:
        living = threading.Thread(target=_live, args=(server.port, stop, refused))
        living.start()
        try:
            for attempt in range(8):
                destination = tmp_path / f"copy-{attempt}.db"
                copies.backup(folder, destination)
                assert check(destination).findings == []
        finally:
            stop.set()
            living.join()
    assert refused == []
    assert check(folder).findings == []


def test_writers_go_on_while_a_copy_is_taken(
    busy: tuple[Path, Load], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, load = busy
    monkeypatch.setattr(copies, "PAGES_PER_STEP", 16)
    steps: list[list[int]] = []

    def between_two_steps(_step: str, done: int, total: int) -> None:
        if len(steps) < 3 and done < total:
            steps.append(load.wait_for(3))

    copies.backup(folder, tmp_path / "copy.db", progress=between_two_steps)

    assert len(steps) == 3
    assert load.slowest_s < 5
    # The copy is of the moment it began at, not of any later one.
    assert all(map(int.__lt__, seqs(tmp_path / "copy.db"), steps[0]))
    assert check(tmp_path / "copy.db").is_clean


async def test_writers_do_not_wait_for_a_reader_of_the_write_ahead_log(tmp_path: Path) -> None:
    engine = SqliteEngine(tmp_path / "data", SimClock())
    subject = Subject(engine, SimClock())
    assert engine.store is not None
    await subject.made("s")
    with open_to_read(tmp_path / "data" / FILE) as reader, reader:
        reader.execute("SELECT count(*) FROM log").fetchall()
        await subject.appended("s", b"written behind the reader's back")
        began = time.monotonic()

        restarted = await engine.store.restart_log()

        assert not restarted
        assert time.monotonic() - began < 5  # SQLite's own patience is ten seconds
        await subject.appended("s", b"and on it goes")
    assert await engine.store.restart_log()
    await subject.close()


def test_a_killed_backup_leaves_nothing_that_looks_like_one(
    busy: tuple[Path, Load], tmp_path: Path
) -> None:
    folder, _ = busy
    destination = tmp_path / "copy.db"
    killed = 0
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from fencepost.store.sqlite import backup\n"
        "backup.PAGES_PER_STEP = 4\n"
        "def tell(step, done, total):\n"
        "    if done >= int(sys.argv[3]): os.kill(os.getpid(), signal.SIGKILL)\n"
        "backup.backup(Path(sys.argv[1]), Path(sys.argv[2]), progress=tell)\n"
    )
    for pages in (4, 12, 24):
        ended = subprocess.run(
            [sys.executable, "-c", script, str(folder), str(destination), str(pages)], timeout=60
        )
        killed += ended.returncode == -signal.SIGKILL
        assert not destination.exists()
    assert killed == 3

    done = run("backup", destination, "--data", folder)

    assert done.returncode == 0, done
    assert check(destination).is_clean
    # What the killed ones left is gone as well.
    assert [entry.name for entry in tmp_path.iterdir()] == ["copy.db"]
    assert check(folder).is_clean


def test_a_backup_replaces_nothing(busy: tuple[Path, Load], tmp_path: Path) -> None:
    folder, _ = busy
    taken = tmp_path / "taken.db"
    taken.write_text("something dear")

    done = run("backup", taken, "--data", folder)

    assert done.returncode == 1
    assert "exists" in done.stderr
    assert taken.read_text() == "something dear"


def test_what_is_put_at_the_destination_meanwhile_is_not_replaced(
    busy: tuple[Path, Load], tmp_path: Path
) -> None:
    folder, _ = busy
    destination = tmp_path / "copy.db"

    def meanwhile(_step: str, _done: int, _total: int) -> None:
        destination.write_text("first come")

    with pytest.raises(copies.DestinationExistsError):
        copies.backup(folder, destination, progress=meanwhile)

    assert destination.read_text() == "first come"
    assert [entry.name for entry in tmp_path.iterdir()] == ["copy.db"]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A backup of a folder with something of everything."""
    asyncio.run(furnish(tmp_path / "original"))
    copies.backup(tmp_path / "original", tmp_path / "copy.db")
    return tmp_path / "copy.db"


def test_a_restored_folder_serves_what_was_backed_up(copy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "restored"

    done = run("restore", copy, "--data", folder, "--json")

    assert done.returncode == 0, done
    assert json.loads(done.stdout) == {"data": str(folder), "moved": None}
    assert check(folder).is_clean
    with ServerProcess(folder) as server:
        reply = ask(server.port, "GET", "/v1/stream/bytes?offset=-1")
        assert reply.status == 200
        assert reply.body.startswith(b"hello<0.0>")
        again = ask(
            server.port,
            "POST",
            "/v1/stream/json",
            "Content-Type: application/json",
            "Producer-Id: a",
            "Producer-Epoch: 0",
            "Producer-Seq: 19",
            body=b"[19,19]",
        )
        assert again.status == 204
    assert check(folder).is_clean


@pytest.mark.parametrize("table", ["groups", "leases", "parked"])
def test_a_restored_folder_has_the_groups_that_were_backed_up(
    copy: Path, tmp_path: Path, table: str
) -> None:
    assert run("restore", copy, "--data", tmp_path / "restored").returncode == 0

    restored = _rows(tmp_path / "restored" / FILE, table)

    assert restored
    assert restored == _rows(tmp_path / "original" / FILE, table)


def _rows(file: Path, table: str) -> list[tuple[object, ...]]:
    with open_to_read(file) as connection:
        return list(connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2, 3"))


def test_the_folder_is_that_of_the_servers_settings(copy: Path, tmp_path: Path) -> None:
    config = tmp_path / "fencepost.toml"
    config.write_text(f'[store]\nfolder = "{tmp_path / "data"}"\n')

    restored = run("restore", copy, "--config", config, "--json")
    checked = run("check", "--config", config, "--json")
    copied = run("backup", tmp_path / "again.db", "--config", config, "--json")

    assert [done.returncode for done in (restored, checked, copied)] == [0, 0, 0]
    folder = str(tmp_path / "data")
    assert [json.loads(done.stdout)["data"] for done in (restored, checked)] == [folder] * 2
    assert check(tmp_path / "again.db").findings == []


def test_a_folder_with_data_is_refused_or_moved_aside(copy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "original"
    before = (folder / FILE).read_bytes()

    refused = run("restore", copy, "--data", folder)
    assert (folder / FILE).read_bytes() == before
    forced = run("restore", copy, "--data", folder, "--force", "--json")

    assert refused.returncode == 1
    assert "not empty" in refused.stderr
    assert forced.returncode == 0, forced
    moved = Path(json.loads(forced.stdout)["moved"])
    assert moved.name.startswith("original.replaced-")
    assert (moved / FILE).read_bytes() == before
    assert check(folder).is_clean
    assert check(moved).is_clean


def fill(_step: str, _done: int, _total: int) -> None:
    raise apsw.FullError("not an error")  # as SQLite's backup says it


def test_a_copy_without_room_is_an_error_of_the_disk_and_leaves_nothing(
    copy: Path, tmp_path: Path
) -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        copies.backup(copy, tmp_path / "another.db", progress=fill)

    assert caught.value.filename == str(tmp_path)
    assert list(tmp_path.glob("*another.db*")) == []


def test_a_copy_that_cannot_be_written_is_one_sentence(copy: Path, tmp_path: Path) -> None:
    limits = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, 9_000)); "
    command = "from fencepost.cli.main import main; main()"
    arguments = ("backup", str(tmp_path / "another.db"), "--data", str(copy))

    said = subprocess.run(
        [sys.executable, "-c", limits + command, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert said.returncode == 2
    assert said.stderr == f"fencepost: {copy} cannot be copied to {tmp_path}: SQLITE_IOERR_WRITE\n"


def test_a_restore_that_fails_puts_the_old_folder_back(copy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "restored"
    copies.restore(copy, folder)
    (folder / "mark").write_text("the old one")

    with pytest.raises(OSError, match="No space left"):
        copies.restore(copy, folder, aside=".old", progress=fill)

    assert (folder / "mark").read_text() == "the old one"
    assert check(folder).is_clean
    assert not (tmp_path / "restored.old").exists()


def test_a_folder_in_use_is_refused_even_with_force(copy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "original"
    lock = FolderLock(folder)
    try:
        with pytest.raises(FolderInUseError):
            copies.restore(copy, folder, aside=".old")
    finally:
        lock.release()
    assert check(folder).is_clean


def test_a_damaged_copy_is_not_restored(copy: Path, tmp_path: Path) -> None:
    apsw.Connection(str(copy)).execute("UPDATE counters SET next_stream = 2")

    done = run("restore", copy, "--data", tmp_path / "restored")

    assert done.returncode == 1
    assert "counter_behind" in done.stdout
    assert not (tmp_path / "restored" / FILE).exists()


def test_a_killed_restore_leaves_no_database(copy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "restored"
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from fencepost.store.sqlite import backup\n"
        "backup.PAGES_PER_STEP = 4\n"
        "def tell(step, done, total):\n"
        "    if done >= 8: os.kill(os.getpid(), signal.SIGKILL)\n"
        "backup.restore(Path(sys.argv[1]), Path(sys.argv[2]), progress=tell)\n"
    )

    ended = subprocess.run([sys.executable, "-c", script, str(copy), str(folder)], timeout=60)

    assert ended.returncode == -signal.SIGKILL
    assert not (folder / FILE).exists()
    # A server would start empty here; a second restore says that something is there, or takes over.
    assert run("restore", copy, "--data", folder, "--force").returncode == 0
    assert check(folder).is_clean


def test_what_is_no_backup_cannot_be_restored(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database " * 1000)

    done = run("restore", tmp_path / "text", "--data", tmp_path / "restored", "--json")

    assert done.returncode == 2
    assert "error" in json.loads(done.stdout)
    assert not (tmp_path / "restored").exists()


def test_a_folder_without_data_cannot_be_backed_up(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "empty")

    done = run("backup", tmp_path / "copy.db", "--data", tmp_path / "empty")

    assert done.returncode == 2
    assert not (tmp_path / "copy.db").exists()
