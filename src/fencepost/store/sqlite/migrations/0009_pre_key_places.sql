-- Keys in the order of their use, and where each is found, written behind them in larger pieces.

-- A key's row goes to the end of its table, whatever the key is: it costs as little as a row of the log.
-- The order of the numbers is that of time, and the sweep goes by it.
CREATE TABLE keys_by_use (
    id INTEGER PRIMARY KEY,
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
    answer BLOB
) STRICT;
INSERT INTO keys_by_use (
    stream, principal, key, digest, start_messages, start_bytes, tail_messages, tail_bytes, closed,
    position, created_ms, expires_ms, answer
)
SELECT stream, principal, key, digest, start_messages, start_bytes, tail_messages, tail_bytes, closed,
       position, created_ms, expires_ms, answer
FROM keys ORDER BY created_ms, position;
DROP TABLE keys;
ALTER TABLE keys_by_use RENAME TO keys;

-- Where a key is found, for those with a number up to `indexed_to`; the server has the others in memory.
-- Thousands are put in at once, in their order: so a page of this table is written once for many keys that
-- belong on it, and not once for each.
CREATE TABLE key_places (
    stream INTEGER NOT NULL,
    principal TEXT NOT NULL,
    key TEXT NOT NULL,
    id INTEGER NOT NULL,
    PRIMARY KEY (stream, principal, key)
) STRICT, WITHOUT ROWID;
INSERT INTO key_places SELECT stream, principal, key, id FROM keys ORDER BY stream, principal, key;

CREATE TABLE key_index (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    indexed_to INTEGER NOT NULL
) STRICT;
INSERT INTO key_index SELECT 1, COALESCE(max(id), 0) FROM keys;

-- The number of a row that was the newest is given out again: then the new one is not in the index yet.
CREATE TRIGGER keys_deleted AFTER DELETE ON keys BEGIN
    DELETE FROM key_places
    WHERE stream = old.stream AND principal = old.principal AND key = old.key AND id = old.id;
    UPDATE key_index SET indexed_to = (SELECT COALESCE(max(id), 0) FROM keys)
    WHERE indexed_to > (SELECT COALESCE(max(id), 0) FROM keys);
END;
