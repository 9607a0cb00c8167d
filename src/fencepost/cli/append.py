"""`fencepost append`: a message from an argument, a file or stdin, or many lines of JSON.

Lines (`--ndjson`) go through the idempotent producer: in batches, pipelined, each stored once
whatever happens to the connection or the server. A run that fails says which line was the last one
stored, and how to go on: `--skip` leaves those lines out, and `--resume` goes on in the same
session of the producer, so that lines whose answer was lost are found and not sent twice.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path as File
from typing import Annotated, Any, BinaryIO, NamedTuple

import msgspec
import typer
from rich.progress import TextColumn

import fencepost
from fencepost.cli.interrupts import Interrupts, interrupts
from fencepost.cli.options import TYPES, AsJson, Path, Token, Type, Url, content_type_of
from fencepost.cli.profile import resolve
from fencepost.cli.render import (
    INTERRUPTED,
    USAGE,
    CommandError,
    code_of,
    progress,
    sentence_of,
    show_facts,
    show_lines,
    talking,
)
from fencepost.clock import SystemClock

READ_BYTES = 1 << 18
IDLE_MS = 50
"""How long lines may pause before those that wait are sent and waited for."""
INTERRUPTED_SECONDS_MAX = 5.0
"""How long Ctrl-C waits for what is on its way."""
FLUSH_SECONDS = 0.1
"""How often a wait for answers looks whether Ctrl-C was pressed."""
PATIENCE_SECONDS = 120.0


def append(
    stream: Path,
    data: Annotated[
        list[str] | None,
        typer.Argument(help="Messages; without any, stdin is one message."),
    ] = None,
    file: Annotated[
        File | None, typer.Option(help="Take the data from a file; - is stdin.")
    ] = None,
    ndjson: Annotated[
        bool, typer.Option("--ndjson", help="Each line is a JSON message; sent in batches.")
    ] = False,
    text: Annotated[
        bool, typer.Option("--text", help="To a JSON stream: the data is text, not JSON.")
    ] = False,
    content_type: Type = None,
    make: Annotated[
        bool, typer.Option("--create", help="Make the stream if it is not there.")
    ] = False,
    close: Annotated[bool, typer.Option("--close", help="Close the stream with it.")] = False,
    if_match: Annotated[
        str | None, typer.Option(help="Only if the stream ends at this offset; * if it exists.")
    ] = None,
    if_empty: Annotated[
        bool, typer.Option("--if-empty", help="Only if the stream is empty or absent.")
    ] = False,
    key: Annotated[
        str | None, typer.Option(help="Idempotency key: the same again is stored once.")
    ] = None,
    producer: Annotated[
        str | None, typer.Option(help="With --ndjson: id of the producer. Default: a new one.")
    ] = None,
    skip: Annotated[int, typer.Option(help="With --ndjson: leave out so many lines.", min=0)] = 0,
    resume: Annotated[
        str | None, typer.Option(help="With --ndjson: go on after EPOCH.SEQ of the producer.")
    ] = None,
    patience: Annotated[
        float, typer.Option(help="With --ndjson: seconds that the server may be away.", min=0.0)
    ] = PATIENCE_SECONDS,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Store messages: each DATA, the whole of a file or stdin, or with --ndjson each line of it.

    To a JSON stream each DATA is a JSON value, and several are stored together or not at all.

    Examples:

      fencepost append orders '{"total": 12}'
      fencepost append notes --text hello
      fencepost append orders --ndjson --file orders.ndjson --producer import-7
    """
    with talking(url, token, as_json=as_json) as client:
        if data and file is not None:
            raise CommandError("give DATA or --file, not both", USAGE)
        if ndjson:
            if data or text or close or key or if_match or if_empty:
                raise CommandError(
                    "--ndjson takes lines from --file or stdin, without conditions", USAGE
                )
            kind = _type_of_lines(client, stream, make=make)
            if kind != TYPES["json"]:
                raise CommandError(f"--ndjson is for JSON streams; {stream} holds {kind}", USAGE)
            if make:
                client.create(stream)
            goes_on = None if resume is None else _parse_resume(resume, producer)
            where = resolve(url, token, os.environ).url
            feed = Feed(client, where, stream, file, producer, skip, goes_on, patience)
            _say(feed.run(hidden=as_json), as_json)
            return
        if producer or skip or resume:
            raise CommandError("--producer, --skip and --resume go with --ndjson", USAGE)
        kind = _content_type(client, stream, content_type, make=make or if_empty)
        messages = _messages(data, file, is_json=kind == TYPES["json"], text=text)
        stored = client.stream(stream, content_type=kind).append_many(
            messages,
            close=close,
            if_match=if_match,
            if_none_match="*" if if_empty else None,
            auto_create=make,
            key=key,
        )
        facts = {
            "path": stream,
            "next_offset": stored.next_offset,
            "version": stored.version,
            "position": stored.position,
            "closed": stored.closed,
            "duplicate": stored.duplicate,
        }
        _say(facts, as_json)


