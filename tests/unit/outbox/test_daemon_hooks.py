"""Hooks: what a command reads, what it may take, what it may answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fencepost.outbox.daemon import hooks
from fencepost.outbox.daemon.feed import BadPlaceError, FeedEvent, Place, parse_place, rendered
from fencepost.outbox.daemon.hooks import (
    INPUT_BYTES_MAX,
    OUTPUT_BYTES_MAX,
    AnswerRefusedError,
    answer_of,
    input_of,
    run_command,
)
from fencepost.outbox.daemon.settings import HookSettings
from tests.outboxing import until

MESSAGE = {
    "broker_message_id": "m1.0",
    "client_message_id": "a-1",
    "sender": "ben",
    "kind": "topic",
    "ref": "alerts",
    "body": "hello",
}


def an_event(kind: str = "message", **fields: Any) -> FeedEvent:
    data = msgspec.json.encode({**MESSAGE, **fields})
    return FeedEvent(Place(3, 7), kind, "shop", 1000, data)


def a_hook(script: str = "", **fields: Any) -> HookSettings:
    command = (sys.executable, "-c", script)
    return HookSettings(**{"name": "pager", "on": ("message",), "command": command, **fields})


async def test_a_command_reads_the_event_and_its_output_is_kept() -> None:
    ran = await run_command(
        a_hook("import sys, json; print(json.load(sys.stdin)['body'])"), input_of(an_event())
    )

    assert (ran.outcome, ran.exit_code, ran.output) == ("done", 0, b"hello\n")


async def test_a_command_gets_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_TOKEN", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    ran = await run_command(a_hook("import os; print(sorted(os.environ))"), b"{}")

    assert b"TOKEN" not in ran.output
    assert b"SECRET" not in ran.output
    assert b"FENCEPOST_HOOK" in ran.output


async def test_a_command_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    script = (
        "import os, subprocess, sys\n"
        "deaf = 'import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)];'\n"
        "child = subprocess.Popen([sys.executable, '-c', deaf + 'time.sleep(600)'])\n"
        f"open({str(file)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "child.wait()\n"
    )

    ran = await run_command(a_hook(script, timeout_ms=3000), b"{}")

    assert ran.outcome == "timed_out"
    for pid in map(int, file.read_text().split()):
        # The kernel ends what was killed in its own time.
        until(partial(has_ended, pid))


async def test_a_child_that_left_the_group_does_not_hold_its_hook_up(tmp_path: Path) -> None:
    """It still has stdout, so that never ends."""
    file = tmp_path / "pid"
    script = (
        "import subprocess, sys\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "child = subprocess.Popen(sleep, start_new_session=True)\n"
        f"open({str(file)!r}, 'w').write(str(child.pid))\n"
    )

    ran = await asyncio.wait_for(run_command(a_hook(script, timeout_ms=3000), b"{}"), 30)

    assert ran.outcome == "timed_out"
    os.kill(int(file.read_text()), signal.SIGKILL)


def has_ended(pid: int) -> bool:
    """Whether a process does nothing any more: killed, waited for or not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


async def test_output_beyond_the_limit_ends_the_command() -> None:
    script = "import sys\nwhile True: sys.stdout.write('x' * 10_000)"

    ran = await run_command(a_hook(script), b"{}")

    assert ran.outcome == "too_much_output"
    assert len(ran.output) == OUTPUT_BYTES_MAX


async def test_output_that_comes_faster_than_it_is_read_ends_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reader is held back when the limit is found out, and stays so."""
    collect = hooks._collect

    async def collect_late(process: asyncio.subprocess.Process, output: bytearray) -> str:
        assert process.stdout is not None
        while not process.stdout._paused:  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return await collect(process, output)

    monkeypatch.setattr(hooks, "_collect", collect_late)
    monkeypatch.setattr(hooks, "OUTPUT_BYTES_MAX", 1024)
    script = "import sys\nwhile True: sys.stdout.write('x' * 10_000)"

    ran = await asyncio.wait_for(run_command(a_hook(script), b"{}"), 30)

    assert ran.outcome == "too_much_output"


async def test_a_command_need_not_read_its_input() -> None:
    ran = await run_command(a_hook("raise SystemExit(3)"), b"x" * INPUT_BYTES_MAX)

    assert (ran.outcome, ran.exit_code) == ("failed", 3)


async def test_a_command_that_is_not_there_is_an_outcome() -> None:
    ran = await run_command(a_hook(command=("/no/such/program",)), b"{}")

    assert ran.outcome == "not_started"


def test_an_event_that_is_too_long_loses_its_longest_fields() -> None:
    data = json.loads(input_of(an_event(body="x" * INPUT_BYTES_MAX)))

    assert data["_truncated"] == ["body"]
    assert (data["body"], data["sender"], data["event"]) == (None, "ben", "message")
    assert "_truncated" not in json.loads(input_of(an_event()))


def test_an_answer_goes_to_the_sender_or_the_topic_and_nowhere_else() -> None:
    hook = a_hook(may=("reply", "topic"))

    mesh, message_id, fields = answer_of(hook, an_event(), {"reply": "thanks"})
    assert (mesh, fields["kind"], fields["ref"]) == ("shop", "dm", "ben")
    assert fields["reply_to"] == "m1.0"
    assert answer_of(hook, an_event(), {"reply": "thanks"})[1] == message_id
    assert answer_of(hook, an_event(), {"topic": {"a": 1}})[2]["ref"] == "alerts"


@pytest.mark.parametrize(
    ("may", "kind", "said"),
    [
        ((), "message", {"reply": "x"}),
        (("reply",), "message", {"topic": "x"}),
        (("reply",), "dead", {"reply": "x"}),
        (("reply",), "message", {"reply": "x", "topic": "y"}),
        (("reply",), "message", {"dm": "x"}),
        (("reply",), "message", ["reply"]),
        (("reply",), "message", {}),
    ],
)
def test_what_a_hook_may_not_say_is_refused(may: Any, kind: str, said: Any) -> None:
    with pytest.raises(AnswerRefusedError):
        answer_of(a_hook(may=may), an_event(kind), said)


def test_an_answer_to_a_message_that_came_through_no_topic_has_none() -> None:
    with pytest.raises(AnswerRefusedError):
        answer_of(a_hook(may=("topic",)), an_event(kind="dm"), {"topic": "x"})


def test_an_event_is_one_line_of_data_with_the_place_behind_it() -> None:
    text = rendered(an_event())

    lines = text.decode().split("\n")
    assert lines[:2] == ["event: message", "id: 3.7"]
    assert json.loads(lines[2].removeprefix("data: "))["message"]["body"] == "hello"
    assert lines[3:] == ["", ""]


@pytest.mark.parametrize("text", [b"", b"3", b"3.", b"3.7.1", b"-1.0", b"a.b", b"9" * 30 + b".1"])
def test_a_place_that_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(BadPlaceError):
        parse_place(text)


def test_a_place_reads_back() -> None:
    assert parse_place(str(Place(12, 34)).encode()) == Place(12, 34)
