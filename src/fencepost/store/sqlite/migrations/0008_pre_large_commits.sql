-- Commits too large for one transaction: decided whole, written down, then carried out in slices.

-- Positions from `first` up to `last` belong to the commit, and while it is under way nobody reads the
-- log beyond them. `state`: 0 it is being decided and may still come to nothing; 1 it is certain, and its
-- slices are on their way into the tables; 2 it was finished at a start, and whoever watches streams
-- has yet to be told.
CREATE TABLE large_commits (
    first INTEGER PRIMARY KEY,
    last INTEGER NOT NULL,
    state INTEGER NOT NULL
) STRICT;

-- What each slice writes: rows of the other tables, as MessagePack. A slice goes in the transaction
-- that carries it out; only at a start it stays, marked, until the watchers know of it.
CREATE TABLE large_slices (
    first INTEGER NOT NULL,       -- of its commit
    number INTEGER NOT NULL,
    carried INTEGER NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (first, number)
) STRICT;
