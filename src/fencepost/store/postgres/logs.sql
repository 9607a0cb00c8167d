-- Reading the global log. Columns are gathered inside the database, each into one value: a row of the
-- log becomes a Python object only when it is formatted. `/*rows*/` stands for one of the sources
-- below, each of which gives its rows in order: an aggregate over a sorted subquery keeps to that.

-- name: source_scan
-- All rows in a range, in the order of their positions.
(SELECT * FROM log WHERE position BETWEEN :low AND :high ORDER BY position) AS log

-- name: source_part
(SELECT * FROM log WHERE position BETWEEN :low AND :high AND stream % :parts = :part
 ORDER BY position) AS log

-- name: source_streams
(SELECT * FROM log WHERE position BETWEEN :low AND :high
    AND stream = ANY (ARRAY(SELECT json_array_elements_text(:streams::json)::bigint))
 ORDER BY position) AS log

-- name: source_positions
-- Rows that are known by their positions.
(SELECT * FROM log
 WHERE position = ANY (ARRAY(SELECT json_array_elements_text(:positions::json)::bigint))
 ORDER BY position) AS log

-- name: sizes
-- Read the figures that decide how many rows fit, and which columns are worth fetching.
SELECT count(*), min(position), max(position), max(kind), max(count), count(producer),
       COALESCE(array_to_json(array_agg(size))::text, '[]')
FROM /*rows*/

-- name: positions
SELECT COALESCE(array_to_json(array_agg(position))::text, '[]') FROM /*rows*/

-- name: counts
SELECT COALESCE(array_to_json(array_agg(count))::text, '[]') FROM /*rows*/

-- name: kinds
SELECT COALESCE(array_to_json(array_agg(kind))::text, '[]') FROM /*rows*/

-- name: columns
-- Read one value for each column: an empty list for one that is not asked for.
SELECT COALESCE(array_to_json(array_agg(stream))::text, '[]'),
       COALESCE(array_to_json(array_agg(start_bytes))::text, '[]'),
       COALESCE(array_to_json(array_agg(version) FILTER (WHERE :versions))::text, '[]'),
       COALESCE(array_to_json(array_agg(at_ms) FILTER (WHERE :times))::text, '[]'),
       COALESCE(array_to_json(array_agg(producer) FILTER (WHERE :sent))::text, '[]'),
       COALESCE(array_to_json(array_agg(epoch) FILTER (WHERE :sent))::text, '[]'),
       COALESCE(array_to_json(array_agg(producer_seq) FILTER (WHERE :sent))::text, '[]')
FROM /*rows*/

-- name: columns_and_data
-- The same with the payloads of rows of one message each, one behind the other; markers have none.
-- One pass gathers everything, because going over the rows is a good part of the cost.
SELECT COALESCE(array_to_json(array_agg(stream))::text, '[]'),
       COALESCE(array_to_json(array_agg(start_bytes))::text, '[]'),
       COALESCE(array_to_json(array_agg(version) FILTER (WHERE :versions))::text, '[]'),
       COALESCE(array_to_json(array_agg(at_ms) FILTER (WHERE :times))::text, '[]'),
       COALESCE(array_to_json(array_agg(producer) FILTER (WHERE :sent))::text, '[]'),
       COALESCE(array_to_json(array_agg(epoch) FILTER (WHERE :sent))::text, '[]'),
       COALESCE(array_to_json(array_agg(producer_seq) FILTER (WHERE :sent))::text, '[]'),
       COALESCE(
           string_agg(COALESCE(data, (SELECT data FROM chunks WHERE id = log.chunk)), ''::bytea),
           ''::bytea
       ),
       COALESCE(CAST(sum((CASE WHEN chunk IS NULL THEN checksum
            ELSE (SELECT checksum FROM chunks WHERE id = log.chunk) END) & 4294967295) AS bigint), 0),
       count(CASE WHEN chunk IS NULL THEN checksum
            ELSE (SELECT checksum FROM chunks WHERE id = log.chunk) END)
FROM /*rows*/

