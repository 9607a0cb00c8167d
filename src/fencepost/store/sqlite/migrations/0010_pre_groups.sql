-- Groups of workers: one row per group, one per target with its lease, one per event set aside.

-- `state`: 0 live, 1 deleted (the upkeep removes its rows). `id` is the incarnation, from the same
-- numbers as the incarnations of streams, so that it is never used again.
CREATE TABLE groups (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    state INTEGER NOT NULL,
    settings TEXT NOT NULL,            -- JSON, in its canonical form
    start_position INTEGER NOT NULL,   -- the group begins behind this position
    watermark INTEGER NOT NULL,        -- the last position whose targets are known
    created_ms INTEGER NOT NULL,
    owner TEXT NOT NULL,               -- the principal that made it; empty without authorization
    targets_count INTEGER NOT NULL,
    parked_count INTEGER NOT NULL,
    lanes TEXT NOT NULL                -- JSON: the lanes that targets were ever in
) STRICT;
CREATE UNIQUE INDEX groups_by_name ON groups (name) WHERE state = 0;
CREATE INDEX groups_deleted ON groups (id) WHERE state = 1;

-- One row per target; see protocol/leases.py. The last two columns say by what a claim finds the row:
-- `state` is 0 without work, 1 ready, 2 leased or deferred (until `due_ms`), 3 blocked.
CREATE TABLE leases (
    group_id INTEGER NOT NULL,
    target TEXT NOT NULL,
    source TEXT NOT NULL,
    lane TEXT NOT NULL,
    priority INTEGER NOT NULL,
    at_position INTEGER NOT NULL,
    work_to INTEGER NOT NULL,
    waits_from INTEGER NOT NULL,
    token INTEGER NOT NULL,
    worker TEXT,
    lease_until_ms INTEGER NOT NULL,
    retry INTEGER NOT NULL,
    lost INTEGER NOT NULL,
    blocked INTEGER NOT NULL,
    error TEXT,
    failed INTEGER,
    deferred_until_ms INTEGER NOT NULL,
    replaying INTEGER NOT NULL,
    updated_ms INTEGER NOT NULL,
    state INTEGER NOT NULL,
    due_ms INTEGER NOT NULL,
    PRIMARY KEY (group_id, target)
) STRICT, WITHOUT ROWID;
CREATE INDEX leases_urgent ON leases (group_id, lane, priority DESC, waits_from) WHERE state = 1;
CREATE INDEX leases_oldest ON leases (group_id, lane, waits_from) WHERE state = 1;
CREATE INDEX leases_due ON leases (group_id, lane, due_ms) WHERE state = 2;
CREATE INDEX leases_blocked ON leases (group_id, target) WHERE state = 3;

-- Events that were set aside so that their target could go on. `replaying`: given out again.
CREATE TABLE parked (
    group_id INTEGER NOT NULL,
    target TEXT NOT NULL,
    position INTEGER NOT NULL,
    source TEXT NOT NULL,
    error TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    parked_ms INTEGER NOT NULL,
    replaying INTEGER NOT NULL,
    PRIMARY KEY (group_id, target, position)
) STRICT, WITHOUT ROWID;
