-- The history of writers: one row for each batch that was published, written by the commit that holds
-- the batch's messages. The positions that the batch was read from are those after `range_after`, up
-- to `range_until`; without `range_until` they are not known.
CREATE TABLE writer_history (
    name TEXT NOT NULL,
    batch INTEGER NOT NULL,
    range_after INTEGER,
    range_until INTEGER,
    digest TEXT,
    published_ms INTEGER NOT NULL,
    PRIMARY KEY (name, batch)
) STRICT, WITHOUT ROWID;

-- Of the batches before, the newest of each writer is known.
INSERT INTO writer_history (name, batch, digest, published_ms)
SELECT name, batch, digest, updated_ms FROM writers WHERE batch IS NOT NULL;
