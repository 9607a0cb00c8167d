"""`fencepost serve` as a user runs it: refusals in a sentence, one ready line, a clean end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.integration.raw import Connection, ask, code_of, events, request
from tests.serving import ServerProcess

ROOT = "/v1/stream/"
TEXT = "Content-Type: text/plain"
WAIT_SECONDS = 30.0


def fencepost(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "fencepost", *arguments],
        capture_output=True,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **environment},
        text=True,
        timeout=WAIT_SECONDS,
    )


def refusal(*arguments: str, **environment: str) -> str:
    """What a server that does not start says: one sentence, no traceback, no ready line."""
    done = fencepost("serve", *arguments, **environment)
    assert done.returncode == 1, done
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("fencepost: ")
    return said


# Before it starts


def test_help_names_the_commands_and_the_options() -> None:
    done, serve = fencepost("--help"), fencepost("serve", "--help")

    assert (done.returncode, serve.returncode) == (0, 0)
    assert "serve" in done.stdout
    for option in ("--host", "--port", "--data", "--long-poll-ms", "--config", "--insecure"):
        assert option in serve.stdout
    assert "4437" in serve.stdout
    assert "127.0.0.1" in serve.stdout


def test_the_version_is_the_distributions() -> None:
    done = fencepost("--version")

    assert (done.returncode, done.stdout) == (0, f"fencepost {version('fencepost')}\n")


def test_an_unknown_option_is_a_usage_error() -> None:
    done = fencepost("serve", "--no-such-option")

    assert done.returncode == 2
    assert "--no-such-option" in done.stderr


def test_a_port_that_is_none_is_a_usage_error() -> None:
    done = fencepost("serve", "--port", "-1")

    assert done.returncode == 2
    assert "--port" in done.stderr


def test_an_address_beyond_this_machine_is_refused(tmp_path: Path) -> None:
    said = refusal("--host", "0.0.0.0", "--port", "0", "--data", str(tmp_path / "data"))

    assert "0.0.0.0" in said
    assert "--insecure" in said
    assert not (tmp_path / "data").exists()


def test_an_address_beyond_this_machine_is_served_when_told_insecure(tmp_path: Path) -> None:
    arguments = ["--host", "0.0.0.0", "--insecure"]
    with ServerProcess(tmp_path / "data", arguments=arguments) as server:
        assert ask(server.port, "GET", "/healthz").status == 200


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refusal("--port", port, "--data", str(tmp_path / "data"))

    assert f"another program listens on 127.0.0.1:{port}" in said
    assert "--port" in said


def test_a_folder_in_use_is_said_and_the_first_server_goes_on(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        said = refusal("--port", "0", "--data", str(tmp_path / "data"))

        assert str(tmp_path / "data") in said
        assert str(server.pid) in said
        assert ask(server.port, "GET", "/readyz").status == 200


def test_a_data_folder_that_is_a_file_is_said(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")

    said = refusal("--port", "0", "--data", str(file))

    assert f"{file} is no folder" in said
    assert "--data" in said


def test_a_file_that_is_no_database_is_said_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "data" / "fencepost.db"
    file.parent.mkdir()
    file.write_bytes(b"this is no database, but somebody may want to keep it\n" * 100)
    before = file.read_bytes()

    refusal("--port", "0", "--data", str(file.parent))

    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[servre]\n", "servre"),
        ("[server]\nlong_pol_ms = 1\n", "long_pol_ms"),
        ("[server]\nlong_poll_ms = 'soon'\n", "long_poll_ms"),
    ],
)
def test_a_bad_config_file_is_said(tmp_path: Path, text: str, said: str) -> None:
    config = tmp_path / "fencepost.toml"
    config.write_text(text)
    data = str(tmp_path / "data")

    assert said in refusal("--port", "0", "--data", data, "--config", str(config))


def test_a_missing_config_file_is_said(tmp_path: Path) -> None:
    config = str(tmp_path / "missing.toml")

    assert config in refusal("--port", "0", "--data", str(tmp_path / "data"), "--config", config)


def test_a_bad_environment_variable_is_said(tmp_path: Path) -> None:
    said = refusal(
        "--port", "0", "--data", str(tmp_path / "data"), FENCEPOST_LIMITS_PATH_BYTES_MAX="x"
    )

    assert "path_bytes_max" in said


@pytest.mark.parametrize(
    "command",
    [
        ("serve",),
        ("outbox", "run", "--mesh", "shop"),
        ("outbox", "relay", "--database", "shop.db"),
        ("events", "run", "shop:app"),
    ],
    ids=" ".join,
)
def test_an_unknown_log_level_is_said(command: tuple[str, ...]) -> None:
    done = fencepost(*command, "--log-level", "loud")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "fencepost: --log-level is debug, info, warning or error, not 'loud'"
    ]


def test_an_interpreter_that_drops_the_asserts_is_refused(tmp_path: Path) -> None:
    said = refusal("--port", "0", "--data", str(tmp_path / "data"), PYTHONOPTIMIZE="1")

    assert "python -O" in said


# While it runs


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose long-polls wait longer than any test."""
    with ServerProcess(tmp_path / "data", arguments=["--long-poll-ms", "600000"]) as made:
        yield made


