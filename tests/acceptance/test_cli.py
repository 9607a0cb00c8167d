"""The stream commands as a person or a script runs them: processes, pipes and a real server."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import fencepost
from fencepost.coordination import TaskClaims
from tests.acceptance.shell import COMMAND, WAIT_SECONDS, Shell, reader_of
from tests.acceptance.shell import home as home
from tests.acceptance.shell import shell as shell
from tests.integration.auth_support import ANN, place, token
from tests.serving import ServerProcess

# The life of a stream


def test_a_stream_is_made_written_read_closed_and_deleted(shell: Shell) -> None:
    assert shell.lines("create", "life", "--json") == [
        {"path": "life", "content_type": "application/json"}
    ]
    stored = shell.lines("append", "life", '{"a": 1.0}', "[2]", "--json")[0]
    assert (stored["version"], stored["closed"], stored["duplicate"]) == (1, False, False)

    assert shell.run("read", "life").stdout == '{"a": 1.0}\n[2]\n'
    assert shell.run("read", "life", "--raw").stdout == '[{"a": 1.0},[2]]'
    assert shell.lines("close", "life", "--json")[0]["closed"]
    assert "Write to another stream" in shell.refusal("append", "life", "3")
    assert shell.lines("head", "life", "--json")[0]["closed"]
    shell.run("rm", "life", "--yes")
    assert "`fencepost ls` shows the streams" in shell.refusal("read", "life")


def test_tables_are_for_people_and_json_for_programs(shell: Shell) -> None:
    stream = shell.client.create("tables/one", messages=[1, 2, 3])

    table = shell.run("ls", "tables/*").stdout
    listed = shell.lines("ls", "tables/*", "--json")

    tail = stream.head().next_offset
    assert re.search(r"^tables/one\s+json\s+3\s+3\s+open\s+20", table, re.MULTILINE)
    assert "\x1b" not in table
    assert [(one["path"], one["tail"], one["version"]) for one in listed] == [
        ("tables/one", tail, 2)
    ]
    assert shell.run("ls", "nothing/*").stdout == ""


def test_stdin_and_files_keep_their_bytes(shell: Shell, tmp_path: Path) -> None:
    picture = tmp_path / "picture"
    picture.write_bytes(bytes(range(256)))
    shell.run("create", "bytes", "--type", "bytes")
    shell.run("append", "bytes", "--file", str(picture))
    shell.run("append", "words", "--create", "--type", "text", given="two\nlines, no end")

    with shell.started("read", "bytes", "--raw") as reading:
        assert reader_of(reading).read() == bytes(range(256))
    assert shell.run("read", "words").stdout == "two\nlines, no end"


def test_data_that_cannot_be_read_is_a_failure_in_words(shell: Shell, tmp_path: Path) -> None:
    shell.client.create("unread")
    assert "cannot read" in shell.refusal("append", "unread", "--file", str(tmp_path), code=2)

    only_written = (tmp_path / "only-written").open("wb")
    with only_written, shell.started("append", "unread", "--ndjson", stdin=only_written) as failing:
        _, said = failing.communicate(timeout=WAIT_SECONDS)
    assert b"cannot be read: Bad file descriptor. No line is stored" in said


def test_a_precondition_holds_or_the_command_fails_and_names_the_tail(shell: Shell) -> None:
    stream = shell.client.create("conditional")
    empty = stream.head().next_offset
    shell.run("append", "conditional", "1", "--if-match", empty)

    refused = shell.refusal("append", "conditional", "2", "--if-match", empty)

    assert stream.head().next_offset in refused
    assert stream.read().messages() == [1]


def test_a_key_stores_the_same_once_and_refuses_another(shell: Shell) -> None:
    shell.client.create("keyed")
    first = shell.lines("append", "keyed", "1", "--key", "k", "--json")[0]
    again = shell.lines("append", "keyed", "1", "--key", "k", "--json")[0]

    assert (first["duplicate"], again["duplicate"]) == (False, True)
    assert "new --key" in shell.refusal("append", "keyed", "2", "--key", "k")


def test_a_fork_shares_the_past_and_its_tail_is_found(shell: Shell) -> None:
    shell.client.create("trunk", messages=list(range(30)))
    shell.run("fork", "trunk", "branch")
    shell.run("append", "branch", "30")

    assert shell.run("tail", "branch", "-n", "3").stdout.split() == ["28", "29", "30"]
    assert shell.run("tail", "trunk", "-n", "2").stdout.split() == ["28", "29"]


def test_claims_show_who_holds_what_since_when(shell: Shell) -> None:
    stream = shell.client.create("jobs")
    ada, bob = TaskClaims(stream, "ada"), TaskClaims(stream, "bob")
    held, done = ada.claim("build 7"), bob.claim("build-8")
    assert held
    assert done
    ada.heartbeat(held)
    bob.complete(done)
    stream.append(1, producer=fencepost.Producing("other", 0, 0))
    theirs = {"toolCallId": "call_1", "executorId": "agent-a", "status": "claimed"}
    stream.append(theirs, producer=fencepost.Producing("tool:call_1", 0, 0))

    claims = shell.lines("claims", "jobs", "--json")
    table = shell.run("claims", "jobs", "--held").stdout.splitlines()

    assert [(one["id"], one["owner"], one["status"]) for one in claims] == [
        ("task:build%207", "ada", "heartbeat"),
        ("task:build-8", "bob", "completed"),
        ("tool:call_1", "agent-a", "claimed"),
    ]
    assert claims[0]["since"] <= claims[0]["updated"]
    assert len(table) == 3
    assert re.match(r"jobs\s+task:build%207\s+ada\s+heartbeat\s+20", table[1])
    assert "other" in shell.run("producers", "jobs").stdout


def test_a_small_load_prints_rates_and_leaves_nothing(shell: Shell) -> None:
    result = shell.lines("bench", "--messages", "500", "--follows", "5", "--json")[0]

    assert result["messages"] == 500
    assert result["appends_per_s"] > 0
    assert list(shell.client.streams(match="bench/**")) == []


# Following


def test_tail_follows_through_a_restart_of_the_server(home: Path, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        shell = Shell(server.url, home)
        stream = shell.client.create("s", messages=["before"])
        with shell.started("tail", "-f", "s") as tailing:
            printed = reader_of(tailing)
            assert printed.readline() == b'"before"\n'
            stream.append("live")
            assert printed.readline() == b'"live"\n'
            server.kill()
            server.restart()
            stream.append("after")
            assert printed.readline() == b'"after"\n'
            stream.close()
            assert printed.readline() == b""
            assert tailing.wait(WAIT_SECONDS) == 0
        shell.client.close()


def test_tail_begins_where_it_is_told(shell: Shell) -> None:
    shell.client.create("ends", messages=list(range(5000)))
    shell.client.stream("ends").append("last")

    assert shell.run("tail", "ends", "-n", "2").stdout.split() == ["4999", '"last"']
    assert shell.run("tail", "ends", "-n", "0").stdout == ""
    batch = shell.lines("tail", "ends", "-n", "1", "--json")[0]
    assert batch["messages"] == ["last"]
    assert shell.lines("tail", "ends", "--from", batch["offset"], "--json") == [batch]


def test_ctrl_c_ends_a_tail_with_130_and_without_a_word(shell: Shell) -> None:
    shell.client.create("interrupted", messages=[1])
    with shell.started("tail", "-f", "interrupted") as tailing:
        assert reader_of(tailing).readline() == b"1\n"
        tailing.send_signal(signal.SIGINT)
        out, err = tailing.communicate(timeout=WAIT_SECONDS)

    assert (tailing.returncode, out, err) == (130, b"", b"")


def test_the_shell_completes_commands_and_paths(shell: Shell) -> None:
    shell.client.create("complete/me")
    for words, expected in (
        ("fencepost prod", "producers"),
        ("fencepost read comp", "complete/me"),
    ):
        script = {"_FENCEPOST_COMPLETE": "complete_bash", "COMP_WORDS": words}
        done = subprocess.run(
            [str(Path(sys.executable).with_name("fencepost"))],
            env={**shell.environment, **script, "COMP_CWORD": str(words.count(" "))},
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
        )
        assert done.stdout.split() == [expected], done


# Pipes and terminals


def test_a_reader_that_has_enough_ends_the_command_quietly(shell: Shell) -> None:
    shell.client.create("long", messages=["x" * 100] * 20_000)
    for command in (["read", "long"], ["tail", "-f", "long", "-n", "1"], ["ls"]):
        with shell.started(*command) as process:
            printed = reader_of(process)
            if command != ["ls"]:
                assert printed.readline().startswith(b'"xxx')
            printed.close()
            assert process.wait(WAIT_SECONDS) == 0
            assert process.stderr is not None
            assert process.stderr.read() == b""
            process.stdout = None


def test_without_stdout_a_command_still_does_its_work(shell: Shell) -> None:
    stream = shell.client.create("mute")
    script = 'exec "$@" >&-'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *COMMAND, "append", "mute", "1"],
        env=shell.environment,
        stderr=subprocess.PIPE,
        timeout=WAIT_SECONDS,
    )

    assert (done.returncode, done.stderr) == (0, b"")
    assert stream.read().messages() == [1]


def test_output_that_cannot_be_written_is_a_failure_in_words(shell: Shell, tmp_path: Path) -> None:
    shell.client.create("full", messages=[1])
    script = f'ulimit -f 0; exec "$@" > {tmp_path / "output"}'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *COMMAND, "read", "full"],
        env=shell.environment,
        stderr=subprocess.PIPE,
        timeout=WAIT_SECONDS,
    )

    assert done.returncode == 1
    assert done.stderr == b"fencepost: the output cannot be written: File too large\n"


def test_lines_have_a_progress_bar_on_a_terminal_and_nowhere_else(shell: Shell) -> None:
    shell.client.create("progress")
    ours, theirs = pty.openpty()
    with shell.started("append", "progress", "--ndjson", stderr=theirs) as feeding:
        os.close(theirs)
        out, _ = feeding.communicate(b"1\n2\n", timeout=WAIT_SECONDS)
        shown = os.read(ours, 1 << 16)
    os.close(ours)
    piped = shell.run("append", "progress", "--ndjson", given="3\n")

    assert b"appending" in shown
    assert b"appending" not in out
    assert piped.stderr == ""


def test_rm_asks_at_a_terminal_and_refuses_without_one(shell: Shell) -> None:
    shell.client.create("precious")
    assert "--yes" in shell.refusal("rm", "precious", code=2)

    for answer, code in ((b"n\n", 1), (b"y\n", 0)):
        ours, theirs = pty.openpty()
        with shell.started("rm", "precious", stdin=theirs) as asking:
            os.close(theirs)
            assert asking.stderr is not None
            os.write(ours, answer)
            assert asking.wait(WAIT_SECONDS) == code
            assert b"Delete the stream precious" in asking.stderr.read()
        os.close(ours)

    assert list(shell.client.streams(match="precious")) == []


def test_the_history_of_a_writer_is_shown(shell: Shell) -> None:
    shell.client.open_writer("hourly", "q-1")
    for number, until in enumerate((41, 83)):
        read = fencepost.PositionRange(after=None if number == 0 else 41, until=until)
        shell.client.commit(
            [],
            writer=fencepost.WriterBatch(
                name="hourly", query="q-1", epoch=1, batch=number, digest="d-7", range=read
            ),
        )

    shown = shell.run("writer-history", "hourly").stdout
    newest = json.loads(shell.run("writer-history", "hourly", "-n", "1", "--json").stdout)

    assert "its start" in shown
    assert "d-7" in shown
    assert (newest["batch"], newest["range"]) == (1, {"after": 41, "until": 83})
    assert "no writer of this name" in shell.refusal("writer-history", "none")
    shell.run("forget-writer", "hourly", "--yes")


def test_writers_are_listed_and_forgotten(shell: Shell) -> None:
    shell.client.open_writer("by-day", "q-1")
    shell.client.commit(
        [], writer=fencepost.WriterBatch(name="by-day", query="q-1", epoch=1, batch=7)
    )

    shown = shell.run("writers").stdout
    listed = json.loads(shell.run("writers", "by-*", "--json").stdout)
    assert "--yes" in shell.refusal("forget-writer", "by-day", code=2)
    shell.run("forget-writer", "by-day", "--yes")

    assert "by-day" in shown
    assert "q-1" in shown
    assert (listed["epoch"], listed["batch"]) == (1, 7)
    assert shell.run("writers", "--json").stdout == ""
    assert "no writer of this name" in shell.refusal("forget-writer", "by-day", "--yes")


def test_a_stream_is_truncated(shell: Shell) -> None:
    stream = shell.client.create("ledger")
    middle = stream.append_many([1, 2]).next_offset
    stream.append(3)

    assert "--yes" in shell.refusal("truncate", "ledger", "--before", middle, code=2)
    left = json.loads(shell.run("truncate", "ledger", "--before", middle, "-y", "--json").stdout)

    assert left["first_offset"] == middle
    assert stream.read(offset=middle).messages() == [3]
    assert "no stream" in shell.refusal("truncate", "none", "--before", "now", "-y")


def test_the_log_shows_all_streams_in_order(shell: Shell) -> None:
    head = shell.client.log_head()
    shell.client.create("logged/a").append({"n": 1}, key="k-1")
    shell.client.create("logged/b", content_type="text/plain").append("text")
    after = ("--after", str(head))

    shown = shell.run("log", "logged/*", *after).stdout
    listed = shell.lines("log", "logged/*", *after, "--json")
    one = shell.lines("log", "logged/*", *after, "--limit", "1", "--json")

    assert '{"n": 1}' in shown
    assert "logged/b" in shown
    assert [entry["stream"] for entry in listed] == ["logged/a", "logged/b"]
    assert [entry["data"] for entry in one] == [{"n": 1}]
    keys = shell.lines("keys", "logged/a", "--json")
    assert [key["key"] for key in keys] == ["k-1"]
    assert "k-1" in shell.run("keys").stdout


def test_the_log_shows_events_by_name_and_the_newest_first(shell: Shell) -> None:
    stream = shell.client.create("named/a")
    for number, name in enumerate(["Ordered", "Paid", "Paid"]):
        stream.append({"name": name, "data": number, "meta": {"correlation": f"c{number}"}})

    paid = shell.lines("log", "named/*", "--name", "Paid", "--newest", "--json")
    first = shell.lines("log", "named/*", "--correlation", "c0", "--json")

    assert [entry["data"]["data"] for entry in paid] == [2, 1]
    assert [entry["data"]["data"] for entry in first] == [0]
    assert "--newest" in shell.refusal("log", "--newest", "--follow", code=2)


# What goes wrong


def test_a_server_that_is_not_there_is_3_and_a_url_that_is_none_is_2(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    away = f"http://127.0.0.1:{port}"

    assert "fencepost serve" in shell.refusal("ls", "--url", away, code=3)
    assert "cannot reach" in shell.refusal("tail", "-f", "s", code=3, FENCEPOST_URL=away)
    assert "not a URL" in shell.refusal("ls", "--url", "nonsense", code=2)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("a//b", "one or more segments, none of them empty (a//b)."),
        ("/a", "one or more segments, none of them empty (/a)."),
        ("../a", "no segments . or .. (../a)."),
        ("k" * 2_000, "the path of a stream has fewer bytes than these 2,000."),
    ],
    ids=["empty segment", "slash in front", "dots", "long"],
)
def test_a_path_that_no_stream_may_have_is_told_by_every_command(
    shell: Shell, path: str, said: str
) -> None:
    """The answer to a HEAD, with which all of these begin, cannot carry the server's reason."""
    for command in (("append", path, "1"), ("head", path), ("tail", path), ("tail", "-f", path)):
        assert shell.refusal(*command).endswith(said)


