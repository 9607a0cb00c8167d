-- Nodes that share a database: knowing each other, and which of them leads.

-- name: register_node
-- A node says that it is there, and where.
INSERT INTO nodes (node, url, started_ms, seen_ms)
SELECT $1, $2, now_ms, now_ms
FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms) AS clock
ON CONFLICT (node) DO UPDATE SET url = excluded.url, seen_ms = excluded.seen_ms
RETURNING started_ms

-- name: forget_node
DELETE FROM nodes WHERE node = $1 RETURNING node

-- name: forget_silent_nodes
-- Nodes that have said nothing for longer than so many milliseconds.
DELETE FROM nodes
WHERE seen_ms < (extract(epoch FROM clock_timestamp()) * 1000)::bigint - $1

-- name: any_silent_node
SELECT 1 FROM nodes
WHERE seen_ms < (extract(epoch FROM clock_timestamp()) * 1000)::bigint - $1
LIMIT 1

-- name: list_nodes
SELECT node, url, started_ms, seen_ms FROM nodes ORDER BY node

-- name: try_lead
-- Whether this session now holds the leader's lock, which goes with the session.
SELECT pg_try_advisory_lock($1)

-- name: stop_leading
SELECT pg_advisory_unlock($1)

-- name: end_idle_session
-- A node that is stopped keeps its connections: the database has to end this one by itself.
SELECT set_config('idle_session_timeout', $1, false)

-- name: take_lead
-- Run in a turn.
UPDATE counters SET leader = $1

-- name: leave_lead
-- Run in a turn; nothing changes when another node leads by now.
UPDATE counters SET leader = '' WHERE leader = $1

-- name: find_leader
SELECT n.node, n.url FROM counters c JOIN nodes n ON n.node = c.leader

-- name: leads
-- Whether a node leads: under the lock of a turn this cannot change.
SELECT 1 FROM counters WHERE leader = $1

-- name: find_followed
-- How far the subscriptions have followed, and how far there is to follow.
SELECT f.turn, c.turn FROM followed f, counters c

-- name: save_followed
UPDATE followed SET turn = $1 WHERE turn < $1

-- name: any_old_turn
-- Whether the oldest turn is of long ago, and followed.
SELECT 1 FROM (SELECT turn, at_ms FROM turns ORDER BY turn LIMIT 1) AS oldest
WHERE at_ms <= $1 AND turn <= $2

-- name: drop_old_turns
-- Some turns of long ago that the subscriptions have followed.
DELETE FROM turns WHERE turn IN (
    SELECT turn FROM (SELECT turn, at_ms FROM turns ORDER BY turn LIMIT $3) AS oldest
    WHERE at_ms <= $1 AND turn <= $2
)

-- name: end_stuck_turns
-- End sessions that hold the row of counters, or are those of large commits (locks of the class $2), and
-- have heard nothing from their node for so many milliseconds. The server's own timeout for idle
-- transactions does not see a node that stopped while it was sending. A session that only reads, as a
-- dump does, holds a weaker lock and is left alone.
SELECT a.pid, pg_terminate_backend(a.pid)
FROM pg_stat_activity a
JOIN pg_locks l ON l.pid = a.pid AND l.granted
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND (
        l.locktype = 'relation' AND l.relation = 'counters'::regclass
            AND l.mode IN ('RowShareLock', 'RowExclusiveLock')
        OR l.locktype = 'advisory' AND l.classid = $2::oid AND l.objsubid = 2
            AND l.mode = 'ExclusiveLock'
    )
WHERE a.datname = current_database() AND a.usename = current_user AND a.pid <> pg_backend_pid()
    AND a.wait_event = 'ClientRead'
    AND greatest(a.state_change, a.query_start, a.xact_start)
        < clock_timestamp() - $1 * interval '1 millisecond'
GROUP BY a.pid

-- name: any_usage_to_fold
SELECT 1 FROM principal_usage OFFSET $1 LIMIT 1

-- name: fold_usage
WITH gone AS (
    DELETE FROM principal_usage
    WHERE ctid = ANY (ARRAY(SELECT ctid FROM principal_usage LIMIT $1))
    RETURNING principal, resource, amount
)
INSERT INTO principal_usage
SELECT principal, resource, sum(amount) FROM gone GROUP BY principal, resource HAVING sum(amount) <> 0
