-- Groups of workers: one row per group, one per target with its lease, one per event set aside.

-- `state`: 0 live, 1 deleted (the upkeep removes its rows). `id` is the incarnation, from the same
-- numbers as the incarnations of streams, so that it is never used again.
CREATE TABLE groups (
    id bigint PRIMARY KEY,
    name text COLLATE "C" NOT NULL,
    state bigint NOT NULL,
    settings text COLLATE "C" NOT NULL,            -- JSON, in its canonical form
    start_position bigint NOT NULL,   -- the group begins behind this position
    watermark bigint NOT NULL,        -- the last position whose targets are known
    created_ms bigint NOT NULL,
    owner text COLLATE "C" NOT NULL,               -- the principal that made it; empty without authorization
    targets_count bigint NOT NULL,
    parked_count bigint NOT NULL,
    lanes text COLLATE "C" NOT NULL                -- JSON: the lanes that targets were ever in
);
CREATE UNIQUE INDEX groups_by_name ON groups (name) WHERE state = 0;
CREATE INDEX groups_deleted ON groups (id) WHERE state = 1;

-- One row per target; see protocol/leases.py. The last two columns say by what a claim finds the row:
-- `state` is 0 without work, 1 ready, 2 leased or deferred (until `due_ms`), 3 blocked.
CREATE TABLE leases (
    group_id bigint NOT NULL,
    target text COLLATE "C" NOT NULL,
    source text COLLATE "C" NOT NULL,
    lane text COLLATE "C" NOT NULL,
    priority bigint NOT NULL,
    at_position bigint NOT NULL,
    work_to bigint NOT NULL,
    waits_from bigint NOT NULL,
    token bigint NOT NULL,
    worker text COLLATE "C",
    lease_until_ms bigint NOT NULL,
    retry bigint NOT NULL,
    lost bigint NOT NULL,
    blocked boolean NOT NULL,
    error text COLLATE "C",
    failed bigint,
    deferred_until_ms bigint NOT NULL,
    replaying bigint NOT NULL,
    updated_ms bigint NOT NULL,
    state bigint NOT NULL,
    due_ms bigint NOT NULL,
    PRIMARY KEY (group_id, target)
) WITH (fillfactor = 70);
CREATE INDEX leases_urgent ON leases (group_id, lane, priority DESC, waits_from) WHERE state = 1;
CREATE INDEX leases_oldest ON leases (group_id, lane, waits_from) WHERE state = 1;
CREATE INDEX leases_due ON leases (group_id, lane, due_ms) WHERE state = 2;
CREATE INDEX leases_blocked ON leases (group_id, target) WHERE state = 3;

-- Events that were set aside so that their target could go on. `replaying`: given out again.
CREATE TABLE parked (
    group_id bigint NOT NULL,
    target text COLLATE "C" NOT NULL,
    position bigint NOT NULL,
    source text COLLATE "C" NOT NULL,
    error text COLLATE "C" NOT NULL,
    attempts bigint NOT NULL,
    parked_ms bigint NOT NULL,
    replaying boolean NOT NULL,
    PRIMARY KEY (group_id, target, position)
);
