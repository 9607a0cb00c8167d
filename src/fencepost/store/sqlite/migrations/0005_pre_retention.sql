-- Retention: streams that begin later than they did, and what is kept of what they lost.

ALTER TABLE streams ADD COLUMN retention TEXT;  -- JSON: age in seconds, bytes, messages

CREATE INDEX streams_retained ON streams (id) WHERE state = 0 AND retention IS NOT NULL;
CREATE INDEX streams_forked ON streams (id) WHERE fork IS NOT NULL AND state < 2;

-- Truncations whose rows are still there, for the log: a row for each marker, until it is purged.
CREATE TABLE truncations (
    position INTEGER PRIMARY KEY, -- of the marker
    stream INTEGER NOT NULL,
    at_ms INTEGER NOT NULL
) STRICT;
CREATE INDEX truncations_by_stream ON truncations (stream, position);

-- A producer's recent batches whose rows were purged: as many as are still compared with repeated
-- requests, packed like the producer's first, the newest last. That one is `seq` of `epoch`.
CREATE TABLE remembered (
    stream INTEGER NOT NULL,
    producer TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    batches BLOB NOT NULL,
    PRIMARY KEY (stream, producer)
) STRICT, WITHOUT ROWID;

-- The shortest time without an append after which a producer was ever forgotten; null when none was.
-- It tells a producer that began again from one whose batches were stored twice.
CREATE TABLE forgetting (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    shortest_ms INTEGER
) STRICT;
INSERT INTO forgetting VALUES (1, NULL);
