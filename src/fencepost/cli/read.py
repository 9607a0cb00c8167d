"""`fencepost read` and `fencepost tail`: the messages of a stream on stdout.

JSON messages come one on a line, byte for byte as they were appended; text and bytes come as they
are. `tail` finds the last messages through the log, so that a long stream is not read for the sake
of its end, and then follows through lost connections and restarts of the server.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import msgspec
import typer

import fencepost
from fencepost.cli.options import TYPES, AsJson, Path, Patience, Token, Url
from fencepost.cli.render import (
    USAGE,
    CommandError,
    Sink,
    batch_line,
    leave_when_unread,
    message_line,
    talking,
    tell_of_interruptions,
)

PLAN_PARTS = 256
MARKERS_ALLOWED_FOR = 64
"""Rows of the log beyond those wanted, because some say only that a stream was cut or closed."""

From = Annotated[
    str | None,
    typer.Option("--from", help="Offset to begin at; -1 is the start, now the tail."),
]
AsRaw = Annotated[bool, typer.Option("--raw", help="Bytes as HTTP gives them, also to a terminal.")]

Emit = Callable[[fencepost.Batch[Any]], None]


def read(
    stream: Path,
    offset: From = None,
    count: Annotated[
        int | None, typer.Option("-n", "--count", help="At most so many messages.", min=1)
    ] = None,
    raw: AsRaw = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Print what a stream holds now: JSON messages one on a line, anything else as it is.

    With --json each line is a batch with the offset to go on from. With --raw a JSON stream is one
    array.

    Examples:

      fencepost read orders | jq .total
      fencepost read logo --raw > logo.png
    """
    with talking(url, token, as_json=as_json) as client:
        found = client.stream(stream)
        content_type = found.head().content_type
        is_json = _is_json(content_type)
        _check_terminal(content_type, raw or as_json)
        if count is not None and not is_json:
            raise CommandError(f"-n counts JSON messages; {stream} holds {content_type}", USAGE)
        sink = Sink(at_once=False)
        batches: Iterable[fencepost.Batch[Any]] = found.read(
            offset=offset, type=msgspec.Raw
        ).batches()
        if count is not None:
            batches = _first(batches, count)
        if raw and is_json and not as_json:
            _array(sink, batches)
        else:
            emit = _emitter(sink, is_json=is_json, as_json=as_json)
            for batch in batches:
                emit(batch)
        sink.flush()


def tail(
    stream: Path,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Wait for more, until the stream is closed.")
    ] = False,
    count: Annotated[
        int, typer.Option("-n", "--count", help="Begin with the last so many messages.", min=0)
    ] = 10,
    offset: From = None,
    raw: AsRaw = False,
    patience: Patience = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Print the end of a stream, and with -f what comes, through restarts of the server.

    Examples:

      fencepost tail orders
      fencepost tail -f -n 0 orders | jq .total
    """
    with talking(url, token, as_json=as_json) as client:
        found = client.stream(stream)
        described = found.head()
        _check_terminal(described.content_type, raw or as_json)
        sink = Sink(at_once=True)
        emit = _emitter(sink, is_json=_is_json(described.content_type), as_json=as_json)
        if follow:
            leave_when_unread()
            tell_of_interruptions()
        if offset is None:
            offset = described.next_offset if count == 0 else _last(client, stream, count, emit)
        reading = (
            found.follow(offset=offset, patience=patience, type=msgspec.Raw)
            if follow
            else found.read(offset=offset, type=msgspec.Raw)
        )
        for batch in reading.batches():
            emit(batch)


def _is_json(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == TYPES["json"]


def _check_terminal(content_type: str, told: bool) -> None:
    text = _is_json(content_type) or content_type.lower().startswith("text/")
    if not text and not told and sys.stdout.isatty():
        raise CommandError(
            f"the stream holds {content_type}, which a terminal may not take well:"
            " send it to a file or a pipe, or say --raw",
            USAGE,
        )


def _emitter(sink: Sink, *, is_json: bool, as_json: bool) -> Emit:
    def lines(batch: fencepost.Batch[Any]) -> None:
        sink.write(b"".join(map(message_line, batch.messages)))

    if as_json:
        return lambda batch: sink.write(batch_line(batch, is_json=is_json))
    return lines if is_json else lambda batch: sink.write(batch.data)


def _array(sink: Sink, batches: Iterable[fencepost.Batch[Any]]) -> None:
    """All messages as one JSON array, without holding it in memory."""
    before = b"["
    for batch in batches:
        sink.write(before + b",".join(map(bytes, batch.messages)))
        before = b","
    sink.write(b"]" if before == b"," else b"[]")


def _first(batches: Iterable[fencepost.Batch[Any]], count: int) -> Iterable[fencepost.Batch[Any]]:
    for batch in batches:
        if len(batch.messages) > count:
            # Going on from its end would miss messages, so it has none.
            cut = batch.messages[:count]
            yield msgspec.structs.replace(batch, messages=cut, next_offset="", closed=False)
            return
        yield batch
        count -= len(batch.messages)
        if not count:
            return


def _last(client: fencepost.Client, path: str, count: int, emit: Emit) -> str:
    """Where the last `count` messages begin; or, having shown them, where to go on after them."""
    try:
        found = _found_in_log(client, path, count)
    except fencepost.ResponseError:
        found = None  # a server without a log, or rows that left it
    if found is not None:
        return found
    reading = client.stream(path).read(type=msgspec.Raw)
    kept: deque[fencepost.Batch[Any]] = deque()
    total = 0
    for batch in reading.batches():
        kept.append(batch)
        total += len(batch.messages)
        while total - len(kept[0].messages) >= count:
            total -= len(kept.popleft().messages)
    if total > count:
        first = kept.popleft()
        kept.appendleft(msgspec.structs.replace(first, messages=first.messages[total - count :]))
    for batch in kept:
        emit(batch)
    return reading.offset


def _found_in_log(client: fencepost.Client, path: str, count: int) -> str | None:
    """The offset of the message that is `count` from the end; None when the log cannot tell."""
    info = next((one for one in client.streams(match=path) if one.path == path), None)
    # What a fork inherited is in the log under its source only.
    if info is None or info.forked_from is not None or info.version < count:
        return None
    plan = client.plan(streams=[path], parts=PLAN_PARTS)
    after, rows = plan.after, 0
    for split in reversed(plan.splits):
        after, rows = split.after, rows + split.rows
        if rows >= count + MARKERS_ALLOWED_FOR:
            break
    offsets: deque[str] = deque(maxlen=count)
    for entry in client.log(after=after, until=plan.until, streams=[path]):
        if entry.marker == "truncated":
            kept = [offset for offset in offsets if offset >= entry.offset]
            offsets = deque(kept, maxlen=count)
        elif entry.marker is None and entry.incarnation == info.id:
            offsets.append(entry.offset)
    return offsets[0] if len(offsets) == count else None
