"""The daemon of the outbox under other users, floods and slow clients on the same machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.outboxing import OutboxProcess, until

AWAY = "http://127.0.0.1:9"
ANOTHER_USER = 65534


@pytest.fixture(scope="module")
def outbox() -> Iterator[OutboxProcess]:
    """A daemon whose server is away, in a folder that any user may enter and list."""
    parent = Path(tempfile.mkdtemp(prefix="outbox-attacks-"))
    parent.chmod(0o755)
    folder = parent / "outbox"
    folder.mkdir(mode=0o755)
    try:
        arguments = ("--port", str(_free_port()))
        with OutboxProcess(folder, AWAY, ["shop"], arguments=arguments) as process:
            yield process
    finally:
        shutil.rmtree(parent)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try as another user")
def test_another_user_opens_neither_the_socket_nor_a_file(outbox: OutboxProcess) -> None:
    outbox.send("mine")
    script = (
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "folder = sys.argv[1]\n"
        "names = sorted(os.listdir(folder))\n"
        "for name in names:\n"
        "    path = folder + '/' + name\n"
        "    try:\n"
        "        if name.endswith('.sock'):\n"
        "            socket.socket(socket.AF_UNIX).connect(path)\n"
        "        else:\n"
        "            open(path, 'rb')\n"
        "    except PermissionError:\n"
        "        continue\n"
        "    print('opened', name)\n"
        "try:\n"
        "    open(folder + '/outbox.db2', 'wb')\n"
        "    print('wrote')\n"
        "except PermissionError:\n"
        "    pass\n"
        "print(' '.join(names))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(outbox.data)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert "opened" not in done.stdout
    assert "wrote" not in done.stdout
    assert {"outbox.sock", "outbox.db", "outbox.db-wal", "inbox.db", "token", "lock"} <= set(
        done.stdout.split()
    )


def test_the_65th_request_in_flight_is_refused_and_none_of_the_64_is_lost(
    outbox: OutboxProcess,
) -> None:
    """Another process holds the database, so that requests wait for it."""
    holder = sqlite3.connect(outbox.data / "outbox.db", isolation_level=None, timeout=30)
    holder.execute("BEGIN IMMEDIATE")
    try:
        with ThreadPoolExecutor(64) as pool:
            waiting = [pool.submit(outbox.send, f"flight-{number}") for number in range(64)]
            refused = until(lambda: _refusal(outbox))
            holder.execute("ROLLBACK")
            answers = [future.result().status_code for future in waiting]
    finally:
        holder.close()

    assert refused["code"] == "too_many_requests"
    assert answers == [202] * 64


def _refusal(outbox: OutboxProcess) -> dict[str, str] | None:
    answer = outbox.http.get("/v1/version")
    found: dict[str, str] | None = answer.json() if answer.status_code == 429 else None
    return found


def test_a_token_has_a_hundred_requests_a_second(outbox: OutboxProcess) -> None:
    token = (outbox.data / "token").read_text().strip()
    asked = f"GET /v1/version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", outbox.port), 30) as flood:
        flood.settimeout(1.0)
        flood.sendall(asked.encode() * 300)
        answers = b""
        with contextlib.suppress(TimeoutError):
            while data := flood.recv(65536):
                answers += data

    assert answers.count(b"HTTP/1.1 429") > 50
    assert outbox.get("/v1/version")["version"], "the socket has a budget of its own"


def test_bodies_that_are_too_long_end_before_they_are_read(outbox: OutboxProcess) -> None:
    for head in (b"Content-Length: 1048577", b"Content-Length: 99999999999999"):
        with _connected(outbox) as client:
            client.sendall(b"POST /v1/send HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\n")

            assert client.recv(65536).startswith(b"HTTP/1.1 413")
    with _connected(outbox) as client:
        client.sendall(
            b"POST /v1/send HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        with contextlib.suppress(OSError):
            for _ in range(40):
                client.sendall(b"8000\r\n" + b" " * 0x8000 + b"\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 413")


def _connected(outbox: OutboxProcess) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(30)
    client.connect(str(outbox.data / "outbox.sock"))
    return client


def test_clients_that_never_finish_a_request_keep_no_other_out(outbox: OutboxProcess) -> None:
    head = b"POST /v1/send HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{"
    with contextlib.ExitStack() as stack:
        for number in range(100):
            client = stack.enter_context(_connected(outbox))
            client.sendall(head if number % 2 else b"POST /v1/se")

        for number in range(20):
            assert outbox.send(f"beside-{number}").status_code == 202
    assert outbox.counts()["pending"] >= 20


def test_an_outbox_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    for name in ("outbox.db", "inbox.db"):
        folder = tmp_path / name.partition(".")[0]
        with OutboxProcess(folder, AWAY, ["shop"], "ann"):
            pass
        with sqlite3.connect(folder / name) as newer:
            newer.execute("PRAGMA user_version = 99")
        newer.close()
        before = (folder / name).read_bytes()

        again = OutboxProcess(folder, AWAY, ["shop"], "ann")
        with pytest.raises(AssertionError, match="newer fencepost"):
            again.start()
        again.http.close()

        assert (folder / name).read_bytes() == before
        assert not list(folder.glob("*.db.*")), "nothing was moved aside"


def test_a_folder_that_others_can_write_to_starts_no_daemon(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to("open")

    for name in ("open", "link"):
        refused = OutboxProcess(tmp_path / name, AWAY, ["shop"])
        with pytest.raises(AssertionError, match="mode 0700"):
            refused.start()
        refused.http.close()
    assert not list((tmp_path / "open").iterdir())
