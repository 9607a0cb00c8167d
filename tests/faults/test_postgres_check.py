"""`fencepost check` beside servers at work: what is on its way is not taken for damage.

Two servers share a database, and all clients of the kill proof keep them busy: producers, streams
that are made, closed and deleted under a subscription, staged parts, keys. A commit to several
streams goes beside the turns, and what is deleted or truncated is purged at once, in pieces. Each
look must find nothing.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from fencepost.store.postgres.check import check
from fencepost.store.settings import PostgresSettings
from tests.faults.coordinating import WAKES
from tests.faults.test_postgres_kills import Load
from tests.postgres.nodes import rows
from tests.serving import ServerProcess

LOOKS_MIN, LOOKS_MAX = 10, 200
ANSWERS_BETWEEN_LOOKS = 200
SEEN = {
    "commit beside the turns": "SELECT FROM turns WHERE node = ''",
    "deletion": "SELECT FROM turns WHERE removed <> '{}'",
    "purge of a stream that is there": "SELECT FROM purges JOIN streams ON stream = streams.id",
    "purge of one that is not": "SELECT FROM purges WHERE stream NOT IN (SELECT id FROM streams)",
    "memory of what was purged": "SELECT FROM remembered",
    "staged chunk without its data": "SELECT FROM chunks WHERE octet_length(data) = 0",
    "staged chunk that is messages": "SELECT FROM log WHERE chunk IS NOT NULL",
    "key": "SELECT FROM keys WHERE stream <> 0",
    "cursor": "SELECT FROM links WHERE stream IS NOT NULL",
}
"""What the servers do that a check might trip over."""


async def test_servers_at_work_give_a_check_nothing_to_find(
    postgres_dsn: str, tmp_path: Path
) -> None:
    config = tmp_path / "fencepost.toml"
    config.write_text(
        "[store]\nsweep_interval_ms = 20\nretention_interval_ms = 20\nlog_retention_ms = 0\n"
        "commit_slice_appends = 1\n"
        f'[[retention]]\nmatch = "{WAKES}"\nmax_messages = 1_000_000\n'  # it is followed
        '[[retention]]\nmatch = "**"\nmax_messages = 7\n'
    )
    arguments = ["--config", str(config), "--long-poll-ms", "300"]
    with (
        ServerProcess(store=postgres_dsn, arguments=arguments) as first,
        ServerProcess(store=postgres_dsn, arguments=arguments) as second,
    ):
        load = Load([first, second, first])
        # No reader can follow what is truncated and purged at once.
        load.log_readers.clear()
        load.readers.clear()
        await load.create()
        await load.run(looks(postgres_dsn, load))

    report = check(PostgresSettings(url=postgres_dsn))
    assert report.findings == []


async def looks(dsn: str, load: Load) -> None:
    """Check the database again and again, until there was all that a check might trip over."""
    unseen = dict(SEEN)
    for look in range(LOOKS_MAX):
        await load.cluster.more_answers(ANSWERS_BETWEEN_LOOKS)
        report = await asyncio.to_thread(check, PostgresSettings(url=dsn))
        assert report.findings == []
        for what, query in list(unseen.items()):
            if rows(dsn, f"SELECT EXISTS ({query})") == [(True,)]:
                del unseen[what]
        if look >= LOOKS_MIN and not unseen:
            return
    raise AssertionError(f"there never was a {', a '.join(unseen)}")
