-- What computed targets were told of: a row per target and event, until the target has got past the event.
-- Of the positions from `covers_from` up to `position`, only `position` is the target's. What was noted
-- before this step has no rows: its events are still picked by the workers.
CREATE TABLE told (
    group_id INTEGER NOT NULL,
    target TEXT NOT NULL,
    position INTEGER NOT NULL,
    covers_from INTEGER NOT NULL,
    note TEXT NOT NULL,
    PRIMARY KEY (group_id, target, position)
) STRICT, WITHOUT ROWID;

-- How many there are of each group, counted by the database itself.
CREATE TABLE told_counts (
    group_id INTEGER PRIMARY KEY,
    told INTEGER NOT NULL
) STRICT;
CREATE TRIGGER told_of AFTER INSERT ON told
BEGIN
    INSERT INTO told_counts VALUES (new.group_id, 1) ON CONFLICT DO UPDATE SET told = told + 1;
END;
CREATE TRIGGER told_passed AFTER DELETE ON told
BEGIN
    UPDATE told_counts SET told = told - 1 WHERE group_id = old.group_id;
END;
CREATE VIEW told_usage AS
SELECT g.owner AS principal, 'told_events' AS resource, c.told AS amount
FROM told_counts c JOIN groups g ON g.id = c.group_id WHERE g.state = 0 AND g.owner <> '';

-- The note that the target of a parked event was told of it with.
ALTER TABLE parked ADD COLUMN note TEXT;
