-- Streams, their messages in one global log, and their producers.

-- One row: the numbers that only grow. They are kept apart from the rows that they number, so that
-- deleting the newest row cannot make a number come back.
CREATE TABLE counters (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    next_position INTEGER NOT NULL,
    next_stream INTEGER NOT NULL,
    last_ms INTEGER NOT NULL
) STRICT;
INSERT INTO counters VALUES (1, 0, 1, 0);

-- One row per incarnation of a stream. `state`: 0 live, 1 soft-deleted (its forks still read it),
-- 2 deleted (its rows wait for the log's retention to end).
CREATE TABLE streams (
    id INTEGER PRIMARY KEY,
    path TEXT NOT NULL,
    state INTEGER NOT NULL,
    content_type TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    updated_ms INTEGER NOT NULL,
    ttl_s INTEGER,
    expires_at_ms INTEGER,
    deadline_ms INTEGER,          -- never before the true deadline; see Lifetime.stored_deadline_ms
    tail_messages INTEGER NOT NULL,
    tail_bytes INTEGER NOT NULL,
    first_messages INTEGER NOT NULL,
    first_bytes INTEGER NOT NULL,
    closed INTEGER NOT NULL,
    closed_by TEXT,               -- JSON: producer id, epoch, seq
    seq TEXT,                     -- the last Stream-Seq
    fork TEXT,                    -- JSON: source id, source path, asked, messages, bytes
    segments TEXT,                -- JSON: [[stream id, [messages, bytes]], ...], inherited rows in order
    forks_count INTEGER NOT NULL,
    ended_ms INTEGER              -- when it was deleted, for the purge
) STRICT;
CREATE UNIQUE INDEX streams_by_path ON streams (path) WHERE state < 2;
CREATE INDEX streams_by_deadline ON streams (deadline_ms) WHERE state = 0 AND deadline_ms IS NOT NULL;
CREATE INDEX streams_ended ON streams (ended_ms) WHERE state = 2;

-- One row per append, in the order of all appends: the key is the position of its first message.
-- `kind`: 0 messages, 1 closed, 2 deleted, 3 expired, 4 truncated. Data is here, or in the staged chunk that `chunk` names.
CREATE TABLE log (
    position INTEGER PRIMARY KEY,
    stream INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    start_bytes INTEGER,
    version INTEGER,
    count INTEGER NOT NULL,
    size INTEGER NOT NULL,
    at_ms INTEGER NOT NULL,
    producer TEXT,
    epoch INTEGER,
    producer_seq INTEGER,
    previous INTEGER,             -- the position of the producer's batch before, in the same epoch
    digest BLOB,                  -- what a repeated request is compared with
    chunk INTEGER,
    lengths BLOB,
    data BLOB
) STRICT;
CREATE UNIQUE INDEX log_by_stream ON log (stream, start_bytes) WHERE kind = 0;

-- Staged data: written ahead of the commit that makes it messages, numbered relative to its part.
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY,
    txn TEXT NOT NULL,
    part TEXT NOT NULL,
    ordinal INTEGER NOT NULL,
    count INTEGER NOT NULL,
    size INTEGER NOT NULL,
    staged_ms INTEGER NOT NULL,
    lengths BLOB,
    data BLOB NOT NULL,
    UNIQUE (txn, part, ordinal)
) STRICT;

CREATE TABLE producers (
    stream INTEGER NOT NULL,
    id TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    first BLOB NOT NULL,          -- offset and digest of seq 0, packed
    position INTEGER NOT NULL,    -- of its newest batch: the older ones hang on log.previous
    updated_ms INTEGER NOT NULL,
    PRIMARY KEY (stream, id)
) STRICT, WITHOUT ROWID;

-- Secrets of this data folder: the webhook signing key, the key of callback tokens.
CREATE TABLE secrets (
    name TEXT PRIMARY KEY,
    value BLOB NOT NULL,
    created_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
