-- What each principal holds, for the shares of [shares]: noted by the database itself, in the
-- transaction that changes the rows, so that no way of removing rows can be forgotten. Every change is
-- a row of its own, because a row that two transactions change would make one wait for the other; the
-- leading node folds them together now and then.

ALTER TABLE streams ADD COLUMN owner text COLLATE "C" NOT NULL DEFAULT '';  -- the principal that made it
ALTER TABLE meshes ADD COLUMN owner text COLLATE "C" NOT NULL DEFAULT '';

CREATE TABLE principal_usage (
    principal text COLLATE "C" NOT NULL,
    resource text COLLATE "C" NOT NULL,
    amount bigint NOT NULL
);
CREATE INDEX principal_usage_of ON principal_usage (principal);

CREATE FUNCTION usage_stream_made() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO principal_usage VALUES (new.owner, 'streams', 1);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_stream_made AFTER INSERT ON streams FOR EACH ROW
WHEN (new.owner <> '' AND new.state < 2) EXECUTE FUNCTION usage_stream_made();

CREATE FUNCTION usage_stream_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO principal_usage VALUES (old.owner, 'streams', -1);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_stream_ended AFTER UPDATE ON streams FOR EACH ROW
WHEN (old.state < 2 AND new.state = 2 AND old.owner <> '') EXECUTE FUNCTION usage_stream_ended();

CREATE FUNCTION usage_producer_made() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO principal_usage VALUES (new.principal, 'producers', 1);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_producer_made AFTER INSERT ON producers FOR EACH ROW
WHEN (new.principal <> '') EXECUTE FUNCTION usage_producer_made();

CREATE FUNCTION usage_producer_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO principal_usage VALUES (old.principal, 'producers', -1);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_producer_ended AFTER DELETE ON producers FOR EACH ROW
WHEN (old.principal <> '') EXECUTE FUNCTION usage_producer_ended();

CREATE FUNCTION usage_key_made() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO principal_usage VALUES (new.principal, 'keys', 1);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_key_made AFTER INSERT ON keys FOR EACH ROW
WHEN (new.principal <> '') EXECUTE FUNCTION usage_key_made();

CREATE FUNCTION usage_key_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO principal_usage VALUES (old.principal, 'keys', -1);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_key_ended AFTER DELETE ON keys FOR EACH ROW
WHEN (old.principal <> '') EXECUTE FUNCTION usage_key_ended();

CREATE FUNCTION usage_writer_made() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO principal_usage VALUES (new.principal, 'writers', 1);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_writer_made AFTER INSERT ON writers FOR EACH ROW
WHEN (new.principal <> '') EXECUTE FUNCTION usage_writer_made();

CREATE FUNCTION usage_writer_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO principal_usage VALUES (old.principal, 'writers', -1);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_writer_ended AFTER DELETE ON writers FOR EACH ROW
WHEN (old.principal <> '') EXECUTE FUNCTION usage_writer_ended();

CREATE FUNCTION usage_subscription_made() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO principal_usage VALUES (new.principal, 'subscriptions', 1);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_subscription_made AFTER INSERT ON subscriptions FOR EACH ROW
WHEN (new.principal <> '') EXECUTE FUNCTION usage_subscription_made();

CREATE FUNCTION usage_subscription_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO principal_usage VALUES (old.principal, 'subscriptions', -1);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_subscription_ended AFTER DELETE ON subscriptions FOR EACH ROW
WHEN (old.principal <> '') EXECUTE FUNCTION usage_subscription_ended();

CREATE FUNCTION usage_producer_moved() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO principal_usage VALUES (old.principal, 'producers', -1);
    INSERT INTO principal_usage VALUES (new.principal, 'producers', 1);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_producer_moved AFTER UPDATE ON producers FOR EACH ROW
WHEN (old.principal <> new.principal) EXECUTE FUNCTION usage_producer_moved();

-- The name of a part's transaction begins with the principal that staged it, and the separator 31.

CREATE FUNCTION usage_part_made() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO principal_usage VALUES (split_part(new.txn, chr(31), 1), 'parts', 1);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_part_made AFTER INSERT ON parts FOR EACH ROW
WHEN (new.committed IS NULL AND strpos(new.txn, chr(31)) > 0) EXECUTE FUNCTION usage_part_made();

CREATE FUNCTION usage_part_committed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO principal_usage VALUES (split_part(old.txn, chr(31), 1), 'parts', -1);
    INSERT INTO principal_usage VALUES (split_part(old.txn, chr(31), 1), 'staged_bytes', -(
        SELECT COALESCE(sum(size), 0) FROM chunks WHERE txn = old.txn AND part = old.part
    ));
    RETURN NULL;
END $$;
CREATE TRIGGER usage_part_committed AFTER UPDATE ON parts FOR EACH ROW
WHEN (old.committed IS NULL AND new.committed IS NOT NULL AND strpos(old.txn, chr(31)) > 0) EXECUTE FUNCTION usage_part_committed();