def _content_type(client: fencepost.Client, path: str, named: str | None, *, make: bool) -> str:
    """The content type that was named, else that of the stream; JSON for a stream to be made."""
    if named is not None:
        return content_type_of(named)
    try:
        found = client.stream(path).head().content_type
    except fencepost.StreamNotFoundError:
        if not make:
            raise
        return TYPES["json"]
    plain = found.partition(";")[0].strip().lower()
    return plain if plain == TYPES["json"] else found


def _type_of_lines(client: fencepost.Client, path: str, *, make: bool) -> str:
    """Ask even if the answer is clear: whether a server is there shows now, not after minutes."""
    try:
        return _content_type(client, path, None, make=make)
    except fencepost.ForbiddenError:
        return TYPES["json"]  # who may append may not be allowed to read


def _messages(data: list[str] | None, file: File | None, *, is_json: bool, text: bool) -> list[Any]:
    if data and len(data) > 1 and not is_json:
        raise CommandError("several DATA at once are for JSON streams: append one by one", USAGE)
    given = [one.encode(errors="surrogateescape") for one in data] if data else [_whole(file)]
    if not is_json:
        return given
    return [_text(one) if text else checked_json(one) for one in given]


def _whole(file: File | None) -> bytes:
    with opened(file) as source:
        try:
            return source.read()
        except OSError as error:
            raise _unreadable(error) from None


def _unreadable(error: OSError) -> CommandError:
    return CommandError(f"the data cannot be read: {error.strerror or error}", USAGE)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CommandError(f"the data is not UTF-8 ({error.reason})", USAGE) from None


def checked_json(data: bytes, what: str = "the data") -> msgspec.Raw:
    """The same bytes, if they are a JSON value, without space around them."""
    data = data.strip()
    if not data:
        raise CommandError(f"{what} is empty, and that is not JSON", USAGE)
    try:
        data.decode()
        msgspec.json.decode(data, type=msgspec.Raw)
    except UnicodeDecodeError as error:
        raise CommandError(f"{what} is not UTF-8 ({error.reason})", USAGE) from None
    except (msgspec.DecodeError, RecursionError) as error:
        hint = "" if what != "the data" else "; text is quoted as '\"text\"', or given with --text"
        raise CommandError(f"{what} is not JSON ({error}){hint}", USAGE) from None
    return msgspec.Raw(data)


def opened(file: File | None) -> AbstractContextManager[BinaryIO]:
    """The file, or stdin."""
    if file is None or str(file) == "-":
        if sys.stdin is None:
            raise CommandError("there is no stdin: give DATA or --file", USAGE)
        if sys.stdin.isatty():
            print("fencepost: reading from the terminal; Ctrl-D ends it", file=sys.stderr)
        return nullcontext(sys.stdin.buffer)
    try:
        return file.open("rb")
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror}", USAGE) from None


