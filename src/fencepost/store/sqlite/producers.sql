-- Producers in the embedded store: the row of one that only sent its next batch.

-- name: advance_producer
-- No trigger has these columns, and no index.
UPDATE producers SET seq = ?, position = ?, updated_ms = ? WHERE stream = ? AND id = ?
