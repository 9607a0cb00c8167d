-- Groups, their targets with leases, and parked events. Decisions read rows by name or by the order of a
-- claim; what they change is written as rows.

-- name: find_group
SELECT id, name, settings, start_position, watermark, created_ms, owner, targets_count, parked_count, lanes,
       token_floor
FROM groups WHERE name = $1 AND state = 0

-- name: find_group_by_id
SELECT id, name, settings, start_position, watermark, created_ms, owner, targets_count, parked_count, lanes,
       token_floor
FROM groups WHERE id = $1 AND state = 0

-- name: live_groups
-- A page of groups, by their names.
SELECT id, name, settings, start_position, watermark, created_ms, owner, targets_count, parked_count, lanes,
       token_floor
FROM groups WHERE state = 0 AND name > $1 ORDER BY name LIMIT $2

-- name: find_lease
SELECT target, source, lane, priority, at_position, work_to, waits_from, token, worker, lease_until_ms,
       retry, lost, blocked, error, failed, deferred_until_ms, replaying, updated_ms
FROM leases WHERE group_id = $1 AND target = $2

-- name: claim_urgent
-- Targets that are ready, the most urgent first, among those the oldest.
SELECT target, source, lane, priority, at_position, work_to, waits_from, token, worker, lease_until_ms,
       retry, lost, blocked, error, failed, deferred_until_ms, replaying, updated_ms
FROM leases WHERE group_id = $1 AND lane = $2 AND state = 1
ORDER BY priority DESC, waits_from LIMIT $3

-- name: claim_oldest
SELECT target, source, lane, priority, at_position, work_to, waits_from, token, worker, lease_until_ms,
       retry, lost, blocked, error, failed, deferred_until_ms, replaying, updated_ms
FROM leases WHERE group_id = $1 AND lane = $2 AND state = 1 ORDER BY waits_from LIMIT $3

-- name: claim_newest
SELECT target, source, lane, priority, at_position, work_to, waits_from, token, worker, lease_until_ms,
       retry, lost, blocked, error, failed, deferred_until_ms, replaying, updated_ms
FROM leases WHERE group_id = $1 AND lane = $2 AND state = 1 ORDER BY waits_from DESC LIMIT $3

-- name: claim_due
-- Targets whose lease or wait has an end, the next one first.
SELECT target, source, lane, priority, at_position, work_to, waits_from, token, worker, lease_until_ms,
       retry, lost, blocked, error, failed, deferred_until_ms, replaying, updated_ms
FROM leases WHERE group_id = $1 AND lane = $2 AND state = 2 AND due_ms <= $3
ORDER BY due_ms LIMIT $4

-- name: next_due
SELECT due_ms, target FROM leases WHERE group_id = $1 AND lane = $2 AND state = 2 AND due_ms > $3
ORDER BY due_ms LIMIT $4

-- name: first_due
-- Targets whose lease or wait has an end, whether it has passed or not.
SELECT target, source, lane, priority, at_position, work_to, waits_from, token, worker, lease_until_ms,
       retry, lost, blocked, error, failed, deferred_until_ms, replaying, updated_ms
FROM leases WHERE group_id = $1 AND lane = $2 AND state = 2 ORDER BY due_ms LIMIT $3

-- name: leases_after
-- A page of targets, by their names.
SELECT target, source, lane, priority, at_position, work_to, waits_from, token, worker, lease_until_ms,
       retry, lost, blocked, error, failed, deferred_until_ms, replaying, updated_ms
FROM leases WHERE group_id = $1 AND target > $2 ORDER BY target LIMIT $3

-- name: blocked_leases_after
SELECT target, source, lane, priority, at_position, work_to, waits_from, token, worker, lease_until_ms,
       retry, lost, blocked, error, failed, deferred_until_ms, replaying, updated_ms
FROM leases WHERE group_id = $1 AND state = 3 AND target > $2 ORDER BY target LIMIT $3

-- name: workers_of_group
-- Workers with the leases that they hold, and when the first and the last of these end.
SELECT worker, count(*), min(lease_until_ms), max(lease_until_ms) FROM leases
WHERE group_id = $1 AND state = 2 AND worker IS NOT NULL AND worker > $2
GROUP BY worker ORDER BY worker LIMIT $3