-- name: batches
-- The payloads of rows of any number of messages.
SELECT COALESCE(lengths, (SELECT lengths FROM chunks WHERE id = log.chunk)),
       COALESCE(data, (SELECT data FROM chunks WHERE id = log.chunk), ''::bytea),
       CASE WHEN chunk IS NULL THEN checksum
            ELSE (SELECT checksum FROM chunks WHERE id = log.chunk) END
FROM /*rows*/

-- name: names
SELECT id, path, content_type FROM streams
WHERE id = ANY (ARRAY(SELECT json_array_elements_text(:streams::json)::bigint))

-- name: row_from_place
-- The first row of a stream that starts at a place or after it.
SELECT start_bytes, position FROM log
WHERE stream = :stream AND kind = 0 AND start_bytes >= :place ORDER BY start_bytes LIMIT 1

-- name: row_up_to_place
SELECT start_bytes, position FROM log
WHERE stream = :stream AND kind = 0 AND start_bytes <= :place ORDER BY start_bytes DESC LIMIT 1

-- name: positions_of_stream
SELECT position FROM log
WHERE stream = :stream AND kind = 0 AND start_bytes >= :place ORDER BY start_bytes LIMIT :limit

-- name: source_stream
-- The messages of one stream from a place on, by its index.
(SELECT * FROM log
 WHERE stream = :stream AND kind = 0 AND start_bytes >= :place AND position <= :high
 ORDER BY start_bytes) AS log

-- name: source_markers
(SELECT * FROM log
 WHERE stream = :stream AND kind <> 0 AND position BETWEEN :low AND :high
 ORDER BY position) AS log

-- name: messages_of_streams
SELECT COALESCE(sum(tail_messages - first_messages), 0)::bigint FROM streams
WHERE id = ANY (ARRAY(SELECT json_array_elements_text(:streams::json)::bigint))

-- name: markers_of_stream
SELECT position FROM log
WHERE stream = :stream AND kind <> 0 AND position BETWEEN :low AND :high
ORDER BY position LIMIT :limit

-- name: bucket_sums
SELECT position / :width, sum(count)::bigint, sum(size)::bigint FROM /*rows*/ GROUP BY 1 ORDER BY 1

-- name: weighed_messages
SELECT max(count), COALESCE(array_to_json(array_agg(position))::text, '[]'),
       COALESCE(array_to_json(array_agg(size))::text, '[]')
FROM /*rows*/

-- name: save_bucket
INSERT INTO log_buckets (bucket, rows, bytes)
SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[])
ON CONFLICT DO NOTHING

-- name: reduce_bucket
UPDATE log_buckets AS b SET rows = b.rows - n.rows, bytes = b.bytes - n.bytes
FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS n (rows, bytes, bucket)
WHERE b.bucket = n.bucket

-- name: purgeable_messages
SELECT position, count, size, chunk FROM log
WHERE stream = $1 AND kind = 0 ORDER BY start_bytes LIMIT $2

-- name: purgeable_markers
SELECT position, count, size, chunk FROM log
WHERE stream = $1 AND kind <> 0 ORDER BY position LIMIT $2

-- name: purge_row
DELETE FROM log USING unnest($1::bigint[]) AS gone (place) WHERE log.position = gone.place

-- name: purge_chunk
-- Their digests stay as long as their part is known: a repeated commit is compared with them.
UPDATE chunks SET data = ''::bytea, lengths = NULL
FROM unnest($1::bigint[]) AS gone (chunk) WHERE chunks.id = gone.chunk

-- name: save_purge
INSERT INTO purges (stream, path, first, last, runs)
SELECT id, path, $2, $3, $4 FROM streams WHERE id = $1

-- name: newest_purge
SELECT id, runs FROM purges
WHERE path = (SELECT path FROM streams WHERE id = $1) AND stream = $1 ORDER BY id DESC LIMIT 1

-- name: forget_purge
DELETE FROM purges WHERE id = $1

-- name: purges_of_paths
SELECT stream, path, first, last, runs FROM purges
WHERE path >= :first AND path < :last AND last >= :low AND first <= :high
