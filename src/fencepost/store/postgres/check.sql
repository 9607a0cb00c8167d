-- Every check of `fencepost check` on PostgreSQL. The name of a query is the code of its findings; a
-- row is a finding: where, and what. None of them writes, and all see the same moment.

-- name: counters_behind
-- A number that was given out would be given out again.
SELECT 'the counters', 'the next position is ' || next_position || ', and there is a row at ' || found
FROM counters, (SELECT max(position + GREATEST(count, 1) - 1) AS found FROM log) AS newest
WHERE found >= next_position
UNION ALL
SELECT 'the counters', 'the next stream is ' || next_stream || ', and there is one with ' || found
FROM counters, (SELECT max(id) AS found FROM streams) AS newest
WHERE found >= next_stream
UNION ALL
SELECT 'the counters', 'the last turn was ' || counters.turn || ', and ' || found || ' is noted'
FROM counters, (SELECT max(turn) AS found FROM turns) AS newest
WHERE found > counters.turn

-- name: positions_overlap
SELECT 'position ' || position, 'the row before it reaches up to ' || free
FROM (
    SELECT position, lag(position + GREATEST(count, 1)) OVER (ORDER BY position) AS free FROM log
) AS walked
WHERE position < free

-- name: time_backwards
SELECT 'position ' || position, 'it is of ' || at_ms || ', and the row before it of ' || before_ms
FROM (SELECT position, at_ms, lag(at_ms) OVER (ORDER BY position) AS before_ms FROM log) AS walked
WHERE at_ms < before_ms

-- name: messages_missing
-- Each row of a stream begins where the one before it ended, in messages, in bytes and in time.
SELECT 'stream ' || stream || ' at position ' || position,
       'it begins at ' || version || '/' || start_bytes || ', and the row before it ends at '
       || before_version || '/' || before_bytes
FROM (
    SELECT stream, position, version, start_bytes,
           lag(version + count) OVER rows AS before_version,
           lag(start_bytes + size) OVER rows AS before_bytes,
           lag(position) OVER rows AS before_position
    FROM log WHERE kind = 0 WINDOW rows AS (PARTITION BY stream ORDER BY start_bytes)
) AS walked
WHERE version <> before_version OR start_bytes <> before_bytes OR position <= before_position

-- name: tail_wrong
-- A stream ends where its newest row does. A commit that is still being carried out has rows and no
-- readers yet.
SELECT 'stream ' || id || ' (' || path || ')',
       'its tail is ' || tail_messages || '/' || tail_bytes || ', and its rows end at '
       || messages || '/' || bytes
FROM streams
JOIN LATERAL (
    SELECT version + count AS messages, start_bytes + size AS bytes, position
    FROM log WHERE stream = streams.id AND kind = 0 ORDER BY start_bytes DESC LIMIT 1
) AS newest ON true
WHERE state < 2 AND (messages <> tail_messages OR bytes <> tail_bytes)
  AND NOT EXISTS (SELECT FROM large_commits WHERE newest.position BETWEEN first AND last)

-- name: first_wrong
SELECT 'stream ' || id || ' (' || path || ')', 'it begins behind its tail'
FROM streams WHERE first_messages > tail_messages OR first_bytes > tail_bytes

-- name: row_without_stream
SELECT 'position ' || min(position), 'there is no stream ' || stream
FROM log WHERE kind = 0 AND NOT EXISTS (SELECT FROM streams WHERE id = log.stream)
GROUP BY stream

-- name: after_the_end
-- Nothing follows a closure or a deletion.
SELECT 'stream ' || stream || ' at position ' || position, 'messages behind its end at ' || ended
FROM log
JOIN (SELECT stream, min(position) AS ended FROM log WHERE kind IN (1, 2, 3) GROUP BY stream) AS ends
USING (stream)
WHERE kind = 0 AND position > ended

-- name: data_missing
SELECT 'stream ' || log.stream || ' at position ' || log.position,
       CASE WHEN log.chunk IS NULL THEN 'it has no data'
            ELSE 'the staged chunk ' || log.chunk || ' is gone' END
FROM log LEFT JOIN chunks ON chunks.id = log.chunk
WHERE log.kind = 0 AND log.data IS NULL AND chunks.id IS NULL

-- name: size_wrong
-- Messages of JSON lie joined by commas, which are not counted; anything else lies as it is.
SELECT 'stream ' || log.stream || ' at position ' || log.position,
       'it says ' || log.size || ' bytes, and there are '
       || octet_length(COALESCE(log.data, chunks.data))
FROM log LEFT JOIN chunks ON chunks.id = log.chunk
WHERE log.kind = 0
  AND octet_length(COALESCE(log.data, chunks.data)) NOT IN (log.size, log.size + log.count - 1)

-- name: producer_gap
-- Batches of one epoch follow each other without a gap and none comes twice, unless the producer was
-- forgotten in between.
SELECT 'producer ' || producer || ' of stream ' || stream,
       epoch || '.' || seq || ' at position ' || position || ' after ' || epoch || '.' || before_seq
       || ' at ' || before_position