-- name: lane_counts
-- Per lane: how many targets are in which state, the first and the last position that waits, and how
-- many positions wait of each target, together.
SELECT lane, state, count(*), count(worker), min(waits_from), max(work_to),
       sum(work_to - waits_from + 1)::bigint
FROM leases WHERE group_id = $1 GROUP BY lane, state

-- name: find_parked
SELECT target, source, position, error, attempts, parked_ms, replaying, note
FROM parked WHERE group_id = $1 AND target = $2 AND position = $3

-- name: parked_of_target
-- The parked events of a target behind a position.
SELECT target, source, position, error, attempts, parked_ms, replaying, note
FROM parked WHERE group_id = $1 AND target = $2 AND position > $3 ORDER BY position LIMIT $4

-- name: replaying_of_target
-- Those of them that are given out again.
SELECT target, source, position, error, attempts, parked_ms, replaying, note
FROM parked WHERE group_id = $1 AND target = $2 AND position > $3 AND replaying
ORDER BY position LIMIT $4

-- name: parked_after
-- A page of parked events, by target and position.
SELECT target, source, position, error, attempts, parked_ms, replaying, note
FROM parked WHERE group_id = $1 AND (target, position) > ($2, $3)
ORDER BY target, position LIMIT $4

-- name: find_told
SELECT target, position, covers_from, note
FROM told WHERE group_id = $1 AND target = $2 AND position = $3

-- name: count_told
-- How many events the targets of a group were told of and have not got past.
SELECT told FROM told_counts WHERE group_id = $1

-- name: drop_group_leases
DELETE FROM leases WHERE group_id = $1 AND target IN
    (SELECT target FROM leases WHERE group_id = $1 ORDER BY target LIMIT $2)

-- name: drop_group_parked
DELETE FROM parked WHERE group_id = $1 AND (target, position) IN
    (SELECT target, position FROM parked WHERE group_id = $1 ORDER BY target, position LIMIT $2)

-- name: drop_group_told
DELETE FROM told WHERE group_id = $1 AND (target, position) IN
    (SELECT target, position FROM told WHERE group_id = $1 ORDER BY target, position LIMIT $2)

-- name: drop_group_told_count
DELETE FROM told_counts WHERE group_id = $1

-- name: drop_group
DELETE FROM groups WHERE id = $1 AND state = 1

-- name: save_group
INSERT INTO groups (
    id, name, settings, start_position, watermark, created_ms, owner, targets_count,
    parked_count, lanes, token_floor, state
)
SELECT * FROM unnest(
    $1::bigint[], $2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[], $7::text[],
    $8::bigint[], $9::bigint[], $10::text[], $11::bigint[], $12::bigint[]
)
ON CONFLICT (id) DO UPDATE SET
    watermark = excluded.watermark, targets_count = excluded.targets_count, parked_count =
    excluded.parked_count, lanes = excluded.lanes, token_floor = excluded.token_floor, state = excluded.state

-- name: save_lease
INSERT INTO leases (
    group_id, target, source, lane, priority, at_position, work_to, waits_from, token, worker,
    lease_until_ms, retry, lost, blocked, error, failed, deferred_until_ms, replaying,
    updated_ms, state, due_ms
)
SELECT * FROM unnest(
    $1::bigint[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::bigint[], $7::bigint[],
    $8::bigint[], $9::bigint[], $10::text[], $11::bigint[], $12::bigint[], $13::bigint[],
    $14::boolean[], $15::text[], $16::bigint[], $17::bigint[], $18::bigint[], $19::bigint[],
    $20::bigint[], $21::bigint[]
)
ON CONFLICT (group_id, target) DO UPDATE SET
    source = excluded.source, lane = excluded.lane, priority = excluded.priority, at_position =
    excluded.at_position, work_to = excluded.work_to, waits_from = excluded.waits_from, token =
    excluded.token, worker = excluded.worker, lease_until_ms = excluded.lease_until_ms, retry =
    excluded.retry, lost = excluded.lost, blocked = excluded.blocked, error = excluded.error,
    failed = excluded.failed, deferred_until_ms = excluded.deferred_until_ms, replaying =
    excluded.replaying, updated_ms = excluded.updated_ms, state = excluded.state, due_ms =
    excluded.due_ms

-- name: save_parked
INSERT INTO parked (
    group_id, target, source, position, error, attempts, parked_ms, replaying, note
)
SELECT * FROM unnest(
    $1::bigint[], $2::text[], $3::text[], $4::bigint[], $5::text[], $6::bigint[], $7::bigint[],
    $8::boolean[], $9::text[]
)
ON CONFLICT (group_id, target, position) DO UPDATE SET
    source = excluded.source, error = excluded.error, attempts = excluded.attempts, parked_ms =
    excluded.parked_ms, replaying = excluded.replaying, note = excluded.note

-- name: drop_lease
DELETE FROM leases l USING unnest($1::bigint[], $2::text[]) AS n (group_id, target)
WHERE l.group_id = n.group_id AND l.target = n.target

-- name: drop_parked
DELETE FROM parked p USING unnest($1::bigint[], $2::text[], $3::bigint[]) AS n (group_id, target, position)
WHERE p.group_id = n.group_id AND p.target = n.target AND p.position = n.position

-- name: save_told
INSERT INTO told (group_id, target, position, covers_from, note)
SELECT * FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[], $5::text[])
ON CONFLICT (group_id, target, position) DO UPDATE SET
    covers_from = excluded.covers_from, note = excluded.note

