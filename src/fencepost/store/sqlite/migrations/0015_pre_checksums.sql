-- A checksum for each row of the log and each staged chunk (docs/adr/0025-checksums.md). Rows that are
-- there already have none.

ALTER TABLE log ADD COLUMN checksum INTEGER;
ALTER TABLE chunks ADD COLUMN checksum INTEGER;