def _say(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show_lines([facts])
    else:
        show_facts({name.replace("_", " "): value for name, value in facts.items()})


# Many lines


class Resume(NamedTuple):
    """Where a run that failed was: its epoch, and the last seq that was acknowledged (-1: none)."""

    epoch: int
    seq: int


def _parse_resume(given: str, producer: str | None) -> Resume:
    found = re.fullmatch(r"(\d{1,16})(?:\.(\d{1,16}))?", given)
    if found is None:
        raise CommandError(f"--resume is EPOCH.SEQ as a failed run prints it, not {given!r}", USAGE)
    if producer is None:
        raise CommandError("--resume needs the --producer of the run that failed", USAGE)
    return Resume(int(found[1]), -1 if found[2] is None else int(found[2]))


@dataclass(frozen=True, slots=True)
class Start:
    """How a producer begins: in which session, and how many messages of ours it holds already."""

    epoch: int | None = None
    seq: int | None = None
    stored: int = 0


class Feed:
    """Lines on their way into a stream."""

    def __init__(
        self,
        client: fencepost.Client,
        where: str,
        path: str,
        file: File | None,
        producer: str | None,
        skip: int,
        resume: Resume | None,
        patience: float,
    ) -> None:
        self._client = client
        self._where = where
        self._path = path
        self._file = file
        self._id = producer or f"cli-{SystemClock().token(6).hex()}"
        self._skip = skip
        self._resume = resume
        self._patience = patience
        self._on_the_way: deque[int] = deque()
        self._line = skip
        """The last line that was taken."""
        self._stored_line = skip
        """The last line that is known to be stored, with all before it."""
        self._messages = 0
        self._acked: fencepost.Receipt | None = None
        self._lost: fencepost.PendingBatch | None = None

    def run(self, *, hidden: bool) -> dict[str, Any]:
        """Send every line, and say how it went; raises where to go on if it cannot be finished."""
        start = Start() if self._resume is None else self._find(self._resume)
        with (
            opened(self._file) as source,
            progress(TextColumn("{task.fields[lines]:,} lines"), hidden=hidden) as bars,
        ):
            size = os.fstat(source.fileno()).st_size or None
            task = bars.add_task("appending", total=size, lines=0)
            producer = self._client.stream(self._path).producer(
                self._id,
                epoch=start.epoch,
                seq=start.seq,
                delivery_seconds_max=max(self._patience, 0.001),
                on_ack=self._on_ack,
                on_error=self._on_error,
            )

            def tell(taken: int) -> None:
                bars.update(task, completed=taken, lines=self._stored_line)

            self._send(producer, source, start.stored, tell)
        return self._facts()

    def _send(
        self,
        producer: fencepost.IdempotentProducer,
        source: BinaryIO,
        stored: int,
        tell: Callable[[int], None],
    ) -> None:
        try:
            with interrupts() as pressed:
                for number, line in enumerate(
                    lines_of(source, partial(_flush, producer, pressed), tell, pressed), 1
                ):
                    pressed.check()
                    if number <= self._skip:
                        continue
                    self._line = number
                    if not line or line.isspace():
                        continue
                    if stored:
                        stored -= 1
                        self._stored_line = number
                        continue
                    message = checked_json(line, f"line {number:,}")
                    self._on_the_way.append(number)
                    producer.append(message)
                _flush(producer, pressed)
                producer.close()
        except KeyboardInterrupt:
            self._finish(producer, INTERRUPTED_SECONDS_MAX)
            raise self._unfinished("interrupted", INTERRUPTED) from None
        except CommandError as error:
            self._finish(producer, self._patience)
            raise self._unfinished(str(error), error.code) from None
        except fencepost.FencepostError as error:
            self._finish(producer, INTERRUPTED_SECONDS_MAX)
            raise self._unfinished(sentence_of(error, self._where), code_of(error)) from None

    def _finish(self, producer: fencepost.IdempotentProducer, seconds_max: float) -> None:
        """Store what was taken, if that can still be done."""
        try:
            producer.close(seconds_max)
        except fencepost.FencepostError:
            return  # why it stopped is known; which batches were lost, `_on_error` was told

    def _on_ack(self, receipt: fencepost.Receipt) -> None:
        self._acked = receipt
        self._messages += receipt.messages
        for _ in range(receipt.messages):
            self._stored_line = self._on_the_way.popleft()

    def _on_error(self, error: Exception, batch: fencepost.PendingBatch) -> None:  # noqa: ARG002
        if self._lost is None or (batch.maybe_stored and not self._lost.maybe_stored):
            self._lost = batch

    def _facts(self) -> dict[str, Any]:
        acked = self._acked
        return {
            "path": self._path,
            "lines": self._line,
            "messages": self._messages,
            "producer": self._id,
            "epoch": None if acked is None else acked.epoch,
            "seq": None if acked is None else acked.seq,
            "next_offset": None if acked is None else acked.next_offset,
        }

    def _unfinished(self, sentence: str, code: int) -> CommandError:
        """The error that says what was stored, what is not known, and which command goes on."""
        unsure = self._lost is not None and self._lost.maybe_stored
        known = f"Lines up to {self._stored_line:,} are stored"
        if not self._stored_line:
            known = "No line is known to be stored" if unsure else "No line is stored"
        if unsure:
            known += f", lines up to {self._line:,} may be"
        again = ["fencepost", "append", self._path, "--ndjson"]
        if self._file is not None:
            again += ["--file", str(self._file)]
        again += ["--producer", self._id, "--skip", str(self._stored_line)]
        resume = self._resume_text() if unsure else None
        if resume is not None:
            again += ["--resume", resume]
        return CommandError(
            f"{sentence.rstrip('.')}. {known}. To go on: {shlex.join(again)}",
            code,
            stored_line=self._stored_line,
            uncertain=unsure,
            producer=self._id,
            resume=resume,
        )

    def _resume_text(self) -> str | None:
        if self._acked is not None:
            return f"{self._acked.epoch}.{self._acked.seq}"
        if self._resume is not None:
            return f"{self._resume.epoch}" + (
                f".{self._resume.seq}" if self._resume.seq >= 0 else ""
            )
        return None if self._lost is None or self._lost.epoch is None else str(self._lost.epoch)

    def _find(self, resume: Resume) -> Start:
        """Ask the server how much of the failed run is stored behind its last acknowledged line."""
        state = next(
            (
                one
                for one in self._client.producers(stream=self._path, match=self._id)
                if (one.stream, one.id) == (self._path, self._id)
            ),
            None,
        )
        if state is None or state.epoch < resume.epoch:
            if resume.seq < 0:
                return Start(epoch=resume.epoch)
            raise CommandError(
                f"the server does not know epoch {resume.epoch} of the producer {self._id}:"
                f" look at `fencepost producers {self._path}`, and at the end of the stream"
            )
        if state.epoch > resume.epoch:
            raise CommandError(
                f"the producer {self._id} has begun epoch {state.epoch} since, so another run"
                " went on: read the end of the stream, then use --skip without --resume"
            )
        if state.seq < resume.seq:
            raise CommandError(
                f"the server has seen seq {state.seq} of the producer {self._id}, not {resume.seq}:"
                " it may have been restored from a backup; read the end of the stream"
            )
        stored = 0 if state.seq == resume.seq else self._stored_since(resume)
        # Going on in the session, not in a new one: if a request of the old run were still to
        # arrive, the numbers would collide and one of the two be refused, never both stored.
        return Start(epoch=state.epoch, seq=state.seq, stored=stored)

    def _stored_since(self, resume: Resume) -> int:
        """Messages of the failed run that were stored although it never heard of it."""
        stored = 0
        incarnation: int | None = None
        for entry in self._client.log(streams=[self._path]):
            if entry.incarnation != incarnation:
                incarnation, stored = entry.incarnation, 0
            sender = entry.producer
            if (
                sender is not None
                and (sender.id, sender.epoch) == (self._id, resume.epoch)
                and sender.seq > resume.seq
            ):
                stored += 1
        return stored


def _flush(producer: fencepost.IdempotentProducer, pressed: Interrupts) -> None:
    """Wait until all that was taken is stored, or Ctrl-C is pressed."""
    while True:
        try:
            producer.flush(FLUSH_SECONDS)
        except TimeoutError:
            pressed.check()
        else:
            return


def lines_of(
    source: BinaryIO, idle: Callable[[], None], tell: Callable[[int], None], pressed: Interrupts
) -> Iterator[bytes]:
    """The lines of a file or pipe; `idle` is called when it pauses, `tell` with the bytes taken."""
    waiting = select.poll()
    waiting.register(source.fileno(), select.POLLIN)
    rest: list[bytes] = []
    taken = 0
    while True:
        with pressed.waiting():
            is_ready = waiting.poll(IDLE_MS)
        if not is_ready:
            idle()
        try:
            with pressed.waiting():
                piece = os.read(source.fileno(), READ_BYTES)
        except OSError as error:
            raise _unreadable(error) from None
        if not piece:
            break
        taken += len(piece)
        *whole, last = piece.split(b"\n")
        if whole:
            whole[0] = b"".join((*rest, whole[0]))
            rest = []
        yield from whole
        rest.append(last)
        tell(taken)
    if any(rest):
        yield b"".join(rest)
