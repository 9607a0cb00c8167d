-- Writers: who publishes numbered batches by commits, in which run, and how far it came.

-- `batch` and `digest` are written by the commit that holds the batch's messages, in its transaction.
CREATE TABLE writers (
    name TEXT PRIMARY KEY,
    principal TEXT NOT NULL,      -- whose it is; empty without authorization
    query TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    batch INTEGER,
    digest TEXT,
    opened_ms INTEGER NOT NULL,
    updated_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
