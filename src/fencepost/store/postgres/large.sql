-- Large commits: what they hold, and the transaction that writes them.

-- name: begin
BEGIN

-- name: live_as_large
-- A number for a commit, and the lock that shows that it is alive, as long as its session is. A session
-- that is idle for so many milliseconds ends: its node has stopped.
SELECT number, pg_advisory_lock($1::int, number::int), set_config('idle_session_timeout', $2, false)
FROM (SELECT nextval('large_numbers') AS number OFFSET 0) AS next

-- name: hold
INSERT INTO held (large, mark) SELECT * FROM unnest($1::bigint[], $2::bigint[])
ON CONFLICT DO NOTHING

-- name: release_all
DELETE FROM held WHERE large = $1

-- name: release_held
-- Forget some of the marks of a commit that is over.
WITH gone AS (
    DELETE FROM held
    WHERE large = $1 AND mark = ANY (ARRAY(SELECT mark FROM held WHERE large = $1 LIMIT $2))
    RETURNING 1
)
SELECT count(*) FROM gone HAVING count(*) > 0

-- name: next_holder
-- The next commit that has marks, and whether its session is gone.
SELECT large, pg_try_advisory_xact_lock_shared($1::int, large::int)
FROM (SELECT min(large) AS large FROM held WHERE large > $2 OFFSET 0) AS next
WHERE large IS NOT NULL

-- name: large_now
SELECT large FROM counters

-- name: held_by_large
-- Whether the session of the commit under way is gone, and which of these marks it holds.
SELECT gone, ARRAY(SELECT mark FROM held WHERE large = $2 AND mark = ANY ($3::bigint[]))
FROM (SELECT pg_try_advisory_xact_lock_shared($1::int, $2::int) AS gone OFFSET 0) AS owner

-- name: hold_all
-- Run in a turn: from here on the commit holds what it has named.
UPDATE counters SET large = $1, large_turn = NULL

-- name: note_large_turn
-- Run in the turn in which a commit takes its positions.
UPDATE counters SET large_turn = turn + 1

-- name: insert_turn
-- Streams that changed in a turn with others before it ends: turn, node, time, head, streams, created.
INSERT INTO turns (turn, node, at_ms, head, streams, created, removed)
VALUES ($1, $2, $3, $4, $5::bigint[], $6::bigint[], ARRAY[]::bigint[])

-- name: end_large_turn
-- As `end_turn`, and no large commit is under way any more.
WITH ended AS (
    UPDATE counters
    SET turn = $1, next_position = $2, next_stream = $3, last_ms = $4, next_chunk = $5,
        large = NULL, large_turn = NULL
), shown AS (
    DELETE FROM large_commits
)
INSERT INTO turns (turn, node, at_ms, head, streams, created, removed, since)
SELECT $1, $6, $4, $2 - 1, $7::bigint[], $8::bigint[], $9::bigint[], large_turn FROM counters

-- name: streams_since
-- The streams that were changed from one turn up to another, but not by large commits. The turn in which
-- a large commit takes its positions counts: other requests of that turn may come behind it in the log.
SELECT DISTINCT stream
FROM turns CROSS JOIN LATERAL unnest(streams) AS changed (stream)
WHERE turn >= $1 AND turn < $2 AND node <> ''

-- name: changed_in_spite
-- The streams that servers of an older version, which know of no marks, may have changed since a large
-- commit took its positions: their turns do not say that they list everything, and their rows come
-- behind the commit in the log.
SELECT DISTINCT stream
FROM counters JOIN turns ON turns.turn > counters.large_turn AND NOT turns.listed
CROSS JOIN LATERAL unnest(turns.streams) AS changed (stream)

-- name: look_at_held
-- How many of these streams there are, which of them have expired by now, and which are forked from.
SELECT count(*),
       COALESCE(array_agg(path) FILTER (WHERE state = 0 AND deadline_ms <= $2), ARRAY[]::text[]),
       COALESCE(array_agg(id) FILTER (WHERE forks_count > 0), ARRAY[]::bigint[])
FROM streams WHERE state < 2 AND path = ANY ($1::text[])

-- name: lock_streams
-- Streams that a large commit is about to write. The lock is for servers of an older version, which know
-- of no marks: they wait for it.
SELECT id, path, state, content_type, created_ms, updated_ms, ttl_s, expires_at_ms, deadline_ms,
       tail_messages, tail_bytes, first_messages, first_bytes, closed, closed_by, seq, fork, segments,
       forks_count, retention, books_closed_at
FROM streams WHERE state < 2 AND path = ANY (:paths::text[])
FOR UPDATE

-- name: lock_parts
SELECT p.txn, p.part, p.media_type, p.committed
FROM unnest($1::text[], $2::text[]) AS n (txn, part)
JOIN parts p ON p.txn = n.txn AND p.part = n.part
FOR UPDATE OF p
