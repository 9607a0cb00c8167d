"""Hooks: commands that run for events.

Each hook reads the feed from a place of its own, which is noted on disk after each event: so it is
run at least once for each, also after a kill, and never for what happened before it was set up.
Hooks run beside deliveries and never hold them up; one hook takes its events one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from fencepost.clock import Clock
from fencepost.outbox.daemon import rows
from fencepost.outbox.daemon.database import File, WriteFailedError, Writer
from fencepost.outbox.daemon.feed import Feed, FeedEvent, Place, parse_place
from fencepost.outbox.daemon.settings import HookSettings

log = logging.getLogger(__name__)

INPUT_BYTES_MAX = 256 * 1024
OUTPUT_BYTES_MAX = 64 * 1024
RETRY_SECONDS = 1.0
SHOWN_BYTES_MAX = 4 * 1024
"""How much of a hook's output the audit log keeps."""
PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "SHELL")
"""The variables that a hook gets: none of them holds a credential."""


class Ran(NamedTuple):
    """How a run ended."""

    outcome: str
    """done, failed, timed_out, too_much_output or not_started."""
    exit_code: int | None
    output: bytes


Reply = Callable[[str, str, Mapping[str, Any]], Awaitable[None]]
"""Queue a message of a hook: the mesh, the id, the fields of a send."""


def input_of(event: FeedEvent) -> bytes:
    """What a hook reads on stdin: one JSON object, of 256 KiB at most."""
    fields: dict[str, Any] = {
        "event": event.kind,
        "id": str(event.place),
        "mesh": event.mesh,
        "at_ms": event.at_ms,
        **msgspec.json.decode(event.data),
    }
    data = msgspec.json.encode(fields)
    if len(data) <= INPUT_BYTES_MAX:
        return data
    # The longest fields go first; those that tell what it is about stay.
    fields["_truncated"] = []
    for name in sorted(fields, key=lambda name: -len(msgspec.json.encode(fields[name]))):
        if name in ("event", "id", "mesh", "at_ms", "_truncated"):
            continue
        fields[name] = None
        fields["_truncated"].append(name)
        data = msgspec.json.encode(fields)
        if len(data) <= INPUT_BYTES_MAX:
            break
    return data


class Hook:
    """One hook, and how far it is."""

    def __init__(
        self,
        settings: HookSettings,
        feed: Feed,
        writer: Writer,
        clock: Clock,
        reply: Reply,
    ) -> None:
        self.settings = settings
        self._feed = feed
        self._writer = writer
        self._clock = clock
        self._reply = reply
        self.runs = 0
        self.failures = 0

    async def run(self) -> None:
        """Run the command for event after event; never returns, whatever happens to a run."""
        while True:
            try:
                await self._follow()
            except Exception:
                log.exception("the hook %s failed, and goes on", self.settings.name)
                await asyncio.sleep(RETRY_SECONDS)

    async def _follow(self) -> None:
        place = await self._start()
        async for events in self._feed.follow(place):
            for event in events:
                wanted = event.kind in self.settings.on
                if wanted and self.settings.mesh in ("", event.mesh):
                    await self._handle(event)
            if events:
                await self._note(events[-1].place, None)

    async def _start(self) -> Place:
        name = f"hook:{self.settings.name}"
        known = await self._writer.read(lambda file: rows.noted(file, name))
        if known is not None:
            return parse_place(str(known).encode())
        place = await self._feed.last()
        await self._note(place, None)
        return place

    async def _handle(self, event: FeedEvent) -> None:
        for number in range(1, self.settings.attempts_max + 1):
            ran = await self._run_once(event, is_last=number == self.settings.attempts_max)
            if ran.outcome == "done":
                return
            await asyncio.sleep(RETRY_SECONDS * number)
        self.failures += 1
        log.error("the hook %s gives up on %s", self.settings.name, event.place)

    async def _run_once(self, event: FeedEvent, *, is_last: bool) -> Ran:
        """Run the command, and note the run; with the last one, that the event is done with."""
        started_ms, began_ms = self._clock.now_ms(), self._clock.monotonic_ms()
        ran = await run_command(self.settings, input_of(event))
        self.runs += 1
        if ran.outcome == "done" and ran.output.strip():
            ran = await self._answer(event, ran)
        run = (
            self.settings.name,
            f"{event.kind} {event.place}",
            started_ms,
            self._clock.monotonic_ms() - began_ms,
            ran.outcome,
            ran.exit_code,
            ran.output[:SHOWN_BYTES_MAX].decode(errors="replace"),
        )
        await self._note(event.place if is_last or ran.outcome == "done" else None, run)
        return ran

    async def _answer(self, event: FeedEvent, ran: Ran) -> Ran:
        """Queue what the hook says on stdout, if it may say it."""
        try:
            said = msgspec.json.decode(ran.output)
            mesh, message_id, fields = answer_of(self.settings, event, said)
            await self._reply(mesh, message_id, fields)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return Ran("failed", ran.exit_code, b"stdout is not JSON: " + str(error).encode())
        except AnswerRefusedError as error:
            return Ran("answer_refused", ran.exit_code, str(error).encode())
        return ran

    async def _note(self, place: Place | None, run: tuple[Any, ...] | None) -> None:
        """Note a run and the place of the hook, together."""

        def job(file: File) -> None:
            if run is not None:
                file.execute("add_run", *run)
            if place is not None:
                rows.note(file, f"hook:{self.settings.name}", str(place))

        while True:
            try:
                await self._writer.write(job)
                return
            except WriteFailedError as error:
                log.error("a run of the hook %s cannot be noted: %s", self.settings.name, error)
                await asyncio.sleep(RETRY_SECONDS)


