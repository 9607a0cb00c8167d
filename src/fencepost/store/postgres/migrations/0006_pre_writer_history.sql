-- The history of writers: one row for each batch that was published, written by the commit that holds
-- the batch's messages. The positions that the batch was read from are those after `range_after`, up
-- to `range_until`; without `range_until` they are not known.
CREATE TABLE writer_history (
    name text COLLATE "C" NOT NULL,
    batch bigint NOT NULL,
    range_after bigint,
    range_until bigint,
    digest text COLLATE "C",
    published_ms bigint NOT NULL,
    PRIMARY KEY (name, batch)
);

-- Of the batches before, the newest of each writer is known.
INSERT INTO writer_history (name, batch, digest, published_ms)
SELECT name, batch, digest, updated_ms FROM writers WHERE batch IS NOT NULL;
