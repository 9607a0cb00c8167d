-- Meshes, the members of topics, and what is remembered of each send. Topics, inboxes and queues are
-- streams below `__mesh`, and have no rows beside those of streams.

-- `state`: 0 live, 1 being deleted, 2 deleted but for its dedupe rows. `id` is from the same numbers as the incarnations of streams.
CREATE TABLE meshes (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    state INTEGER NOT NULL,
    settings TEXT NOT NULL,     -- JSON
    created_ms INTEGER NOT NULL
) STRICT;
CREATE UNIQUE INDEX meshes_by_name ON meshes (name) WHERE state < 2;
CREATE INDEX meshes_deleted ON meshes (id) WHERE state > 0;

CREATE TABLE topic_members (
    mesh INTEGER NOT NULL,
    topic TEXT NOT NULL,
    member TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    PRIMARY KEY (mesh, topic, member)
) STRICT, WITHOUT ROWID;
CREATE INDEX topic_members_by_member ON topic_members (mesh, member);

-- The dedupe row of each send, in the order of use; where it is found is written behind (see `keys`).
CREATE TABLE sends (
    id INTEGER PRIMARY KEY,
    mesh INTEGER NOT NULL,
    sender TEXT NOT NULL,
    client_id TEXT NOT NULL,
    fingerprint BLOB NOT NULL,
    kind TEXT NOT NULL,
    ref TEXT NOT NULL,
    stream INTEGER NOT NULL,    -- the incarnation of the stream that has the message
    messages INTEGER NOT NULL,  -- the offset of the message there
    bytes INTEGER NOT NULL,
    first_seen_ms INTEGER NOT NULL,
    expires_ms INTEGER          -- null: never swept
) STRICT;
-- Rows of one mesh expire in the order in which they came, so an insert goes to the end of a run.
CREATE INDEX sends_expiring ON sends (expires_ms) WHERE expires_ms IS NOT NULL;

CREATE TABLE send_places (
    mesh INTEGER NOT NULL,
    sender TEXT NOT NULL,
    client_id TEXT NOT NULL,
    id INTEGER NOT NULL,
    PRIMARY KEY (mesh, sender, client_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE send_index (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    indexed_to INTEGER NOT NULL
) STRICT;
INSERT INTO send_index VALUES (1, 0);

CREATE TRIGGER sends_deleted AFTER DELETE ON sends BEGIN
    DELETE FROM send_places
    WHERE mesh = old.mesh AND sender = old.sender AND client_id = old.client_id AND id = old.id;
    UPDATE send_index SET indexed_to = (SELECT COALESCE(max(id), 0) FROM sends)
    WHERE indexed_to > (SELECT COALESCE(max(id), 0) FROM sends);
END;
