-- Rows of streams and producers are written behind the log: from the position `written_to` on, rows of the
-- log say where streams end and which batch of a producer is the newest, and the tables may not.

CREATE TABLE behind (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    written_to INTEGER NOT NULL
) STRICT;
INSERT INTO behind SELECT 1, next_position FROM counters;

-- Where streams end by those rows of the log.
CREATE VIEW tails_behind AS
SELECT stream, max(version + count) AS tail_messages, max(start_bytes + size) AS tail_bytes,
       max(at_ms) AS updated_ms
FROM log NOT INDEXED
WHERE position >= (SELECT written_to FROM behind) AND kind = 0
GROUP BY stream;

-- The newest batch of each producer in them: the other columns are those of the row with that position.
CREATE VIEW batches_behind AS
SELECT stream, producer, max(position) AS position, epoch, producer_seq AS seq, at_ms
FROM log NOT INDEXED
WHERE position >= (SELECT written_to FROM behind) AND producer IS NOT NULL AND digest IS NOT NULL
GROUP BY stream, producer;

-- The streams with that laid over them.
CREATE VIEW streams_now AS
SELECT s.id, s.path, s.state, s.content_type, s.created_ms,
       max(s.updated_ms, COALESCE(b.updated_ms, 0)) AS updated_ms, s.ttl_s, s.expires_at_ms,
       s.deadline_ms, max(s.tail_messages, COALESCE(b.tail_messages, 0)) AS tail_messages,
       max(s.tail_bytes, COALESCE(b.tail_bytes, 0)) AS tail_bytes, s.first_messages, s.first_bytes,
       s.closed, s.closed_by, s.seq, s.fork, s.segments, s.forks_count, s.ended_ms, s.retention,
       s.books_closed_at, s.owner
FROM streams s LEFT JOIN tails_behind b ON b.stream = s.id;
