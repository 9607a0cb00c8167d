-- A large commit is written by a transaction of its own, beside the turns of everybody. It holds what it
-- names until it ends, so that nobody else decides about that. `large` is its number while one is under
-- way, and an advisory lock of its session says that it lives; `large_turn` is the turn in which it took
-- its positions, which `large_commits` holds. Servers of the version before know nothing of it: they keep
-- to the end of the log that `large_commits` says, and their writes to what it has locked wait, or fail.
ALTER TABLE counters ADD COLUMN large bigint, ADD COLUMN large_turn bigint;
CREATE SEQUENCE large_numbers AS integer CYCLE;

-- What large commits hold: names as numbers of 64 bits, since two names with one number only wait for
-- each other. Not logged: when the database crashes, so do the commits.
CREATE UNLOGGED TABLE held (
    large bigint NOT NULL,
    mark bigint NOT NULL,
    PRIMARY KEY (large, mark)
);

-- A turn in which a large commit ended shows what was appended after turn `since` to readers of the log.
-- It tells of many streams while everybody waits, so time is not spent on compressing them.
ALTER TABLE turns ADD COLUMN since bigint;
ALTER TABLE turns ALTER COLUMN streams SET STORAGE EXTERNAL, ALTER COLUMN created SET STORAGE EXTERNAL;
