-- Idempotency keys, and staged parts that wait for the commit that makes them messages.

-- A key belongs to a principal and a stream's incarnation; stream 0 holds the keys of whole commits.
-- `answer` is what a commit answered, kept to be answered again.
CREATE TABLE keys (
    stream INTEGER NOT NULL,
    principal TEXT NOT NULL,
    key TEXT NOT NULL,
    digest BLOB NOT NULL,
    start_messages INTEGER NOT NULL,
    start_bytes INTEGER NOT NULL,
    tail_messages INTEGER NOT NULL,
    tail_bytes INTEGER NOT NULL,
    closed INTEGER NOT NULL,
    position INTEGER NOT NULL,
    created_ms INTEGER NOT NULL,
    expires_ms INTEGER,
    answer BLOB,
    PRIMARY KEY (stream, principal, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX keys_by_expiry ON keys (expires_ms) WHERE expires_ms IS NOT NULL;

-- One row per staged part. `committed` is the position at which it became messages, NULL before.
CREATE TABLE parts (
    txn TEXT NOT NULL,
    part TEXT NOT NULL,
    media_type TEXT NOT NULL,
    staged_ms INTEGER NOT NULL,
    committed INTEGER,
    PRIMARY KEY (txn, part)
) STRICT, WITHOUT ROWID;
CREATE INDEX parts_waiting ON parts (staged_ms) WHERE committed IS NULL;

ALTER TABLE chunks ADD COLUMN digest BLOB;