def test_what_is_given_wrongly_is_named_as_it_is_given(shell: Shell) -> None:
    shell.client.create("given")

    assert "--token or FENCEPOST_TOKEN" in shell.refusal("ls", "--token", "Bearer x", code=2)
    assert "--url or FENCEPOST_URL" in shell.refusal("ls", "--url", "ftp://x", code=2)
    assert "the data is empty" in shell.refusal("append", "given", "", code=2)
    assert "the data is empty" in shell.refusal("append", "given", "--file", os.devnull, code=2)


def test_errors_are_objects_for_programs(shell: Shell) -> None:
    done = shell.run("head", "missing", "--json", code=1)

    assert json.loads(done.stdout)["code"] == "stream_not_found"
    assert "There is no such stream, or it expired (missing)." in done.stderr


def test_a_token_comes_from_the_option_the_environment_or_the_file(
    home: Path, tmp_path: Path
) -> None:
    with place(tmp_path / "data", ANN) as served:
        url = served.process.url
        shell = Shell(url, home)
        file = tmp_path / "client.toml"
        file.write_text(f'url = "{url}"\ntoken = "{token("ann")}"\n')

        assert "FENCEPOST_TOKEN" in shell.refusal("create", "orders/1")
        assert "FENCEPOST_TOKEN" in shell.refusal("create", "orders/1", "--token", "fp_wrong")
        shell.run("create", "orders/1", "--token", token("ann"))
        shell.run("append", "orders/1", "1", FENCEPOST_TOKEN=token("ann"))
        assert "grant" in shell.refusal("create", "bills/1", FENCEPOST_TOKEN=token("ann"))
        read = shell.run("read", "orders/1", FENCEPOST_URL="", FENCEPOST_CONFIG=str(file))
        assert read.stdout == "1\n"
        shell.client.close()