-- name: drop_told
-- A target has got past all events up to a position.
DELETE FROM told t USING unnest($1::bigint[], $2::text[], $3::bigint[]) AS n (group_id, target, position)
WHERE t.group_id = n.group_id AND t.target = n.target AND t.position <= n.position

-- name: told_after
-- Some rows in the order of their table, and whether nothing needs them: servers that do not know the table
-- have moved the target past them, or removed the group.
SELECT t.group_id, t.target, t.position, coalesce(
    t.position <= l.at_position, NOT EXISTS (SELECT FROM groups g WHERE g.id = t.group_id)
)
FROM (
    SELECT group_id, target, position FROM told
    WHERE (group_id, target, position) > ($1::bigint, $2::text, $3::bigint)
    ORDER BY group_id, target, position LIMIT $4
) t
LEFT JOIN leases l ON l.group_id = t.group_id AND l.target = t.target
ORDER BY t.group_id, t.target, t.position

-- name: forget_told
-- Remove the rows between two places that nothing needs.
DELETE FROM told t
WHERE (group_id, target, position) > ($1::bigint, $2::text, $3::bigint)
    AND (group_id, target, position) <= ($4::bigint, $5::text, $6::bigint)
    AND coalesce(
        (
            SELECT t.position <= l.at_position FROM leases l
            WHERE l.group_id = t.group_id AND l.target = t.target
        ),
        NOT EXISTS (SELECT FROM groups g WHERE g.id = t.group_id)
    )

-- name: forget_told_counts
-- Remove the counts of groups that are gone with all of their rows.
DELETE FROM told_counts c
WHERE told = 0 AND NOT EXISTS (SELECT FROM groups g WHERE g.id = c.group_id)

-- name: count_told_of
-- The same for several groups.
SELECT group_id, told FROM told_counts WHERE group_id = ANY ($1::bigint[])

-- name: told_ahead
-- For each of some leases: the first events that its target was told of.
SELECT a.n - 1, t.target, t.position, t.covers_from, t.note
FROM json_array_elements(:leases::json) WITH ORDINALITY AS a (value, n)
CROSS JOIN LATERAL (
    SELECT target, position, covers_from, note FROM told
    WHERE group_id = (a.value ->> 0)::bigint AND target = a.value ->> 1
      AND position > (a.value ->> 2)::bigint AND position <= (a.value ->> 3)::bigint
    ORDER BY position LIMIT :limit
) t
ORDER BY a.n, t.position

-- name: rows_over
-- The appends that some positions lie inside, as far as they are still in the log.
SELECT a.value::bigint, l.position, l.size, s.path, s.content_type
FROM json_array_elements_text(:positions::json) AS a (value)
CROSS JOIN LATERAL (
    SELECT position, count, size, kind, stream FROM log
    WHERE position <= a.value::bigint ORDER BY position DESC LIMIT 1
) l
JOIN streams s ON s.id = l.stream
WHERE l.kind = 0 AND l.position + l.count > a.value::bigint