CREATE FUNCTION usage_part_dropped() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO principal_usage VALUES (split_part(old.txn, chr(31), 1), 'parts', -1);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_part_dropped AFTER DELETE ON parts FOR EACH ROW
WHEN (old.committed IS NULL AND strpos(old.txn, chr(31)) > 0) EXECUTE FUNCTION usage_part_dropped();

CREATE FUNCTION usage_chunk_made() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO principal_usage VALUES (split_part(new.txn, chr(31), 1), 'staged_bytes', new.size);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_chunk_made AFTER INSERT ON chunks FOR EACH ROW
WHEN (strpos(new.txn, chr(31)) > 0) EXECUTE FUNCTION usage_chunk_made();

CREATE FUNCTION usage_chunk_dropped() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (
        SELECT 1 FROM parts p
        WHERE p.txn = old.txn AND p.part = old.part AND p.committed IS NOT NULL
    ) THEN
        INSERT INTO principal_usage VALUES (split_part(old.txn, chr(31), 1), 'staged_bytes', -old.size);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER usage_chunk_dropped AFTER DELETE ON chunks FOR EACH ROW
WHEN (strpos(old.txn, chr(31)) > 0) EXECUTE FUNCTION usage_chunk_dropped();

CREATE FUNCTION usage_group_made() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO principal_usage VALUES (new.owner, 'groups', 1);
    INSERT INTO principal_usage VALUES (new.owner, 'targets', new.targets_count);
    INSERT INTO principal_usage VALUES (new.owner, 'parked_events', new.parked_count);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_group_made AFTER INSERT ON groups FOR EACH ROW
WHEN (new.state = 0 AND new.owner <> '' AND new.name NOT LIKE 'mesh:%') EXECUTE FUNCTION usage_group_made();

CREATE FUNCTION usage_group_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO principal_usage VALUES (old.owner, 'groups', CASE new.state WHEN 0 THEN 0 ELSE -1 END);
    INSERT INTO principal_usage VALUES (old.owner, 'targets', CASE new.state WHEN 0 THEN new.targets_count ELSE 0 END - old.targets_count);
    INSERT INTO principal_usage VALUES (old.owner, 'parked_events', CASE new.state WHEN 0 THEN new.parked_count ELSE 0 END - old.parked_count);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_group_changed AFTER UPDATE ON groups FOR EACH ROW
WHEN (old.state = 0 AND old.owner <> '' AND old.name NOT LIKE 'mesh:%'
      AND (new.state, new.targets_count, new.parked_count)
          <> (old.state, old.targets_count, old.parked_count)) EXECUTE FUNCTION usage_group_changed();

CREATE FUNCTION usage_mesh_owned() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO principal_usage VALUES (new.owner, 'meshes', 1);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_mesh_owned AFTER UPDATE ON meshes FOR EACH ROW
WHEN (old.owner = '' AND new.owner <> '') EXECUTE FUNCTION usage_mesh_owned();

CREATE FUNCTION usage_mesh_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO principal_usage VALUES (old.owner, 'meshes', -1);
    RETURN NULL;
END $$;
CREATE TRIGGER usage_mesh_ended AFTER DELETE ON meshes FOR EACH ROW
WHEN (old.owner <> '') EXECUTE FUNCTION usage_mesh_ended();

-- What there is already. A stream that was made before this step belongs to no principal.
INSERT INTO principal_usage
SELECT principal, 'producers', count(*) FROM producers WHERE principal <> '' GROUP BY principal
UNION ALL
SELECT principal, 'keys', count(*) FROM keys WHERE principal <> '' GROUP BY principal
UNION ALL
SELECT principal, 'writers', count(*) FROM writers WHERE principal <> '' GROUP BY principal
UNION ALL
SELECT principal, 'subscriptions', count(*) FROM subscriptions WHERE principal <> '' GROUP BY principal
UNION ALL
SELECT split_part(p.txn, chr(31), 1), 'parts', count(*) FROM parts p
WHERE p.committed IS NULL AND strpos(p.txn, chr(31)) > 0 GROUP BY 1
UNION ALL
SELECT split_part(p.txn, chr(31), 1), 'staged_bytes', sum(c.size)
FROM parts p JOIN chunks c ON c.txn = p.txn AND c.part = p.part
WHERE p.committed IS NULL AND strpos(p.txn, chr(31)) > 0 GROUP BY 1
UNION ALL
SELECT owner, 'groups', count(*) FROM groups
WHERE state = 0 AND owner <> '' AND name NOT LIKE 'mesh:%' GROUP BY owner
UNION ALL
SELECT owner, 'targets', sum(targets_count) FROM groups
WHERE state = 0 AND owner <> '' AND name NOT LIKE 'mesh:%' GROUP BY owner
UNION ALL
SELECT owner, 'parked_events', sum(parked_count) FROM groups
WHERE state = 0 AND owner <> '' AND name NOT LIKE 'mesh:%' GROUP BY owner;
