-- name: schema
-- Version 1 of inbox.db. A message is stored once, however often it is delivered.
CREATE TABLE inbox (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    mesh TEXT NOT NULL,
    sender TEXT NOT NULL,
    client_message_id TEXT NOT NULL,
    received_at INTEGER NOT NULL,
    entry BLOB NOT NULL,
    UNIQUE (mesh, sender, client_message_id)
) STRICT;
CREATE INDEX inbox_times ON inbox (received_at);
CREATE INDEX inbox_meshes ON inbox (mesh, seq);

-- name: start_at
-- A new file goes on above the numbers of the one before, which may have been moved aside.
INSERT INTO sqlite_sequence (name, seq) VALUES ('inbox', ?);

-- name: add
INSERT INTO inbox (mesh, sender, client_message_id, received_at, entry) VALUES (?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING;

-- name: list
SELECT seq, mesh, received_at, entry FROM inbox WHERE seq > ?1 AND (?2 IS NULL OR mesh = ?2)
ORDER BY seq LIMIT ?3;

-- name: last
SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'inbox';

-- name: count
SELECT count(*) FROM inbox;

-- name: sweep
DELETE FROM inbox WHERE seq IN (SELECT seq FROM inbox WHERE received_at < ? LIMIT ?);