def test_one_line_says_where_it_listens(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "fencepost", "serve", "--port", "0", "--data", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    found = re.fullmatch(r"fencepost is listening on http://127\.0\.0\.1:(\d+)\n", first)
    assert found is not None, first
    assert ask(int(found[1]), "GET", "/healthz").status == 200
    process.send_signal(signal.SIGINT)
    rest, logs = process.communicate(timeout=WAIT_SECONDS)

    assert process.returncode == 0
    assert rest == ""
    for line in logs.splitlines():
        entry = json.loads(line)
        assert {"time", "level", "logger", "message"} <= set(entry)


def test_it_makes_its_data_folder(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there" / "yet"

    with ServerProcess(folder):
        assert (folder / "fencepost.db").exists()


def test_the_data_of_one_run_is_there_in_the_next(server: ServerProcess) -> None:
    ask(server.port, "PUT", ROOT + "s", TEXT, body=b"kept")
    assert server.stop() == 0

    server.restart()

    assert ask(server.port, "GET", ROOT + "s").body == b"kept"


def test_a_setting_of_the_config_file_holds(tmp_path: Path) -> None:
    config = tmp_path / "fencepost.toml"
    config.write_text("[limits]\npath_bytes_max = 3\n[http]\nbody_bytes_max = 5\n")
    with ServerProcess(tmp_path / "data", arguments=["--config", str(config)]) as server:
        long_path = ask(server.port, "PUT", ROOT + "abcd", TEXT)
        large = ask(server.port, "PUT", ROOT + "abc", TEXT, body=b"123456")

    assert code_of(long_path) == "path_too_long"
    assert code_of(large) == "body_too_large"


def test_health_and_readiness(server: ServerProcess) -> None:
    health = ask(server.port, "GET", "/healthz")
    ready = ask(server.port, "GET", "/readyz")

    assert (health.status, health.body) == (200, b"ok\n")
    assert (ready.status, ready.body) == (200, b"ready\n")
    assert ask(server.port, "HEAD", "/healthz").status == 200
    assert ready.headers["cache-control"] == "no-store"


def metrics(port: int) -> dict[str, float]:
    """The samples of /metrics by name and labels."""
    reply = ask(port, "GET", "/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[str, float] = {}
    for line in reply.body.decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def test_metrics_count_what_was_done(server: ServerProcess) -> None:
    ask(server.port, "PUT", ROOT + "s", "Content-Type: application/json")
    producer = ("Producer-Id: p", "Producer-Epoch: 0", "Producer-Seq: 0")
    for _ in range(2):
        ask(
            server.port,
            "POST",
            ROOT + "s",
            "Content-Type: application/json",
            *producer,
            body=b"[1,22]",
        )
    ask(server.port, "GET", ROOT + "missing")
    ask(server.port, "GET", "/no%zzthing")
    waiting = Connection(server.port)
    waiting.send(request("GET", ROOT + "s?offset=now&live=long-poll"))
    while (found := metrics(server.port))["fencepost_waiters"] < 1:
        pass
    waiting.close()

    assert found["fencepost_appends_total"] == 1
    assert found["fencepost_messages_total"] == 2
    assert found["fencepost_append_bytes_total"] == 3
    assert found["fencepost_duplicates_total"] == 1
    assert found["fencepost_streams_open"] == 1
    assert found["fencepost_waiters"] == 1
    assert found['fencepost_http_requests_total{method="POST",status="2xx"}'] == 2
    assert found['fencepost_http_requests_total{method="GET",status="4xx"}'] >= 1
    assert found["fencepost_http_received_bytes_total"] > 0
    assert found["fencepost_http_sent_bytes_total"] > 0
    assert found["fencepost_http_connections_open"] >= 1


def test_metrics_measure_the_commits(server: ServerProcess) -> None:
    ask(server.port, "PUT", ROOT + "s", TEXT)
    for _ in range(10):
        ask(server.port, "POST", ROOT + "s", TEXT, body=b"x")

    found = metrics(server.port)

    for name in ("fencepost_commit_answers", "fencepost_commit_seconds", "fencepost_fsync_seconds"):
        assert found[f"{name}_count"] >= 11, name
        assert found[f"{name}_sum"] > 0, name
        assert found[f'{name}_bucket{{le="+Inf"}}'] == found[f"{name}_count"], name
    assert found["fencepost_commit_seconds_sum"] >= found["fencepost_fsync_seconds_sum"]


def test_a_refusal_is_no_commit(server: ServerProcess) -> None:
    ask(server.port, "PUT", ROOT + "s", TEXT)
    before = metrics(server.port)["fencepost_fsync_seconds_count"]

    for _ in range(5):
        ask(server.port, "POST", ROOT + "missing", TEXT, body=b"x")

    assert metrics(server.port)["fencepost_fsync_seconds_count"] == before


# When it ends


def test_the_end_answers_who_waits_and_exits_0(server: ServerProcess) -> None:
    """A long-poll gets its 204 and an event stream its end, long before their own time is up."""
    ask(server.port, "PUT", ROOT + "s", TEXT, body=b"x")
    poll, follow = Connection(server.port), Connection(server.port)
    poll.send(request("GET", ROOT + "s?offset=now&live=long-poll"))
    follow.send(request("GET", ROOT + "s?offset=-1&live=sse"))
    follow.head()
    stream = events(follow.chunks())
    assert [next(stream).kind, next(stream).kind] == ["data", "control"]
    while metrics(server.port)["fencepost_waiters"] < 2:
        pass

    code = server.stop()

    answer = poll.reply()
    assert code == 0
    assert answer.status == 204
    assert answer.headers["stream-up-to-date"] == "true"
    assert list(stream) == []
    assert follow.at_end()
    poll.close()
    follow.close()
    server.restart()


def test_the_end_takes_no_new_connections_but_finishes_a_request_under_way(
    server: ServerProcess,
) -> None:
    """Half an append was sent when the signal came; the other half is still taken."""
    ask(server.port, "PUT", ROOT + "s", TEXT)
    half = Connection(server.port)
    whole = request("POST", ROOT + "s", TEXT, body=b"0123456789")
    half.send(whole[:-5])
    while metrics(server.port)["fencepost_http_connections_open"] < 2:
        pass
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    while not _refuses(server.port):
        pass

    half.send(whole[-5:])
    answer = half.reply("POST")
    half.close()
    stopping.join()

    assert answer.status == 204
    assert answer.headers["connection"] == "close"
    server.restart()
    assert ask(server.port, "GET", ROOT + "s").body == b"0123456789"


def _refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS).close()
    except ConnectionError:  # refused, or reset while the listening socket went
        return True
    return False
