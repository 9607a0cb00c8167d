"""The async client of the daemon; `outbox/sync` is generated from it."""
