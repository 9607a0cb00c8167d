-- name: schema
-- Version 1 of outbox.db. An id is unique in its mesh for as long as its row is there; rows that
-- are dead or aborted are there for ever.
CREATE TABLE outbox (
    id TEXT PRIMARY KEY,
    mesh TEXT NOT NULL,
    client_message_id TEXT NOT NULL,
    request_fingerprint BLOB NOT NULL CHECK (length(request_fingerprint) = 32),
    destination TEXT NOT NULL,
    payload BLOB NOT NULL,
    priority TEXT NOT NULL CHECK (priority IN ('now', 'next', 'low')),
    enqueued_at INTEGER NOT NULL,
    next_attempt_at INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('pending', 'inflight', 'done', 'dead', 'aborted')),
    last_error TEXT,
    delivered_at INTEGER,
    broker_message_id TEXT,
    aborted_at INTEGER,
    aborted_by TEXT,
    superseded_by TEXT
) STRICT;
CREATE UNIQUE INDEX outbox_ids ON outbox (mesh, client_message_id);
CREATE INDEX outbox_open ON outbox (mesh, destination, priority, id)
    WHERE status IN ('pending', 'inflight');
CREATE INDEX outbox_statuses ON outbox (status, id);
CREATE INDEX outbox_done ON outbox (delivered_at) WHERE status = 'done';

CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    mesh TEXT NOT NULL,
    at INTEGER NOT NULL,
    data BLOB NOT NULL
) STRICT;
CREATE INDEX events_times ON events (at);

CREATE TABLE notes (name TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT, WITHOUT ROWID;

CREATE TABLE hook_runs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    hook TEXT NOT NULL,
    event TEXT NOT NULL,
    started_at INTEGER NOT NULL,
    took_ms INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    exit_code INTEGER,
    output TEXT NOT NULL
) STRICT;
CREATE INDEX hook_runs_times ON hook_runs (started_at);

-- name: find
-- The row that has an id of a mesh.
SELECT * FROM outbox WHERE mesh = ? AND client_message_id = ?;

-- name: get
-- A row by its own id.
SELECT * FROM outbox WHERE id = ?;

-- name: insert
INSERT INTO outbox VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: update
-- What events change: mesh, id, fingerprint, destination, payload and priority never change.
UPDATE outbox SET next_attempt_at = ?, attempts = ?, status = ?, last_error = ?, delivered_at = ?,
    broker_message_id = ?, aborted_at = ?, aborted_by = ?, superseded_by = ?
WHERE id = ?;

-- name: head
-- The oldest open row of a lane: it holds up those behind it.
SELECT * FROM outbox
WHERE mesh = ? AND destination = ? AND priority = ? AND status IN ('pending', 'inflight')
ORDER BY id LIMIT 1;

-- name: lanes
-- Every lane with an open row, and when the oldest of these is due.
SELECT mesh, destination, priority, min(id), next_attempt_at FROM outbox
WHERE status IN ('pending', 'inflight') GROUP BY mesh, destination, priority;

-- name: restart
-- Rows that were in flight when the daemon ended.
SELECT * FROM outbox WHERE status = 'inflight' ORDER BY id;

-- name: hasten
-- Rows whose next attempt is further away than any wait may be: the clock was set back.
UPDATE outbox SET next_attempt_at = ?1
WHERE status = 'pending' AND next_attempt_at > ?2;

-- name: counts
SELECT status, count(*) FROM outbox GROUP BY status;

-- name: newest
SELECT max(id) FROM outbox;

-- name: oldest
-- When the oldest row that waits was accepted.
SELECT min(enqueued_at) FROM outbox WHERE status IN ('pending', 'inflight');

-- name: list
-- Rows behind an id, of every status, with the size of the payload in place of it.
SELECT id, mesh, client_message_id, request_fingerprint, destination, x'', priority, enqueued_at,
    next_attempt_at, attempts, status, last_error, delivered_at, broker_message_id, aborted_at,
    aborted_by, superseded_by, length(payload)
FROM outbox WHERE id > ?1 AND (?2 IS NULL OR mesh = ?2) ORDER BY id LIMIT ?3;

-- name: list_status
-- The same of one status.
SELECT id, mesh, client_message_id, request_fingerprint, destination, x'', priority, enqueued_at,
    next_attempt_at, attempts, status, last_error, delivered_at, broker_message_id, aborted_at,
    aborted_by, superseded_by, length(payload)
FROM outbox WHERE status = ?4 AND id > ?1 AND (?2 IS NULL OR mesh = ?2) ORDER BY id LIMIT ?3;

-- name: sweep_done
-- Delivered rows whose time is over. Dead and aborted rows stay.
DELETE FROM outbox WHERE id IN (
    SELECT id FROM outbox WHERE status = 'done' AND delivered_at < ? LIMIT ?
);

-- name: note
INSERT INTO notes VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: noted
SELECT value FROM notes WHERE name = ?;

-- name: all_notes
SELECT name, value FROM notes;

-- name: add_run
INSERT INTO hook_runs (hook, event, started_at, took_ms, outcome, exit_code, output)
VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: runs
SELECT id, hook, event, started_at, took_ms, outcome, exit_code, output FROM hook_runs
WHERE id > ? ORDER BY id LIMIT ?;

-- name: sweep_runs
DELETE FROM hook_runs WHERE id IN (SELECT id FROM hook_runs WHERE started_at < ? LIMIT ?);

-- name: events_add
INSERT INTO events (kind, mesh, at, data) VALUES (?, ?, ?, ?);

-- name: events_list
SELECT seq, kind, mesh, at, data FROM events WHERE seq > ? ORDER BY seq LIMIT ?;

-- name: events_last
SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'events';

-- name: events_sweep
DELETE FROM events WHERE seq IN (SELECT seq FROM events WHERE at < ? LIMIT ?);
