-- Subscriptions of which only links are there: very many of them come, or go, in several commits. One
-- that is being made has its own row with its last links, one that is removed loses it first.
CREATE TABLE partial_subscriptions (
    id bigint PRIMARY KEY
);
