-- The numbers of leases only grow: a row that is made again begins above the number of every row of its
-- group that is gone. What rows of older groups had is not known, so these begin above all of them.
ALTER TABLE groups ADD COLUMN token_floor INTEGER NOT NULL DEFAULT 1000000;
