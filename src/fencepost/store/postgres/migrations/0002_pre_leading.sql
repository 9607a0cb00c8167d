-- Who leads is written in the row that every turn begins with: whoever writes as the leader finds
-- there, under the lock, whether it still is.
ALTER TABLE counters ADD COLUMN leader text COLLATE "C" NOT NULL DEFAULT '';

-- No server has ever used it: the leader is the one that the counters name.
ALTER TABLE nodes DROP COLUMN leads;

-- The turn up to which the subscriptions know of streams that were made and ended. A new leader goes
-- on from here; turns after it are not dropped.
CREATE TABLE followed (
    id bigint PRIMARY KEY CHECK (id = 1),
    turn bigint NOT NULL
);
INSERT INTO followed VALUES (1, 0);
