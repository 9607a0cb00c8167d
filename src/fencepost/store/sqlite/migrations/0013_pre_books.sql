-- Books: where the log stood when the books of a stream were closed; NULL while they are open. No
-- message of the stream has this position or a later one.
ALTER TABLE streams ADD COLUMN books_closed_at INTEGER;

-- Targets that wait for events of a source. Those that are named as their source are found by name.
CREATE INDEX leases_waiting ON leases (source, waits_from)
WHERE at_position < work_to AND target <> source;
