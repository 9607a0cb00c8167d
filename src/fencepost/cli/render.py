"""Output of the stream commands: tables, JSON, messages, errors and exit codes.

`talking` is the way in and out of every command: it opens the client, and turns whatever goes wrong
into one sentence on stderr that says what to do next, and an exit code. Results go to stdout, as a
table for people or as JSON for programs; bytes of streams go there untouched.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, BinaryIO, NoReturn, TypeVar
from urllib.parse import unquote

import msgspec
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

import fencepost
from fencepost.cli.profile import ProfileError, resolve
from fencepost.protocol.paths import check_path

T = TypeVar("T")

REFUSED, USAGE, UNREACHABLE, INTERRUPTED = 1, 2, 3, 130
"""Exit codes beside 0: the server said no or a precondition failed; the command or what it was
given is wrong; no server answers; Ctrl-C."""

RETRIES = fencepost.Retries(attempts_max=5, seconds_max=15.0, delay_seconds_max=1.0)
"""A person at a terminal wants to know soon that no server answers."""
NO_REASON = "the server gave no reason"
"""What the client says of a refusal without a body."""
WIDTH_OF_NO_TERMINAL = 10_000
"""Tables in a pipe are as wide as they need to be: a cut offset is of no use."""


class CommandError(Exception):
    """A command cannot go on; the sentence says why and what to do."""

    def __init__(self, sentence: str, code: int = REFUSED, **fields: object) -> None:
        super().__init__(sentence)
        self.code = code
        self.fields = fields
        """Facts for programs, printed with --json beside the sentence."""


@contextmanager
def talking(
    url: str | None,
    token: str | None,
    *,
    as_json: bool = False,
    retries: fencepost.Retries = RETRIES,
) -> Iterator[fencepost.Client]:
    """A client for the server that is meant, with an end in words for every failure."""
    _with_standard_streams()
    # The sentence at the end says what failed: a warning before it would say the same.
    logging.getLogger("fencepost.client.retry").setLevel(logging.ERROR)
    where = url or ""
    try:
        profile = resolve(url, token, os.environ)
        where = profile.url
        with _connected(profile.url, profile.token, retries) as client:
            yield client
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        _drop_output()
        raise typer.Exit(0) from None
    except ProfileError as error:
        fail(str(error), USAGE, as_json=as_json)
    except CommandError as error:
        fail(str(error), error.code, as_json=as_json, **error.fields)
    except fencepost.FencepostError as error:
        code = getattr(error, "code", None)
        fail(sentence_of(error, where), code_of(error), as_json=as_json, code=code)
    except OSError as error:
        _drop_output()
        fail(f"the output cannot be written: {error.strerror or error}", as_json=as_json)


def _connected(url: str, token: str | None, retries: fencepost.Retries) -> fencepost.Client:
    try:
        return fencepost.connect(url, token=token, retries=retries)
    except (fencepost.ProtocolError, ValueError) as error:
        text = str(error)
        given = (
            "--token or FENCEPOST_TOKEN" if text.startswith("token") else "--url or FENCEPOST_URL"
        )
        raise CommandError(f"{text}; give {given} another one", USAGE) from None


def ask(question: str) -> None:
    """Go on if the person at the terminal agrees."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise CommandError("there is no terminal to ask at: say --yes to go on", USAGE)
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort:
        raise KeyboardInterrupt from None
    if not agreed:
        raise CommandError("nothing was done", REFUSED)


def fail(
    sentence: str, exit_code: int = REFUSED, *, as_json: bool = False, **fields: object
) -> NoReturn:
    """End the command with a sentence, and for programs an object as well."""
    if as_json:
        try:
            print(json.dumps({"error": sentence, **fields}), flush=True)
        except OSError:
            _drop_output()
    print(f"fencepost: {sentence}", file=sys.stderr)
    raise typer.Exit(exit_code)


def _with_standard_streams() -> None:
    """A process may be started without any (`>&-`); then what it says goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (for as long as we run)


def _drop_output() -> None:
    """Let what is left in buffers go nowhere, so that the exit does not fail over it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Errors in words


def code_of(error: BaseException) -> int:
    """The exit code of an error of the client."""
    if isinstance(error, fencepost.ProducerFailedError | fencepost.OutcomeUnknownError):
        return REFUSED if error.cause is None else code_of(error.cause)
    if isinstance(error, fencepost.ConnectionFailedError | fencepost.ProtocolError):
        return UNREACHABLE
    return UNREACHABLE if _is_a_page(error) else REFUSED


