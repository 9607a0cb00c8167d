-- Queries of `fencepost check` that both databases understand word for word.

-- name: counters
SELECT next_position, next_stream, last_ms FROM counters

-- name: streams
SELECT id, path, state, content_type, created_ms, updated_ms, ttl_s, expires_at_ms, deadline_ms,
       tail_messages, tail_bytes, first_messages, first_bytes, closed, closed_by, fork, segments,
       forks_count, ended_ms
FROM streams ORDER BY id

-- name: closed_books
-- Where the log stood when the books of streams were closed that are closed still.
SELECT id, books_closed_at FROM streams WHERE books_closed_at IS NOT NULL ORDER BY id

-- name: purges
-- The last position of each stream whose rows are gone on purpose.
SELECT stream, max(last) FROM purges GROUP BY stream

-- name: purge_records
SELECT id, stream, first, last, runs FROM purges ORDER BY id

-- name: truncations
-- List what waits to be purged, with its marker and its stream.
SELECT t.position, t.stream, l.kind, l.stream
FROM truncations t LEFT JOIN log l ON l.position = t.position

-- name: retentions
SELECT id, path, retention FROM streams WHERE retention IS NOT NULL

-- name: forgetting
SELECT shortest_ms FROM forgetting

-- name: log_count
SELECT count(*) FROM log

-- name: log
-- Every row in the order of positions, its data from wherever it lies.
SELECT l.position, l.stream, l.kind, l.start_bytes, l.version, l.count, l.size, l.at_ms, l.producer,
       l.epoch, l.producer_seq, l.digest, l.chunk, c.id, c.count, c.size,
       COALESCE(l.lengths, c.lengths), COALESCE(l.data, c.data)
FROM log l LEFT JOIN chunks c ON c.id = l.chunk
ORDER BY l.position

-- name: log_with_checksums
-- The same with the checksums, and what else they cover.
SELECT l.position, l.stream, l.kind, l.start_bytes, l.version, l.count, l.size, l.at_ms, l.producer,
       l.epoch, l.producer_seq, l.digest, l.chunk, c.id, c.count, c.size,
       COALESCE(l.lengths, c.lengths), COALESCE(l.data, c.data), l.previous, l.checksum, c.checksum
FROM log l LEFT JOIN chunks c ON c.id = l.chunk
ORDER BY l.position

-- name: chunks_waiting
-- Staged chunks that are no messages yet, and have a checksum.
SELECT id, txn, part, lengths, data, checksum FROM chunks
WHERE checksum IS NOT NULL AND length(data) > 0
  AND id NOT IN (SELECT chunk FROM log WHERE chunk IS NOT NULL) ORDER BY id

-- name: producer_rows
-- The batches of each producer in order. Further rows of a staged batch have no digest.
SELECT stream, producer, position, epoch, producer_seq, previous, version, start_bytes, digest, at_ms
FROM log
WHERE producer IS NOT NULL AND epoch IS NOT NULL AND producer_seq IS NOT NULL AND digest IS NOT NULL
ORDER BY stream, producer, position

-- name: keys_sharing_messages
-- Keys of one stream that claim the same append.
SELECT stream, start_bytes, count(*) FROM keys
WHERE stream <> 0 AND tail_bytes > start_bytes
GROUP BY stream, start_bytes HAVING count(*) > 1

-- name: partial_subscriptions
SELECT id FROM partial_subscriptions

-- name: subscriptions
SELECT id, name, config, snapshot FROM subscriptions ORDER BY id

-- name: writers
SELECT name, query, epoch, batch, digest, opened_ms, updated_ms FROM writers ORDER BY name

-- name: writer_history
-- List what writers published, with what each of them says of its newest batch.
SELECT h.name, h.batch, h.range_after, h.range_until, h.digest, h.published_ms, w.name, w.batch,
       w.digest
FROM writer_history h LEFT JOIN writers w ON w.name = h.name ORDER BY h.name, h.batch

-- name: writers_without_history
-- Writers whose newest batch is not in their history.
SELECT w.name, w.batch FROM writers w
WHERE w.batch IS NOT NULL
  AND NOT EXISTS (SELECT 1 FROM writer_history h WHERE h.name = w.name AND h.batch = w.batch)
ORDER BY w.name

-- name: large_commits
SELECT first, last, state FROM large_commits ORDER BY first

-- name: groups
SELECT id, name, settings, start_position, watermark, created_ms, owner, targets_count, parked_count,
       lanes, 0, state
FROM groups ORDER BY id

-- name: group_floors
-- Where the numbers of new rows of each group begin: a column that older groups do not have.
SELECT id, name, token_floor FROM groups WHERE state = 0 ORDER BY id

-- name: leases
-- Every target, with how many of its parked events are being replayed.
SELECT l.group_id, l.target, l.source, l.lane, l.priority, l.at_position, l.work_to, l.waits_from,
       l.token, l.worker, l.lease_until_ms, l.retry, l.lost, l.blocked, l.error, l.failed,
       l.deferred_until_ms, l.replaying, l.updated_ms, l.state, l.due_ms, COALESCE(p.events, 0)
FROM leases l LEFT JOIN (
    SELECT group_id, target, count(*) AS events FROM parked WHERE replaying GROUP BY group_id, target
) AS p ON p.group_id = l.group_id AND p.target = l.target
ORDER BY l.group_id, l.target

-- name: parked_events
-- Every parked event, with the row of its target.
SELECT p.group_id, p.target, p.position, p.source, p.attempts, p.parked_ms, p.replaying, l.source,
       l.work_to
FROM parked p LEFT JOIN leases l ON l.group_id = p.group_id AND l.target = p.target
ORDER BY p.group_id, p.target, p.position

-- name: told
-- What computed targets were told of, with the rows of the targets.
SELECT t.group_id, t.target, t.position, t.covers_from, l.work_to
FROM told t LEFT JOIN leases l ON l.group_id = t.group_id AND l.target = t.target
ORDER BY t.group_id, t.target, t.position

-- name: told_counts
SELECT group_id, told FROM told_counts ORDER BY group_id

-- name: meshes
SELECT id, name, state, settings, created_ms FROM meshes ORDER BY id

-- name: ending_meshes
-- Meshes whose deletion has begun, while their streams and groups go.
SELECT name FROM meshes WHERE state = 1

-- name: mesh_groups
SELECT name FROM groups WHERE state = 0 AND name LIKE 'mesh:%' ORDER BY name

-- name: topic_members
SELECT mesh, topic, member, created_ms FROM topic_members ORDER BY mesh, topic, member

-- name: sends
-- Every dedupe row.
SELECT mesh, sender, client_id, length(fingerprint), kind, ref, stream, messages, bytes, first_seen_ms,
       expires_ms
FROM sends
