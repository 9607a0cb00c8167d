-- Everything that the embedded store keeps, in the same tables and columns, and what several servers
-- need to share it. Texts are ordered by their bytes, which is the order of code points in UTF-8.

-- One row, the cluster's write lock: whoever holds it has the turn to write. The numbers only grow.
-- They are kept apart from the rows that they number, so that deleting the newest row cannot make a
-- number come back.
CREATE TABLE counters (
    id bigint PRIMARY KEY CHECK (id = 1),
    next_position bigint NOT NULL,
    next_stream bigint NOT NULL,
    last_ms bigint NOT NULL,
    turn bigint NOT NULL,
    next_chunk bigint NOT NULL,
    last_subscription bigint NOT NULL  -- the highest number that a subscription ever had
) WITH (fillfactor = 10, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);
INSERT INTO counters VALUES (1, 0, 1, 0, 0, 1, 0);

-- What each turn changed, for the nodes that follow: rows of long ago are dropped by the upkeep.
CREATE TABLE turns (
    turn bigint PRIMARY KEY,
    node text COLLATE "C" NOT NULL,
    at_ms bigint NOT NULL,
    head bigint NOT NULL,              -- the newest position after it
    streams bigint[] NOT NULL,
    created bigint[] NOT NULL,
    removed bigint[] NOT NULL
);

-- Servers that share this database. One of them `leads`: it alone does what nobody asked for.
CREATE TABLE nodes (
    node text COLLATE "C" PRIMARY KEY,
    url text COLLATE "C" NOT NULL,
    started_ms bigint NOT NULL,
    seen_ms bigint NOT NULL,
    leads boolean NOT NULL DEFAULT false
);

