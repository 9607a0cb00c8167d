"""The options of a read, checked as a whole before anything is asked of the server.

| option | batch | stream | |
|---|---|---|---|
| `stream`, `streams`, `match` | yes | yes | one of them: a path, several, a pattern |
| `startingPosition` | `earliest`, a position | and `latest` | the first position to read |
| `startingTimestamp` | yes | yes | the first time to read |
| `endingPosition`, `endingTimestamp` | yes | | the last position; the first time not to read |
| `maxRowsPerTrigger`, `maxBytesPerTrigger` | | yes | how much a micro-batch takes |
| `minRowsPerTrigger` | | yes | how many rows a micro-batch waits for |
| `maxTriggerDelay` | | yes | how long it waits for them |
| `minPartitions` | yes | yes | at least so many tasks |
| `failOnDataLoss` | yes | yes | whether rows that are gone are an error |
| `waitMs` | | yes | how long an idle trigger waits for news |
| `format`, `schema`, `mode` | yes | yes | how messages become columns |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pyspark.sql.types import StructType

from fencepost.pipeline.connection import Connection, connection_of
from fencepost.pipeline.errors import OptionError
from fencepost.pipeline.options import SELECTING, Options, Selection, selection_of, whole_number
from fencepost.pipeline.source.formats import Shape, shape_of
from fencepost.protocol.logs import BEFORE_ALL, POSITION_MAX, parse_instant_ms

PARTITIONS_MAX = 256
"""The parts that a server plans at once (its `plan_parts_max`)."""
EARLIEST = "earliest"
LATEST = "latest"

_INSTANT = "a time like 2026-11-16T15:00:00Z, or milliseconds since 1970"
_HINTS = {
    "path": ": streams are named by the option stream, streams or match; load() takes no path"
}
_STREAM_ONLY = (
    "maxRowsPerTrigger",
    "maxBytesPerTrigger",
    "minRowsPerTrigger",
    "maxTriggerDelay",
    "waitMs",
)
DELAY_MS_DEFAULT = 15 * 60 * 1_000
"""As Spark's source for Kafka has it."""
_BATCH_ONLY = ("endingPosition", "endingTimestamp")


@dataclass(frozen=True, slots=True)
class Bound:
    """One end of a range: a position, a time, or neither.

    As a start, `position` is the one to read after, -1 for everything; as an end, the last one to
    read. None without a time is the head of the log.
    """

    position: int | None = None
    timestamp_ms: int | None = None

    @property
    def is_head(self) -> bool:
        return self.position is None and self.timestamp_ms is None


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Everything a read is made of."""

    connection: Connection
    selection: Selection
    start: Bound
    end: Bound
    rows_max: int | None
    bytes_max: int | None
    rows_min: int | None
    delay_seconds_max: float
    """How long rows wait until there are `rows_min` of them."""
    partitions_min: int
    fail_on_data_loss: bool
    wait_seconds: float
    shape: Shape


def source_options(
    given: Mapping[str, str], schema: StructType | None = None, *, streaming: bool | None = None
) -> SourceOptions:
    """Read the options; `streaming` is None while it is not known which kind of read it will be."""
    options = Options(given)
    options.know(*SELECTING)
    found = SourceOptions(
        connection=connection_of(options),
        selection=Selection(),
        start=_start(options, streaming),
        end=_end(options),
        rows_max=options.integer("maxRowsPerTrigger", least=1, most=POSITION_MAX),
        bytes_max=options.size("maxBytesPerTrigger"),
        rows_min=options.integer("minRowsPerTrigger", least=1, most=POSITION_MAX),
        delay_seconds_max=options.duration("maxTriggerDelay", DELAY_MS_DEFAULT),
        partitions_min=options.integer("minPartitions", 1, least=1, most=PARTITIONS_MAX) or 1,
        fail_on_data_loss=options.flag("failOnDataLoss", True),
        wait_seconds=options.seconds("waitMs", 1_000),
        shape=shape_of(options, schema),
    )
    # Before a missing selection is reported: its option may be misspelt.
    options.refuse_others(_HINTS)
    found = replace(found, selection=selection_of(options))
    if streaming is not None:
        for name in _BATCH_ONLY if streaming else _STREAM_ONLY:
            if name in options:
                kind, other = ("readStream", "read") if streaming else ("read", "readStream")
                raise OptionError(f"option {name} is for {other}, not for {kind}: leave it out")
    if found.rows_min is None and "maxTriggerDelay" in options:
        raise OptionError("option maxTriggerDelay needs minRowsPerTrigger: how many to wait for")
    if found.rows_min is not None and found.rows_min > (found.rows_max or found.rows_min):
        raise options.refusal("minRowsPerTrigger", f"at most maxRowsPerTrigger ({found.rows_max})")
    start, end = found.start.position, found.end.position
    if start is not None and end is not None and end < start:
        raise options.refusal("endingPosition", f"at least startingPosition ({start + 1})")
    return found


def _start(options: Options, streaming: bool | None) -> Bound:
    position = options.text("startingPosition")
    timestamp = _timestamp(options, "startingTimestamp")
    if position is None:
        # A stream begins now unless told otherwise, as Spark's own sources of messages do; a batch
        # with everything.
        nothing_said = Bound() if streaming else Bound(BEFORE_ALL)
        return nothing_said if timestamp is None else Bound(timestamp_ms=timestamp)
    if timestamp is not None:
        raise OptionError("give startingPosition or startingTimestamp, not both")
    word = position.strip().lower()
    legal = (
        f"{EARLIEST} or a position" if streaming is False else f"{EARLIEST}, {LATEST} or a position"
    )
    if word == EARLIEST:
        return Bound(BEFORE_ALL)
    if word == LATEST and streaming is not False:
        return Bound()
    number = whole_number(word)
    if number is None or not 0 <= number <= POSITION_MAX:
        raise options.refusal("startingPosition", f"{legal} (a whole number from 0 on)")
    return Bound(number - 1)


def _end(options: Options) -> Bound:
    position = options.text("endingPosition")
    timestamp = _timestamp(options, "endingTimestamp")
    if position is None:
        return Bound(timestamp_ms=timestamp)
    if timestamp is not None:
        raise OptionError("give endingPosition or endingTimestamp, not both")
    if position.strip().lower() == LATEST:
        return Bound()
    number = whole_number(position)
    if number is None or not 0 <= number <= POSITION_MAX:
        raise options.refusal(
            "endingPosition", f"{LATEST} or a position (a whole number from 0 on)"
        )
    return Bound(number)


def _timestamp(options: Options, name: str) -> int | None:
    text = options.text(name)
    if text is None:
        return None
    instant_ms = parse_instant_ms(text.strip())
    if instant_ms is None:
        raise options.refusal(name, _INSTANT)
    return instant_ms