-- name: find_groups
-- Find those of the named groups that exist.
SELECT id, name, settings, start_position, watermark, created_ms, owner, targets_count, parked_count, lanes,
       token_floor
FROM groups WHERE name = ANY ($1::text[]) AND state = 0

-- name: find_leases
-- Find those of the given pairs of group and target that exist.
SELECT l.group_id, l.target, l.source, l.lane, l.priority, l.at_position, l.work_to, l.waits_from, l.token, l.worker, l.lease_until_ms,
       l.retry, l.lost, l.blocked, l.error, l.failed, l.deferred_until_ms, l.replaying, l.updated_ms
FROM unnest($1::bigint[], $2::text[]) AS n (group_id, target)
JOIN leases l ON l.group_id = n.group_id AND l.target = n.target

-- name: event_places
-- For each of some streams and positions: where the first message begins from the position on, and the
-- rows from there on. The place is told by the row before the position or the one at it; it is null when
-- neither is of the stream.
SELECT asked.n - 1, asked.id, asked.content_type, asked.place, l.position, l.start_bytes, l.size
FROM (
    SELECT a.n, s.id, s.content_type, COALESCE(
        (SELECT start_bytes + CASE WHEN position + count > a.low THEN 0 ELSE size END FROM log
         WHERE position = (SELECT max(position) FROM log WHERE position < a.low) AND stream = s.id
           AND kind = 0),
        (SELECT start_bytes FROM log WHERE position = a.low AND stream = s.id AND kind = 0)
    ) AS place
    FROM (
        SELECT n, value ->> 0 AS path, (value ->> 1)::bigint AS low
        FROM json_array_elements(:spans::json) WITH ORDINALITY AS given (value, n)
    ) a
    CROSS JOIN LATERAL (
        SELECT id, content_type FROM streams WHERE path = a.path AND state < 2
        UNION ALL
        SELECT id, content_type FROM streams WHERE path = a.path AND state = 2
    ) s
) asked
LEFT JOIN LATERAL (
    SELECT position, start_bytes, size FROM log
    WHERE stream = asked.id AND kind = 0 AND start_bytes >= asked.place
    ORDER BY start_bytes LIMIT :limit
) l ON TRUE
ORDER BY asked.n, asked.id, l.start_bytes

-- name: events_at
-- Messages at these positions, appends as they are stored.
SELECT position, stream, start_bytes, version, count, at_ms, producer, epoch, producer_seq,
       COALESCE(lengths, (SELECT lengths FROM chunks WHERE id = log.chunk)),
       COALESCE(data, (SELECT data FROM chunks WHERE id = log.chunk), ''::bytea)
FROM log WHERE position = ANY (:positions::bigint[])

-- name: stream_events
-- Messages of a stream from a place on, appends as they are stored.
SELECT position, stream, start_bytes, version, count, at_ms, producer, epoch, producer_seq,
       COALESCE(lengths, (SELECT lengths FROM chunks WHERE id = log.chunk)),
       COALESCE(data, (SELECT data FROM chunks WHERE id = log.chunk), ''::bytea)
FROM log
WHERE stream = :stream AND kind = 0 AND start_bytes >= :place ORDER BY start_bytes LIMIT :limit

-- name: event_rows
-- The same for appends of several streams.
SELECT position, stream, start_bytes, version, count, at_ms, producer, epoch, producer_seq,
       COALESCE(lengths, (SELECT lengths FROM chunks WHERE id = log.chunk)),
       COALESCE(data, (SELECT data FROM chunks WHERE id = log.chunk), ''::bytea)
FROM /*rows*/ WHERE kind = 0 ORDER BY position LIMIT :limit

-- name: work_between
-- The streams that have messages in a range, with the first and the last position of each.
SELECT log.stream, s.path, min(log.position), max(log.position + log.count - 1)
FROM log JOIN streams s ON s.id = log.stream
WHERE log.position BETWEEN :low AND :high AND log.kind = 0 GROUP BY log.stream, s.path

-- name: messages_between
SELECT log.stream, s.path, log.position, log.count
FROM log JOIN streams s ON s.id = log.stream
WHERE log.position BETWEEN :low AND :high AND log.kind = 0 ORDER BY log.position