-- One row per incarnation of a stream. `state`: 0 live, 1 soft-deleted (its forks still read it),
-- 2 deleted (its rows wait for the log's retention to end). An append changes no indexed column, so
-- that with room on the page no index is written.
CREATE TABLE streams (
    id bigint PRIMARY KEY,
    path text COLLATE "C" NOT NULL,
    state bigint NOT NULL,
    content_type text COLLATE "C" NOT NULL,
    created_ms bigint NOT NULL,
    updated_ms bigint NOT NULL,
    ttl_s bigint,
    expires_at_ms bigint,
    deadline_ms bigint,                -- never before the true deadline; see Lifetime.stored_deadline_ms
    tail_messages bigint NOT NULL,
    tail_bytes bigint NOT NULL,
    first_messages bigint NOT NULL,
    first_bytes bigint NOT NULL,
    closed boolean NOT NULL,
    closed_by text COLLATE "C",        -- JSON: producer id, epoch, seq
    seq text COLLATE "C",              -- the last Stream-Seq
    fork text COLLATE "C",             -- JSON: source id, source path, asked, messages, bytes
    segments text COLLATE "C",         -- JSON: [[stream id, [messages, bytes]], ...], inherited rows in order
    forks_count bigint NOT NULL,
    ended_ms bigint,                   -- when it was deleted, for the purge
    retention text COLLATE "C"         -- JSON: age in seconds, bytes, messages
) WITH (fillfactor = 50);
CREATE UNIQUE INDEX streams_by_path ON streams (path) WHERE state < 2;
CREATE INDEX streams_deleted_by_path ON streams (path) WHERE state = 2;
CREATE INDEX streams_by_deadline ON streams (deadline_ms) WHERE state = 0 AND deadline_ms IS NOT NULL;
CREATE INDEX streams_ended ON streams (ended_ms) WHERE state = 2;
CREATE INDEX streams_retained ON streams (id) WHERE state = 0 AND retention IS NOT NULL;
CREATE INDEX streams_forked ON streams (id) WHERE fork IS NOT NULL AND state < 2;

-- One row per append, in the order of all appends: the key is the position of its first message.
-- `kind`: 0 messages, 1 closed, 2 deleted, 3 expired, 4 truncated. Data is here, or in the staged chunk
-- that `chunk` names.
CREATE TABLE log (
    position bigint PRIMARY KEY,
    stream bigint NOT NULL,
    kind bigint NOT NULL,
    start_bytes bigint,
    version bigint,
    count bigint NOT NULL,
    size bigint NOT NULL,
    at_ms bigint NOT NULL,
    producer text COLLATE "C",
    epoch bigint,
    producer_seq bigint,
    previous bigint,                   -- the position of the producer's batch before, in the same epoch
    digest bytea,                      -- what a repeated request is compared with
    chunk bigint,
    lengths bytea,
    data bytea
);
CREATE UNIQUE INDEX log_by_stream ON log (stream, start_bytes) WHERE kind = 0;
CREATE INDEX log_markers ON log (stream, position) WHERE kind <> 0;

-- Staged data: written ahead of the commit that makes it messages, numbered relative to its part.
CREATE TABLE chunks (
    id bigint PRIMARY KEY,
    txn text COLLATE "C" NOT NULL,
    part text COLLATE "C" NOT NULL,
    ordinal bigint NOT NULL,
    count bigint NOT NULL,
    size bigint NOT NULL,
    staged_ms bigint NOT NULL,
    lengths bytea,
    data bytea NOT NULL,
    digest bytea,
    UNIQUE (txn, part, ordinal)
);

-- Compressing costs every writer and every reader more than it saves: what is large lies outside
-- the row as it came.
ALTER TABLE log ALTER COLUMN data SET STORAGE EXTERNAL;
ALTER TABLE log ALTER COLUMN lengths SET STORAGE EXTERNAL;
ALTER TABLE chunks ALTER COLUMN data SET STORAGE EXTERNAL;
ALTER TABLE chunks ALTER COLUMN lengths SET STORAGE EXTERNAL;

-- One row per staged part. `committed` is the position at which it became messages, NULL before.
CREATE TABLE parts (
    txn text COLLATE "C" NOT NULL,
    part text COLLATE "C" NOT NULL,
    media_type text COLLATE "C" NOT NULL,
    staged_ms bigint NOT NULL,
    committed bigint,
    PRIMARY KEY (txn, part)
);
CREATE INDEX parts_waiting ON parts (staged_ms) WHERE committed IS NULL;

-- `principal` opened the epoch, or retook it; empty without authorization. `claim`: 0 none, 1 open,
-- 2 released, 3 completed; see protocol/claims.py. `recent` holds the newest batches, packed: one look
-- tells all that a repeated request is compared with.
CREATE TABLE producers (
    stream bigint NOT NULL,
    id text COLLATE "C" NOT NULL,
    epoch bigint NOT NULL,
    seq bigint NOT NULL,
    first bytea NOT NULL,              -- offset and digest of seq 0, packed
    position bigint NOT NULL,          -- of its newest batch: the older ones hang on log.previous
    updated_ms bigint NOT NULL,
    principal text COLLATE "C" NOT NULL DEFAULT '',
    claim bigint NOT NULL DEFAULT 0,
    recent bytea NOT NULL,
    PRIMARY KEY (stream, id)
) WITH (fillfactor = 50);
CREATE INDEX producers_claimed ON producers (principal) WHERE claim = 1;

-- A producer's recent batches whose rows were purged: as many as are still compared with repeated
-- requests, packed like the producer's first, the newest last. That one is `seq` of `epoch`.
CREATE TABLE remembered (
    stream bigint NOT NULL,
    producer text COLLATE "C" NOT NULL,
    epoch bigint NOT NULL,
    seq bigint NOT NULL,
    batches bytea NOT NULL,
    PRIMARY KEY (stream, producer)
);

-- The shortest time without an append after which a producer was ever forgotten; null when none was.
-- It tells a producer that began again from one whose batches were stored twice.
CREATE TABLE forgetting (
    id bigint PRIMARY KEY CHECK (id = 1),
    shortest_ms bigint
);
INSERT INTO forgetting VALUES (1, NULL);

-- A key belongs to a principal and a stream's incarnation; stream 0 holds the keys of whole commits.
-- `answer` is what a commit answered, kept to be answered again.
CREATE TABLE keys (
    stream bigint NOT NULL,
    principal text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    digest bytea NOT NULL,
    start_messages bigint NOT NULL,
    start_bytes bigint NOT NULL,
    tail_messages bigint NOT NULL,
    tail_bytes bigint NOT NULL,
    closed boolean NOT NULL,
    position bigint NOT NULL,
    created_ms bigint NOT NULL,
    expires_ms bigint,
    answer bytea,
    PRIMARY KEY (stream, principal, key)
);
CREATE INDEX keys_by_expiry ON keys (expires_ms) WHERE expires_ms IS NOT NULL;

-- What was purged after the log's retention: a record for each piece of a stream that went in one
-- transaction. `runs` holds position and length of each run of positions, as packed differences, so that
-- a reader is told of a loss only when rows it asked for are gone.
CREATE TABLE purges (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    stream bigint NOT NULL,
    path text COLLATE "C" NOT NULL,
    first bigint NOT NULL,
    last bigint NOT NULL,
    runs bytea NOT NULL
);
CREATE INDEX purges_by_last ON purges (last, first);
CREATE INDEX purges_by_path ON purges (path, last);

-- Rows and payload bytes of each 4096 positions, for those that are full: a row counts where it starts.
-- Written behind the head by the upkeep, corrected in the transaction of a purge.
CREATE TABLE log_buckets (
    bucket bigint PRIMARY KEY,
    rows bigint NOT NULL,
    bytes bigint NOT NULL
);

-- Truncations whose rows are still there, for the log: a row for each marker, until it is purged.
CREATE TABLE truncations (
    position bigint PRIMARY KEY,       -- of the marker
    stream bigint NOT NULL,
    at_ms bigint NOT NULL
);
CREATE INDEX truncations_by_stream ON truncations (stream, position);

-- Subscriptions, one row per incarnation. From `generation` on, the columns are the state of the
-- current wake: without a `wake_id` there is none. `next_attempt_ms` is when it is (again) to be
-- delivered; `lease_until_ms` counts only while that is null. `principal` is empty without
-- authorization.
CREATE TABLE subscriptions (
    id bigint PRIMARY KEY,
    name text COLLATE "C" NOT NULL UNIQUE,
    config text COLLATE "C" NOT NULL,  -- JSON, in its canonical form
    base_url text COLLATE "C" NOT NULL, -- scheme and host that the client used: callbacks go there
    created_ms bigint NOT NULL,
    generation bigint NOT NULL,
    wake_id text COLLATE "C",
    holder text COLLATE "C",
    lease_until_ms bigint,
    attempts bigint NOT NULL,
    next_attempt_ms bigint,
    snapshot text COLLATE "C" NOT NULL, -- JSON: [[path, stream id, messages, bytes], ...]
    principal text COLLATE "C" NOT NULL DEFAULT ''
);

-- A stream that a subscription watches, and the cursor in it. `stream` is the incarnation that the
-- cursor belongs to, null for an explicit link whose stream does not exist.
CREATE TABLE links (
    subscription bigint NOT NULL,
    path text COLLATE "C" NOT NULL,
    explicit boolean NOT NULL,
    glob boolean NOT NULL,
    stream bigint,
    acked_messages bigint NOT NULL,
    acked_bytes bigint NOT NULL,
    PRIMARY KEY (subscription, path)
);

-- Secrets of all servers together: the webhook signing key, the key of callback tokens.
CREATE TABLE secrets (
    name text COLLATE "C" PRIMARY KEY,
    value bytea NOT NULL,
    created_ms bigint NOT NULL
);

-- Writers: who publishes numbered batches by commits, in which run, and how far it came. `batch` and
-- `digest` are written by the commit that holds the batch's messages, in its transaction.
CREATE TABLE writers (
    name text COLLATE "C" PRIMARY KEY,
    principal text COLLATE "C" NOT NULL, -- whose it is; empty without authorization
    query text COLLATE "C" NOT NULL,
    epoch bigint NOT NULL,
    batch bigint,
    digest text COLLATE "C",
    opened_ms bigint NOT NULL,
    updated_ms bigint NOT NULL
);

-- Commits too large for one transaction: decided whole, written down, then carried out in slices.
-- Positions from `first` up to `last` belong to the commit, and while it is under way nobody reads the
-- log beyond them. `state`: 0 it is being decided and may still come to nothing; 1 it is certain, and
-- its slices are on their way into the tables; 2 it was finished at a start, and whoever watches streams
-- has yet to be told.
CREATE TABLE large_commits (
    first bigint PRIMARY KEY,
    last bigint NOT NULL,
    state bigint NOT NULL
);

-- What each slice writes: rows of the other tables, as MessagePack. A slice goes in the transaction
-- that carries it out; only at a start it stays, marked, until the watchers know of it.
CREATE TABLE large_slices (
    first bigint NOT NULL,             -- of its commit
    number bigint NOT NULL,
    carried bigint NOT NULL,
    content bytea NOT NULL,
    PRIMARY KEY (first, number)
);
ALTER TABLE large_slices ALTER COLUMN content SET STORAGE EXTERNAL;
