-- What each principal holds, for the shares of [shares]: counted by the database itself, in the
-- transaction that changes the rows, so that no way of removing rows can be forgotten.

ALTER TABLE streams ADD COLUMN owner TEXT NOT NULL DEFAULT '';  -- the principal that made it
ALTER TABLE meshes ADD COLUMN owner TEXT NOT NULL DEFAULT '';

CREATE TABLE principal_usage (
    principal TEXT NOT NULL,
    resource TEXT NOT NULL,
    amount INTEGER NOT NULL,
    PRIMARY KEY (principal, resource)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER usage_stream_made AFTER INSERT ON streams
WHEN new.owner <> '' AND new.state < 2
BEGIN
    INSERT INTO principal_usage VALUES (new.owner, 'streams', 1)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;

CREATE TRIGGER usage_stream_ended AFTER UPDATE OF state ON streams
WHEN old.state < 2 AND new.state = 2 AND old.owner <> ''
BEGIN
    INSERT INTO principal_usage VALUES (old.owner, 'streams', -1)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;

CREATE TRIGGER usage_producer_made AFTER INSERT ON producers
WHEN new.principal <> ''
BEGIN
    INSERT INTO principal_usage VALUES (new.principal, 'producers', 1)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;

CREATE TRIGGER usage_producer_ended AFTER DELETE ON producers
WHEN old.principal <> ''
BEGIN
    INSERT INTO principal_usage VALUES (old.principal, 'producers', -1)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;

CREATE TRIGGER usage_key_made AFTER INSERT ON keys
WHEN new.principal <> ''
BEGIN
    INSERT INTO principal_usage VALUES (new.principal, 'keys', 1)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;

CREATE TRIGGER usage_key_ended AFTER DELETE ON keys
WHEN old.principal <> ''
BEGIN
    INSERT INTO principal_usage VALUES (old.principal, 'keys', -1)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;

CREATE TRIGGER usage_writer_made AFTER INSERT ON writers
WHEN new.principal <> ''
BEGIN
    INSERT INTO principal_usage VALUES (new.principal, 'writers', 1)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;

CREATE TRIGGER usage_writer_ended AFTER DELETE ON writers
WHEN old.principal <> ''
BEGIN
    INSERT INTO principal_usage VALUES (old.principal, 'writers', -1)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;

CREATE TRIGGER usage_subscription_made AFTER INSERT ON subscriptions
WHEN new.principal <> ''
BEGIN
    INSERT INTO principal_usage VALUES (new.principal, 'subscriptions', 1)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;

CREATE TRIGGER usage_subscription_ended AFTER DELETE ON subscriptions
WHEN old.principal <> ''
BEGIN
    INSERT INTO principal_usage VALUES (old.principal, 'subscriptions', -1)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;

CREATE TRIGGER usage_producer_moved AFTER UPDATE OF principal ON producers
WHEN old.principal <> new.principal
BEGIN
    INSERT INTO principal_usage SELECT old.principal, 'producers', -1 WHERE old.principal <> ''
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
    INSERT INTO principal_usage SELECT new.principal, 'producers', 1 WHERE new.principal <> ''
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;

-- The name of a part's transaction begins with the principal that staged it, and the separator 31.

CREATE TRIGGER usage_part_made AFTER INSERT ON parts
WHEN new.committed IS NULL AND instr(new.txn, char(31)) > 0
BEGIN
    INSERT INTO principal_usage VALUES (substr(new.txn, 1, instr(new.txn, char(31)) - 1), 'parts', 1)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;

CREATE TRIGGER usage_part_committed AFTER UPDATE OF committed ON parts
WHEN old.committed IS NULL AND new.committed IS NOT NULL AND instr(old.txn, char(31)) > 0
BEGIN
    INSERT INTO principal_usage VALUES (substr(old.txn, 1, instr(old.txn, char(31)) - 1), 'parts', -1)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
    INSERT INTO principal_usage VALUES (substr(old.txn, 1, instr(old.txn, char(31)) - 1), 'staged_bytes', -(
        SELECT COALESCE(sum(size), 0) FROM chunks WHERE txn = old.txn AND part = old.part
    ))
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;

CREATE TRIGGER usage_part_dropped AFTER DELETE ON parts
WHEN old.committed IS NULL AND instr(old.txn, char(31)) > 0
BEGIN
    INSERT INTO principal_usage VALUES (substr(old.txn, 1, instr(old.txn, char(31)) - 1), 'parts', -1)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;

CREATE TRIGGER usage_chunk_made AFTER INSERT ON chunks
WHEN instr(new.txn, char(31)) > 0
BEGIN
    INSERT INTO principal_usage VALUES (substr(new.txn, 1, instr(new.txn, char(31)) - 1), 'staged_bytes', new.size)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;

CREATE TRIGGER usage_chunk_dropped AFTER DELETE ON chunks
WHEN instr(old.txn, char(31)) > 0 AND NOT EXISTS (
    SELECT 1 FROM parts p
    WHERE p.txn = old.txn AND p.part = old.part AND p.committed IS NOT NULL
)
BEGIN
    INSERT INTO principal_usage VALUES (substr(old.txn, 1, instr(old.txn, char(31)) - 1), 'staged_bytes', -old.size)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;

CREATE TRIGGER usage_group_made AFTER INSERT ON groups
WHEN new.state = 0 AND new.owner <> '' AND new.name NOT LIKE 'mesh:%'
BEGIN
    INSERT INTO principal_usage VALUES (new.owner, 'groups', 1)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
    INSERT INTO principal_usage VALUES (new.owner, 'targets', new.targets_count)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
    INSERT INTO principal_usage VALUES (new.owner, 'parked_events', new.parked_count)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;

CREATE TRIGGER usage_group_changed AFTER UPDATE OF state, targets_count, parked_count ON groups
WHEN old.state = 0 AND old.owner <> '' AND old.name NOT LIKE 'mesh:%'
 AND (new.state, new.targets_count, new.parked_count)
     <> (old.state, old.targets_count, old.parked_count)
BEGIN
    INSERT INTO principal_usage VALUES (old.owner, 'groups', (new.state = 0) - 1)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
    INSERT INTO principal_usage VALUES (old.owner, 'targets', CASE new.state WHEN 0 THEN new.targets_count ELSE 0 END - old.targets_count)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
    INSERT INTO principal_usage VALUES (old.owner, 'parked_events', CASE new.state WHEN 0 THEN new.parked_count ELSE 0 END - old.parked_count)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;

CREATE TRIGGER usage_mesh_owned AFTER UPDATE OF owner ON meshes
WHEN old.owner = '' AND new.owner <> ''
BEGIN
    INSERT INTO principal_usage VALUES (new.owner, 'meshes', 1)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;

CREATE TRIGGER usage_mesh_ended AFTER DELETE ON meshes
WHEN old.owner <> ''
BEGIN
    INSERT INTO principal_usage VALUES (old.owner, 'meshes', -1)
    ON CONFLICT DO UPDATE SET amount = amount + excluded.amount;
END;

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
SELECT substr(p.txn, 1, instr(p.txn, char(31)) - 1), 'parts', count(*) FROM parts p
WHERE p.committed IS NULL AND instr(p.txn, char(31)) > 0 GROUP BY 1
UNION ALL
SELECT substr(p.txn, 1, instr(p.txn, char(31)) - 1), 'staged_bytes', sum(c.size)
FROM parts p JOIN chunks c ON c.txn = p.txn AND c.part = p.part
WHERE p.committed IS NULL AND instr(p.txn, char(31)) > 0 GROUP BY 1
UNION ALL
SELECT owner, 'groups', count(*) FROM groups
WHERE state = 0 AND owner <> '' AND name NOT LIKE 'mesh:%' GROUP BY owner
UNION ALL
SELECT owner, 'targets', sum(targets_count) FROM groups
WHERE state = 0 AND owner <> '' AND name NOT LIKE 'mesh:%' GROUP BY owner
UNION ALL
SELECT owner, 'parked_events', sum(parked_count) FROM groups
WHERE state = 0 AND owner <> '' AND name NOT LIKE 'mesh:%' GROUP BY owner;
