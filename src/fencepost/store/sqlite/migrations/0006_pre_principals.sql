-- Who holds a producer id. `principal` opened the epoch, or retook it; empty without authorization.
-- `claim`: 0 none, 1 open, 2 released, 3 completed; see protocol/claims.py.

ALTER TABLE producers ADD COLUMN principal TEXT NOT NULL DEFAULT '';
ALTER TABLE producers ADD COLUMN claim INTEGER NOT NULL DEFAULT 0;

CREATE INDEX producers_claimed ON producers (principal) WHERE claim = 1;

-- Whose a subscription is; empty without authorization.
ALTER TABLE subscriptions ADD COLUMN principal TEXT NOT NULL DEFAULT '';
