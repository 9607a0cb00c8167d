-- Meshes, the members of topics, and what is remembered of each send. Topics, inboxes and queues are
-- streams below `__mesh`, and have no rows beside those of streams.

-- `state`: 0 live, 1 being deleted, 2 deleted but for its dedupe rows. `id` is from the same numbers as the incarnations of streams.
CREATE TABLE meshes (
    id bigint PRIMARY KEY,
    name text COLLATE "C" NOT NULL,
    state bigint NOT NULL,
    settings text COLLATE "C" NOT NULL,     -- JSON
    created_ms bigint NOT NULL
);
CREATE UNIQUE INDEX meshes_by_name ON meshes (name) WHERE state < 2;
CREATE INDEX meshes_deleted ON meshes (id) WHERE state > 0;

CREATE TABLE topic_members (
    mesh bigint NOT NULL,
    topic text COLLATE "C" NOT NULL,
    member text COLLATE "C" NOT NULL,
    created_ms bigint NOT NULL,
    PRIMARY KEY (mesh, topic, member)
);
CREATE INDEX topic_members_by_member ON topic_members (mesh, member);

-- The dedupe row of each send.
CREATE TABLE sends (
    mesh bigint NOT NULL,
    sender text COLLATE "C" NOT NULL,
    client_id text COLLATE "C" NOT NULL,
    fingerprint bytea NOT NULL,
    kind text COLLATE "C" NOT NULL,
    ref text COLLATE "C" NOT NULL,
    stream bigint NOT NULL,    -- the incarnation of the stream that has the message
    messages bigint NOT NULL,  -- the offset of the message there
    bytes bigint NOT NULL,
    first_seen_ms bigint NOT NULL,
    expires_ms bigint,         -- null: never swept
    PRIMARY KEY (mesh, sender, client_id)
);
CREATE INDEX sends_expiring ON sends (expires_ms) WHERE expires_ms IS NOT NULL;
