-- Reading the global log. Columns are gathered inside SQLite, each into one value: a row of the log
-- becomes a Python object only when it is formatted. `/*rows*/` stands for one of the sources below.

-- name: source_scan
-- All rows in a range, in the order of their positions.
log NOT INDEXED WHERE position BETWEEN :low AND :high

-- name: source_part
log NOT INDEXED WHERE position BETWEEN :low AND :high AND stream % :parts = :part

-- name: source_streams
log NOT INDEXED WHERE position BETWEEN :low AND :high
    AND stream IN (SELECT value FROM json_each(:streams))

-- name: source_positions
-- Rows that are known by their positions.
log NOT INDEXED WHERE position IN (SELECT value FROM json_each(:positions))

-- name: sizes
-- Read the figures that decide how many rows fit, and which columns are worth fetching.
SELECT count(*), min(position), max(position), max(kind), max(count), count(producer),
       json_group_array(size)
FROM /*rows*/

-- name: positions
SELECT json_group_array(position) FROM /*rows*/

-- name: counts
SELECT json_group_array(count) FROM /*rows*/

-- name: kinds
SELECT json_group_array(kind) FROM /*rows*/

-- name: columns
-- Read one value for each column: an empty list for one that is not asked for.
SELECT json_group_array(stream), json_group_array(start_bytes),
       json_group_array(version) FILTER (WHERE :versions),
       json_group_array(at_ms) FILTER (WHERE :times),
       json_group_array(producer) FILTER (WHERE :sent),
       json_group_array(epoch) FILTER (WHERE :sent),
       json_group_array(producer_seq) FILTER (WHERE :sent)
FROM /*rows*/

-- name: columns_and_data
-- The same with the payloads of rows of one message each, one behind the other; markers have none.
-- One pass gathers everything, because going over the rows is a good part of the cost.
SELECT json_group_array(stream), json_group_array(start_bytes),
       json_group_array(version) FILTER (WHERE :versions),
       json_group_array(at_ms) FILTER (WHERE :times),
       json_group_array(producer) FILTER (WHERE :sent),
       json_group_array(epoch) FILTER (WHERE :sent),
       json_group_array(producer_seq) FILTER (WHERE :sent),
       CAST(COALESCE(group_concat(COALESCE(data, (SELECT data FROM chunks WHERE id = log.chunk)), ''),
                     '') AS BLOB),
       COALESCE(CAST(sum((CASE WHEN chunk IS NULL THEN checksum
            ELSE (SELECT checksum FROM chunks WHERE id = log.chunk) END) & 4294967295) AS bigint), 0),
       count(CASE WHEN chunk IS NULL THEN checksum
            ELSE (SELECT checksum FROM chunks WHERE id = log.chunk) END)
FROM /*rows*/

-- name: batches
-- The payloads of rows of any number of messages.
SELECT COALESCE(lengths, (SELECT lengths FROM chunks WHERE id = log.chunk)),
       COALESCE(data, (SELECT data FROM chunks WHERE id = log.chunk), x''),
       CASE WHEN chunk IS NULL THEN checksum
            ELSE (SELECT checksum FROM chunks WHERE id = log.chunk) END
FROM /*rows*/

-- name: names
SELECT id, path, content_type FROM streams WHERE id IN (SELECT value FROM json_each(:streams))

-- name: row_from_place
-- The first row of a stream that starts at a place or after it; answered from the index alone.
SELECT start_bytes, position FROM log INDEXED BY log_by_stream
WHERE stream = :stream AND kind = 0 AND start_bytes >= :place ORDER BY start_bytes LIMIT 1

-- name: row_up_to_place
SELECT start_bytes, position FROM log INDEXED BY log_by_stream
WHERE stream = :stream AND kind = 0 AND start_bytes <= :place ORDER BY start_bytes DESC LIMIT 1

-- name: positions_of_stream
SELECT position FROM log INDEXED BY log_by_stream
WHERE stream = :stream AND kind = 0 AND start_bytes >= :place ORDER BY start_bytes LIMIT :limit

-- name: source_stream
-- The messages of one stream from a place on, by its index.
log INDEXED BY log_by_stream
WHERE stream = :stream AND kind = 0 AND start_bytes >= :place AND position <= :high

-- name: source_markers
log INDEXED BY log_markers
WHERE stream = :stream AND kind <> 0 AND position BETWEEN :low AND :high

-- name: messages_of_streams
SELECT COALESCE(sum(tail_messages - first_messages), 0) FROM streams
WHERE id IN (SELECT value FROM json_each(:streams))

-- name: markers_of_stream
SELECT position FROM log INDEXED BY log_markers
WHERE stream = :stream AND kind <> 0 AND position BETWEEN :low AND :high ORDER BY position LIMIT :limit

-- name: bucket_sums
SELECT position / :width, sum(count), sum(size) FROM /*rows*/ GROUP BY 1 ORDER BY 1

-- name: weighed_messages
SELECT max(count), json_group_array(position), json_group_array(size) FROM /*rows*/

-- name: save_bucket
INSERT INTO log_buckets (bucket, rows, bytes) VALUES (?, ?, ?) ON CONFLICT DO NOTHING

-- name: reduce_bucket
UPDATE log_buckets SET rows = rows - ?, bytes = bytes - ? WHERE bucket = ?

-- name: purgeable_messages
SELECT position, count, size, chunk FROM log WHERE stream = ? AND kind = 0 ORDER BY start_bytes LIMIT ?

-- name: purgeable_markers
SELECT position, count, size, chunk FROM log WHERE stream = ? AND kind <> 0 ORDER BY position LIMIT ?

-- name: purge_row
DELETE FROM log WHERE position = ?

-- name: purge_chunk
-- Its digest stays as long as its part is known: a repeated commit is compared with it.
UPDATE chunks SET data = x'', lengths = NULL WHERE id = ?

-- name: save_purge
INSERT INTO purges (stream, path, first, last, runs)
SELECT id, path, ?2, ?3, ?4 FROM streams WHERE id = ?1

-- name: newest_purge
SELECT id, runs FROM purges
WHERE path = (SELECT path FROM streams WHERE id = ?1) AND stream = ?1 ORDER BY id DESC LIMIT 1

-- name: forget_purge
DELETE FROM purges WHERE id = ?

-- name: purges_of_paths
SELECT stream, path, first, last, runs FROM purges
WHERE path >= :first AND path < :last AND last >= :low AND +first <= :high