def _is_a_page(error: BaseException) -> bool:
    """Whether a refusal was written for a browser: it is another server's, or of one before it."""
    return isinstance(error, fencepost.ResponseError) and error.headers.get(
        "content-type", ""
    ).startswith("text/html")


def sentence_of(error: BaseException, url: str) -> str:
    """What happened, and what to do next."""
    match error:
        case fencepost.ProducerFailedError():
            return sentence_of(error.cause, url)
        case fencepost.OutcomeUnknownError():
            return f"{error}. Read the stream to find out, before you send it again"
        case fencepost.RequestTimeoutError():
            return f"the server at {url} does not answer in time ({error}). Try again later"
        case fencepost.ConnectionFailedError():
            return (
                f"cannot reach the server at {url} ({error}). Start one with `fencepost serve`,"
                " or say where it is with --url or FENCEPOST_URL"
            )
        case fencepost.ProtocolError():
            return f"what answers at {url} is not a Fencepost server ({error}). Check the URL"
        case fencepost.ResponseError() if _is_a_page(error):
            return (
                f"what answers at {url} is not a Fencepost server (status {error.status}, a page"
                " for browsers). Check the URL, and what stands in front of the server"
            )
        case fencepost.ResponseError():
            return f"{_reason(error)} {_advice(error)}".strip()
        case _:
            return str(error)


def _reason(error: fencepost.ResponseError) -> str:
    """The server's sentence; the answer to a HEAD has none, so then what the error means."""
    detail = _meaning(error) if error.detail == NO_REASON else error.detail
    shown = printable(detail.strip())
    return shown if shown.endswith((".", "!", "?")) else shown + "."


def _meaning(error: fencepost.ResponseError) -> str:
    meaning = (type(error).__doc__ or error.detail).partition(". ")[0]
    path = unquote((error.path or "").partition("/v1/stream/")[2])
    if not path:
        return meaning
    if isinstance(error, fencepost.TooLargeError):
        return f"the path of a stream has fewer bytes than these {len(path.encode()):,}"
    refused = check_path(path) if error.status == 400 else None
    return f"{meaning if refused is None else refused.detail} ({path})"


_ADVICE: tuple[tuple[type[fencepost.ResponseError], str], ...] = (
    (fencepost.UnauthorizedError, "Give a token with --token or FENCEPOST_TOKEN"),
    (fencepost.StaleEpochError, "A newer session of this producer has begun: let that one write"),
    (fencepost.ForbiddenError, "Ask the operator of the server for a grant"),
    (
        fencepost.StreamNotFoundError,
        "`fencepost ls` shows the streams there are, `fencepost create` or `append --create` makes"
        " one",
    ),
    (
        fencepost.DestinationNotFoundError,
        "`fencepost mesh list MESH` shows what the mesh has, `fencepost mesh topic` and its like"
        " make it",
    ),
    (
        fencepost.MeshNotFoundError,
        "`fencepost mesh list` shows the meshes there are, `fencepost mesh create` makes one",
    ),
    (fencepost.SubscriptionNotFoundError, "`fencepost subscriptions` shows those there are"),
    (fencepost.NotFoundError, "Check the URL and the path"),
    (fencepost.OffsetTruncatedError, "The stream begins later now: leave the offset out"),
    (fencepost.StreamDeletedError, "Only its forks are left: use another path"),
    (fencepost.StreamExistsError, "Use it as it is (`fencepost head`), or another path"),
    (fencepost.PathBlockedError, "Use another path"),
    (fencepost.ContentTypeMismatchError, "`fencepost head` shows its type; --type gives yours"),
    (fencepost.StreamClosedError, "Write to another stream"),
    (fencepost.BooksClosedError, "Write to another stream, or open its books by a commit"),
    (fencepost.KeyReusedError, "Use a new --key for new content"),
    (fencepost.RateLimitedError, "Wait a little, then try again"),
    (fencepost.StorageFullError, "Make room on the server's disk, then try again"),
    (fencepost.UnavailableError, "Try again later"),
    (fencepost.TooLargeError, "Send less at a time; --ndjson makes batches that fit"),
)


def _advice(error: fencepost.ResponseError) -> str:
    if isinstance(error, fencepost.TailMovedError) and error.next_offset is not None:
        return f"The tail is {error.next_offset} now: read up to it, then decide again"
    if isinstance(error, fencepost.TooLargeError) and error.detail == NO_REASON:
        return ""
    if isinstance(error, fencepost.KeyReusedError) and "conflict" in error.problem:
        return "Give another message another --id"
    for kind, advice in _ADVICE:
        if isinstance(error, kind):
            return advice
    return ""


