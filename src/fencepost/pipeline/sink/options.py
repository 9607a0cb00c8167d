"""The options of a write, checked before any row moves.

| option | default | |
|---|---|---|
| `stream` | | the stream to write to; without it a column `stream` says where each row goes |
| `sinkName` | the stream | who writes: one name for each sink of each query |
| `format` | `value` with a column of that name, else `json` | how rows become messages |
| `contentType` | `application/json` | the type of the streams |
| `autoCreate` | `false` | make streams that are not there |
| `chunkBytes` | 1 MiB | bytes of one upload, 1 MiB at most |
| `onReplayMismatch` | see below | `warn`, `fail`: what other rows in a repeated batch do |
| `allowNewCheckpoint` | `false` | let a query without its old checkpoint take over the name |
| `jobId` | | batch writes: a name for this write, so that it happens once |

Without `onReplayMismatch` a batch that comes again with other rows fails the query; but if the
positions that it was read from are known and the same, it is warned of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql.types import BinaryType, StringType, StructType

from fencepost.client.operations import is_json
from fencepost.client.settings import JSON
from fencepost.pipeline.connection import Connection, connection_of
from fencepost.pipeline.errors import OptionError
from fencepost.pipeline.options import Options
from fencepost.protocol.globs import BadGlob, parse_glob

CHUNK_BYTES_MAX = 1 << 20
CHUNK_BYTES_MIN = 1024
NAME_BYTES_MAX = 256
FORMATS = ("value", "json", "state")
STATE_COLUMNS = ("type", "key", "operation", "value", "old_value", "txid", "timestamp")
STATE_REQUIRED = ("type", "key", "operation")
_CONTENT_TYPE = re.compile(r"[^\s/;]+/[^\s/;]+(;[^\r\n]*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """Everything about a write that is known before its rows."""

    connection: Connection
    stream: str | None
    """The only target, or None when a column names the targets."""
    sink_name: str | None
    checkpoint: str | None
    """The option `checkpointLocation` of a streaming write, if it was given."""
    format: str
    content_type: str
    auto_create: bool
    chunk_bytes: int
    on_mismatch: str
    """`warn` or `fail`; `auto` when the option was not given."""
    allow_new: bool
    job_id: str | None
    columns: tuple[str, ...]
    """The columns that become the message, without `stream`."""

    @property
    def json(self) -> bool:
        return is_json(self.content_type)


def sink_options(
    given: Mapping[str, str], schema: StructType, overwrite: bool, *, streaming: bool
) -> SinkOptions:
    """The options of a write of rows of `schema`, or an error that names what is wrong."""
    if overwrite:
        how = "outputMode" if streaming else "mode"
        raise OptionError(f'streams only grow: write with {how}("append")')
    options = Options(given)
    columns = schema.fieldNames()
    stream = _path(options, "stream")
    if stream is not None and "*" in stream:
        raise options.refusal("stream", "one path; a column stream sends rows to many streams")
    if "path" in options:
        raise OptionError("there is no option path: give the option stream, and save() nothing")
    _check_target(stream, schema)
    payload = tuple(name for name in columns if name != "stream")
    sink_name = _path(options, "sinkName")
    if sink_name is not None and len(sink_name.encode()) > NAME_BYTES_MAX:
        raise options.refusal("sinkName", f"at most {NAME_BYTES_MAX} bytes long")
    if streaming and stream is None and sink_name is None:
        raise OptionError(
            "option sinkName is missing: rows go to many streams, so the sink needs a name;"
            " any text that stays the same when the query is started again"
        )
    content_type = options.text("contentType", JSON)
    assert content_type is not None
    if _CONTENT_TYPE.fullmatch(content_type) is None:
        raise options.refusal("contentType", f"a type like {JSON} or text/plain")
    default = "value" if "value" in payload else "json"
    kind = options.choice("format", FORMATS, default)
    chunk_bytes = options.integer(
        "chunkBytes", CHUNK_BYTES_MAX, least=CHUNK_BYTES_MIN, most=CHUNK_BYTES_MAX
    )
    assert chunk_bytes is not None
    found = SinkOptions(
        connection=connection_of(options),
        stream=stream,
        sink_name=sink_name,
        checkpoint=options.text("checkpointLocation") if streaming else None,
        format=kind,
        content_type=content_type,
        auto_create=options.flag("autoCreate", False),
        chunk_bytes=chunk_bytes,
        on_mismatch=(
            options.choice("onReplayMismatch", ("warn", "fail"), "warn")
            if "onReplayMismatch" in options
            else "auto"
        ),
        allow_new=options.flag("allowNewCheckpoint", False),
        job_id=None if streaming else _path(options, "jobId"),
        columns=payload,
    )
    options.refuse_others({"jobid": " for a stream: its checkpoint is what names its batches"})
    _check_columns(found, schema)
    return found


def _path(options: Options, name: str) -> str | None:
    """A path, or a name that the server takes as one."""
    value = options.text(name)
    glob = None if value is None else parse_glob(value)
    if isinstance(glob, BadGlob):
        raise options.refusal(name, f"written like a path, orders/eu: {glob.detail}")
    return value


def _check_target(stream: str | None, schema: StructType) -> None:
    names = schema.fieldNames()
    if len(set(names)) != len(names):
        raise OptionError(f"two columns have the same name: {', '.join(sorted(names))}")
    if stream is None and "stream" not in names:
        raise OptionError("say where rows go: give the option stream, or rows a column stream")
    if stream is not None and "stream" in names:
        raise OptionError(
            "rows have a column stream and the option stream is given too: drop one of them"
        )
    if stream is None and not isinstance(schema["stream"].dataType, StringType):
        raise OptionError("the column stream must be a string: the path of a stream")


def _check_columns(options: SinkOptions, schema: StructType) -> None:
    columns = options.columns
    if options.format != "value" and not options.json:
        raise OptionError(
            f"option format is {options.format!r}, which makes JSON, and contentType is"
            f" {options.content_type!r}: use format value with a column value"
        )
    if options.format != "value" and '"variant"' in schema.json():
        raise OptionError("a column of type variant has no JSON here: make it text with to_json()")
    if options.format == "value":
        if columns != ("value",):
            others = ", ".join(name for name in columns if name != "value") or "none"
            raise OptionError(
                "format value writes the column value and nothing else: the other columns are"
                f" {others}; select what is to be written, or set format to json"
            )
        if not isinstance(schema["value"].dataType, StringType | BinaryType):
            raise OptionError("format value needs a column value of type string or binary")
    if options.format == "state":
        missing = [name for name in STATE_REQUIRED if name not in columns]
        unknown = [name for name in columns if name not in STATE_COLUMNS]
        if missing or unknown:
            raise OptionError(
                f"format state takes the columns {', '.join(STATE_COLUMNS)}, of which"
                f" {', '.join(STATE_REQUIRED)} must be there; missing: {', '.join(missing) or '-'},"
                f" unknown: {', '.join(unknown) or '-'}"
            )
