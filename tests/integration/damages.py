"""Damage to plant in what `folders` furnishes: its name, the code it is found by, and the SQL.

The SQL is for both stores; what they do not write alike `in_postgres` translates.
"""

from __future__ import annotations

import re

from tests.integration.group_damages import PLANTED_IN_GROUPS
from tests.integration.stream_damages import PLANTED_IN_STREAMS

PLANTED: dict[str, tuple[str, list[str]]] = {**PLANTED_IN_STREAMS, **PLANTED_IN_GROUPS}

PLANTED_IN_A_FILE: dict[str, tuple[str, list[str]]] = {
    "a key that was used twice": (
        "key_used_twice",
        [
            "INSERT INTO keys SELECT NULL, stream, principal, key, digest, 0, 0, 0, 0, 0,"
            " position, created_ms, expires_ms, answer FROM keys WHERE key = 'k1'"
        ],
    ),
    "a key that its index does not show": (
        "key_not_indexed",
        ["UPDATE key_index SET indexed_to = (SELECT max(id) FROM keys)"],
    ),
    "an index that shows another key": (
        "key_index_wrong",
        [
            "UPDATE key_index SET indexed_to = (SELECT max(id) FROM keys)",
            "INSERT INTO key_places SELECT stream, principal, 'other', id FROM keys"
            " WHERE key = 'k1'",
        ],
    ),
    "a send that was stored twice": (
        "send_used_twice",
        [
            "INSERT INTO sends SELECT NULL, mesh, sender, client_id, fingerprint, kind,"
            " ref, stream, messages, bytes, first_seen_ms, expires_ms FROM sends WHERE"
            " client_id = 'm-1'",
        ],
    ),
    "a send that its index does not show": (
        "send_not_indexed",
        [
            "UPDATE send_index SET indexed_to = (SELECT max(id) FROM sends)",
        ],
    ),
    "an index that shows another send": (
        "send_index_wrong",
        [
            "UPDATE send_index SET indexed_to = (SELECT max(id) FROM sends)",
            "INSERT INTO send_places SELECT mesh, sender, 'other', id FROM sends WHERE"
            " client_id = 'to-ann'",
        ],
    ),
}
"""Damage to the indexes of keys and of sends, which PostgreSQL keeps itself."""

PLANTED_IN_A_DATABASE: dict[str, tuple[str, list[str]]] = {
    "recent batches that are others": (
        "producer_recent_wrong",
        ["UPDATE producers SET recent = x'" + "00" * 40 + "' WHERE id = 'a'"],
    ),
    "recent batches cut short": (
        "producer_recent_wrong",
        ["UPDATE producers SET recent = substr(recent, 2) WHERE id = 'a'"],
    ),
    "a turn that would be given out again": (
        "counter_behind",
        ["UPDATE counters SET turn = turn - 1"],
    ),
    "turns that the subscriptions would never hear of": (
        "counter_behind",
        ["UPDATE followed SET turn = 1000000"],
    ),
    "a subscription whose number would be given out again": (
        "counter_behind",
        ["UPDATE counters SET last_subscription = 0"],
    ),
    "positions of a large commit that is over": (
        "large_commit_wrong",
        ["INSERT INTO large_commits VALUES (1, 2, 0)"],
    ),
}
"""Damage to what only servers that share a database have."""


def in_postgres(statement: str) -> str:
    """A statement of these as PostgreSQL writes it."""
    statement = re.sub(r"CAST\((.+?) AS BLOB\)", r"(\1)::bytea", statement)
    return re.sub(r"x'([0-9a-f]*)'", r"'\\x\1'::bytea", statement)
