-- Subscriptions: who wants to be woken, where each stands, and how far it is in every stream.

-- One row per incarnation; AUTOINCREMENT, so that the number of a deleted one never comes back and a
-- token of it never fits another. From `generation` on, the columns are the state of the current wake:
-- without a `wake_id` there is none. `next_attempt_ms` is when it is (again) to be delivered;
-- `lease_until_ms` counts only while that is null.
CREATE TABLE subscriptions (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    config TEXT NOT NULL,         -- JSON, in its canonical form
    base_url TEXT NOT NULL,       -- scheme and host that the client used: callbacks go there
    created_ms INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    wake_id TEXT,
    holder TEXT,
    lease_until_ms INTEGER,
    attempts INTEGER NOT NULL,
    next_attempt_ms INTEGER,
    snapshot TEXT NOT NULL        -- JSON: [[path, stream id, messages, bytes], ...]
) STRICT;

-- A stream that a subscription watches, and the cursor in it. `stream` is the incarnation that the
-- cursor belongs to, null for an explicit link whose stream does not exist.
CREATE TABLE links (
    subscription INTEGER NOT NULL,
    path TEXT NOT NULL,
    explicit INTEGER NOT NULL,
    glob INTEGER NOT NULL,
    stream INTEGER,
    acked_messages INTEGER NOT NULL,
    acked_bytes INTEGER NOT NULL,
    PRIMARY KEY (subscription, path)
) STRICT, WITHOUT ROWID;