# Tables and objects


def show_lines(entries: Iterable[object]) -> None:
    """Each entry as one line of JSON, as soon as it is there."""
    for entry in entries:
        sys.stdout.write(as_line(entry))
        sys.stdout.flush()


def as_line(entry: object) -> str:
    return msgspec.json.encode(entry).decode() + "\n"


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """A table for people; numbers stand on the right."""
    shown = [[_cell(value) for value in row] for row in rows]
    if not shown:
        print(empty, file=sys.stderr)
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    for index, name in enumerate(columns):
        numeric = all(
            value.replace(",", "").lstrip("-").isdigit() for value in _column(shown, index)
        )
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in shown:
        table.add_row(*map(Text, row))
    console().print(table)


def show_list(
    entries: Iterable[T],
    columns: Sequence[str],
    row: Callable[[T], Sequence[object]],
    *,
    empty: str,
    as_json: bool,
) -> None:
    """The entries of a list: as lines of JSON for programs, as a table with a row of each else."""
    if as_json:
        show_lines(entries)
    else:
        show_table(columns, map(row, entries), empty=empty)


def show_facts(facts: Mapping[str, object]) -> None:
    """One thing, a line for each of its facts; what is not there is left out."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value is not None:
            table.add_row(Text(name), Text(_cell(value)))
    console().print(table)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let `talking` end the command, as it does for everything else we print."""
        raise BrokenPipeError


def console() -> Console:
    """Stdout: with colours and a width only when it is a terminal."""
    return _Console(width=None if sys.stdout.isatty() else WIDTH_OF_NO_TERMINAL, highlight=False)


def _column(rows: list[list[str]], index: int) -> list[str]:
    return [row[index] for row in rows if row[index]]


def _cell(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case datetime():
            return f"{value.astimezone():%Y-%m-%d %H:%M:%S}"
        case _:
            return printable(str(value))


def printable(text: str) -> str:
    """Text from elsewhere without anything that a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


# Messages


class Sink:
    """Where the data of a stream goes: bytes on stdout, flushed at once while following."""

    def __init__(self, *, at_once: bool) -> None:
        sys.stdout.flush()
        self._out: BinaryIO = sys.stdout.buffer
        self._at_once = at_once

    def write(self, data: bytes) -> None:
        """Write all of it, or raise BrokenPipeError once the reader of the pipe is gone."""
        self._out.write(data)
        if self._at_once:
            self._out.flush()

    def flush(self) -> None:
        self._out.flush()


def message_line(message: msgspec.Raw) -> bytes:
    """A JSON message on a line of its own, byte for byte unless it spans several."""
    data = bytes(message).strip()
    if b"\n" in data or b"\r" in data:
        data = msgspec.json.format(data, indent=-1)
    return data + b"\n"


def batch_line(batch: fencepost.Batch[Any], *, is_json: bool) -> bytes:
    """A batch as one object: its messages, and where to go on after them, if that is known."""
    entry: dict[str, Any] = {"offset": batch.offset, "next_offset": batch.next_offset or None}
    if is_json:
        entry["messages"] = [msgspec.Raw(message_line(one)[:-1]) for one in batch.messages]
    else:
        entry["data_base64"] = batch.data
    entry["closed"] = batch.closed
    return msgspec.json.encode(entry) + b"\n"


def leave_when_unread() -> None:
    """End the process as soon as the reader of our pipe is gone, as `tail` does.

    A follower may wait for hours before it writes and notices. Nothing is lost: it writes at once.
    """
    try:
        waiting = select.poll()
        waiting.register(sys.stdout.fileno(), 0)
    except (OSError, AttributeError):
        return

    def watch() -> None:
        for _, event in waiting.poll():
            if event & (select.POLLERR | select.POLLHUP):
                os._exit(0)

    threading.Thread(target=watch, daemon=True, name="stdout-watch").start()


def tell_of_interruptions() -> None:
    """Let the client say on stderr that the server is away and that it waits."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("fencepost: %(message)s"))
    logger = logging.getLogger("fencepost.client")
    logger.addHandler(handler)
    logger.propagate = False


# Progress


@contextmanager
def progress(*columns: ProgressColumn, hidden: bool) -> Iterator[Progress]:
    """Bars on stderr when it is a terminal; nothing elsewhere."""
    shown = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(
        *(*shown, *columns, TimeElapsedColumn()),
        console=Console(stderr=True),
        disable=hidden or not sys.stderr.isatty(),
        transient=True,
    ) as bars:
        yield bars
