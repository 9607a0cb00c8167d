"""`fencepost check`: does a data folder hold together?

Every invariant that the store relies on is looked at, in a few passes that each read their tables once
and in order. Nothing is written and nothing repaired: a finding says what is wrong and where, and the
way back is a backup.

It may run beside a server. The streams, the log and what hangs on them are read in one transaction, so
that what belongs together is seen together; subscriptions follow in another. Memory is bounded by the
number of streams, not by their messages: what has to be sorted is sorted by SQLite, on disk.
"""

from __future__ import annotations

from fencepost.store.sql import load_queries

QUERIES = load_queries("fencepost.store.sqlite", "check.sql")
