-- What computed targets were told of: a row per target and event, until the target has got past the event.
-- Of the positions from `covers_from` up to `position`, only `position` is the target's. What was noted
-- before this step, or by a node that does not know it yet, has no rows: its events are still picked by the
-- workers.
CREATE TABLE told (
    group_id bigint NOT NULL,
    target text COLLATE "C" NOT NULL,
    position bigint NOT NULL,
    covers_from bigint NOT NULL,
    note text COLLATE "C" NOT NULL,
    PRIMARY KEY (group_id, target, position)
);

-- How many there are of each group, counted by the database itself, once for each statement.
CREATE TABLE told_counts (
    group_id bigint PRIMARY KEY,
    told bigint NOT NULL
) WITH (fillfactor = 50);
CREATE FUNCTION told_of() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO told_counts SELECT group_id, count(*) FROM changed GROUP BY group_id
    ON CONFLICT (group_id) DO UPDATE SET told = told_counts.told + excluded.told;
    RETURN NULL;
END $$;
CREATE TRIGGER told_of AFTER INSERT ON told REFERENCING NEW TABLE AS changed
FOR EACH STATEMENT EXECUTE FUNCTION told_of();
CREATE FUNCTION told_passed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE told_counts c SET told = c.told - n.gone
    FROM (SELECT group_id, count(*) AS gone FROM changed GROUP BY group_id) n
    WHERE c.group_id = n.group_id;
    RETURN NULL;
END $$;
CREATE TRIGGER told_passed AFTER DELETE ON told REFERENCING OLD TABLE AS changed
FOR EACH STATEMENT EXECUTE FUNCTION told_passed();
CREATE VIEW told_usage AS
SELECT g.owner AS principal, 'told_events'::text AS resource, c.told AS amount
FROM told_counts c JOIN groups g ON g.id = c.group_id WHERE g.state = 0 AND g.owner <> '';

-- The note that the target of a parked event was told of it with.
ALTER TABLE parked ADD COLUMN note text COLLATE "C";