FROM (
    SELECT stream, producer, epoch, producer_seq AS seq, position, at_ms,
           lag(producer_seq) OVER batches AS before_seq,
           lag(position) OVER batches AS before_position,
           lag(at_ms) OVER batches AS before_ms
    FROM log WHERE producer IS NOT NULL AND producer_seq IS NOT NULL AND digest IS NOT NULL
    WINDOW batches AS (PARTITION BY stream, producer, epoch ORDER BY position)
) AS walked, forgetting
WHERE seq <> before_seq + 1
  AND NOT (seq = 0 AND COALESCE(at_ms - before_ms >= shortest_ms, false))

-- name: epoch_backwards
SELECT 'producer ' || producer || ' of stream ' || stream,
       'epoch ' || epoch || ' at position ' || position || ' after epoch ' || before_epoch
FROM (
    SELECT stream, producer, epoch, position, at_ms,
           lag(epoch) OVER batches AS before_epoch, lag(at_ms) OVER batches AS before_ms
    FROM log WHERE producer IS NOT NULL AND producer_seq IS NOT NULL AND digest IS NOT NULL
    WINDOW batches AS (PARTITION BY stream, producer ORDER BY position)
) AS walked, forgetting
WHERE epoch < before_epoch AND NOT COALESCE(at_ms - before_ms >= shortest_ms, false)

-- name: producer_wrong
-- The state of a producer is its newest batch.
SELECT 'producer ' || producers.id || ' of stream ' || producers.stream,
       'its row says ' || producers.epoch || '.' || producers.seq || ' at ' || producers.position
       || ', the log ' || newest.epoch || '.' || newest.producer_seq || ' at ' || newest.position
FROM producers
JOIN (
    SELECT DISTINCT ON (stream, producer) stream, producer, epoch, producer_seq, position
    FROM log WHERE producer IS NOT NULL AND producer_seq IS NOT NULL AND digest IS NOT NULL
    ORDER BY stream, producer, position DESC
) AS newest ON newest.stream = producers.stream AND newest.producer = producers.id
WHERE (producers.epoch, producers.seq, producers.position)
      IS DISTINCT FROM (newest.epoch, newest.producer_seq, newest.position)

-- name: producer_without_batch
SELECT 'producer ' || id || ' of stream ' || stream,
       'its newest batch should be at position ' || position
FROM producers
WHERE NOT EXISTS (SELECT FROM log WHERE position = producers.position)
  AND NOT EXISTS (SELECT FROM purges WHERE stream = producers.stream AND last >= producers.position)

-- name: producer_without_stream
SELECT 'producer ' || id || ' of stream ' || stream, 'its stream does not exist'
FROM producers WHERE NOT EXISTS (SELECT FROM streams WHERE streams.id = producers.stream)

-- name: forks_count_wrong
SELECT 'stream ' || id || ' (' || path || ')', 'says ' || forks_count || ', there are ' || found
FROM (
    SELECT id, path, state, forks_count,
           (SELECT count(*) FROM streams AS forks
            WHERE forks.fork IS NOT NULL AND forks.state < 2
              AND (forks.fork::jsonb ->> 0)::bigint = streams.id) AS found
    FROM streams
) AS counted
WHERE forks_count <> found AND NOT (state = 2 AND forks_count = 0)

-- name: key_beyond_tail
SELECT 'key ' || keys.key || ' of stream ' || keys.stream, 'its append ends behind the tail'
FROM keys JOIN streams ON streams.id = keys.stream
WHERE keys.tail_bytes > streams.tail_bytes OR keys.tail_messages > streams.tail_messages

-- name: link_beyond_tail
SELECT 'subscription ' || links.subscription || ' on ' || links.path, 'its cursor is behind the tail'
FROM links JOIN streams ON streams.id = links.stream
WHERE links.acked_bytes > streams.tail_bytes OR links.acked_messages > streams.tail_messages

-- name: link_without_subscription
SELECT 'subscription ' || subscription || ' on ' || path, 'there is no such subscription'
FROM links WHERE NOT EXISTS (SELECT FROM subscriptions WHERE id = links.subscription)

-- name: weights_wrong
-- Stretches of the log that weigh something else than was written down.
SELECT 'positions from ' || bucket * $1::bigint,
       rows || ' rows of ' || bytes || ' bytes are noted, there are ' || rows_found || ' of '
       || bytes_found
FROM (
    SELECT bucket, rows, bytes, COALESCE(sum(count), 0) AS rows_found,
           COALESCE(sum(size), 0) AS bytes_found
    FROM log_buckets
    LEFT JOIN log ON position >= bucket * $1::bigint AND position < (bucket + 1) * $1::bigint
    GROUP BY bucket, rows, bytes
) AS weighed
WHERE rows_found <> rows OR bytes_found <> bytes