class AnswerRefusedError(Exception):
    """The hook may not say this, or not to this destination."""


def answer_of(
    settings: HookSettings, event: FeedEvent, said: Any
) -> tuple[str, str, dict[str, Any]]:
    """The mesh, id and fields of the message with which a hook answers an event.

    `{"reply": ...}` goes to the sender of the message, `{"topic": ...}` to the topic that it came
    through. There is no way to name another destination.
    """
    if type(said) is not dict or len(said) != 1 or not said.keys() <= {"reply", "topic"}:
        raise AnswerRefusedError('an answer is {"reply": ...} or {"topic": ...}')
    [(whom, body)] = said.items()
    if whom not in settings.may:
        raise AnswerRefusedError(f"the hook may not answer {whom!r}: see may in its settings")
    message = msgspec.json.decode(event.data)
    if event.kind != "message":
        raise AnswerRefusedError("only a message can be answered")
    if whom == "topic" and message.get("kind") != "topic":
        raise AnswerRefusedError("the message did not come through a topic")
    to = ("dm", message["sender"]) if whom == "reply" else ("topic", message["ref"])
    fields = {
        "kind": to[0],
        "ref": to[1],
        "reply_to": message["broker_message_id"],
        **({"body": body} if isinstance(body, str) else {"json": body}),
    }
    # The same event gives the same id: a run that is repeated does not answer twice.
    message_id = f"hook-{settings.name}-{whom}-{message['broker_message_id']}"
    return event.mesh, message_id, fields


async def run_command(settings: HookSettings, data: bytes) -> Ran:
    """Run a command with `data` on its stdin, within its time and output."""
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environment["FENCEPOST_HOOK"] = settings.name
    try:
        process = await asyncio.create_subprocess_exec(
            *settings.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        return Ran("not_started", None, str(error).encode())
    output = bytearray()
    outcome = ""
    try:
        async with asyncio.timeout(settings.timeout_ms / 1000):
            feeding = asyncio.ensure_future(_feed(process, data))
            try:
                outcome = await _collect(process, output)
                if not outcome:
                    _ = await process.wait()
            finally:
                _ = feeding.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await feeding
    except TimeoutError:
        outcome = "timed_out"
    finally:
        # Also what the command has left behind: children that run on in its group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await _end(process)
    if not outcome:
        outcome = "done" if process.returncode == 0 else "failed"
    return Ran(outcome, process.returncode, bytes(output))


async def _end(process: asyncio.subprocess.Process) -> None:
    """Wait for a process that was killed, and let go of its pipes.

    The pipes come first. asyncio reports an exit only when all pipes have ended, and stdout never
    ends while its reader is held back, or while a process that left the group has it open.
    """
    transport: asyncio.SubprocessTransport = process._transport  # type: ignore[attr-defined]
    for descriptor in (0, 1):
        pipe = transport.get_pipe_transport(descriptor)
        if pipe is not None:
            pipe.close()
    _ = await process.wait()
    transport.close()


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    assert process.stdin is not None
    # A command need not read: it may be gone already (RuntimeError is what uvloop says then).
    with contextlib.suppress(OSError, RuntimeError):
        process.stdin.write(data)
        await process.stdin.drain()
        process.stdin.close()


async def _collect(process: asyncio.subprocess.Process, output: bytearray) -> str:
    """Read stdout to its end; why that was given up, if it was."""
    assert process.stdout is not None
    while chunk := await process.stdout.read(16 * 1024):
        output += chunk
        if len(output) > OUTPUT_BYTES_MAX:
            del output[OUTPUT_BYTES_MAX:]
            return "too_much_output"
    return ""
