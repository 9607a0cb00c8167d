-- A checksum for each row of the log and each staged chunk (docs/adr/0025-checksums.md). Rows that are
-- there already, and those that a node of the version before writes, have none.

ALTER TABLE log ADD COLUMN checksum bigint;
ALTER TABLE chunks ADD COLUMN checksum bigint;
