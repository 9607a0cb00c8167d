-- The global log: finding rows by stream, knowing what was purged, and weighing ranges.

-- Markers of a stream; appends do not touch this index.
CREATE INDEX log_markers ON log (stream) WHERE kind <> 0;

-- Deleted incarnations by path: their rows are still in the log.
CREATE INDEX streams_deleted_by_path ON streams (path) WHERE state = 2;

-- What was purged after the log's retention: a record for each piece of a stream that went in one
-- transaction. `runs` holds position and length of each run of positions, as packed differences, so that
-- a reader is told of a loss only when rows it asked for are gone.
CREATE TABLE purges (
    id INTEGER PRIMARY KEY,
    stream INTEGER NOT NULL,
    path TEXT NOT NULL,
    first INTEGER NOT NULL,
    last INTEGER NOT NULL,
    runs BLOB NOT NULL
) STRICT;
CREATE INDEX purges_by_last ON purges (last, first);
CREATE INDEX purges_by_path ON purges (path, last);

-- Rows and payload bytes of each 4096 positions, for those that are full: a row counts where it starts.
-- Written behind the head by the upkeep, corrected in the transaction of a purge.
CREATE TABLE log_buckets (
    bucket INTEGER PRIMARY KEY,
    rows INTEGER NOT NULL,
    bytes INTEGER NOT NULL
) STRICT;
