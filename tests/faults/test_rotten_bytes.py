"""A byte that rots on disk is noticed: by the log, by reads that look, and by `fencepost check`."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from fencepost.protocol.checksums import with_checksum
from fencepost.store.check.report import Report
from fencepost.store.postgres.check import check as check_database
from fencepost.store.settings import PostgresSettings
from fencepost.store.sqlite.check import check as check_folder
from tests.engines import POSTGRES, SQLITE, emptied, server_at
from tests.old_folders import make_older

GOOD, BAD, BATCH, STAGED = b'"all is well"', b'"this will rot"', b"[11111,22222]", b'"staged"'
ROW = (7, 3, 0, 5, 2, 1, 5, 99, "p", 1, 4, 6, b"d" * 16, None, None, b"hello")


class Place:
    """A store that was written by a server that has ended."""

    def __init__(self, engine: str, store: Path | str) -> None:
        self.engine, self.store = engine, store

    def run(self, sqlite_text: str, postgres_text: str | None = None) -> list[Any]:
        """A statement on the tables, past the server."""
        if isinstance(self.store, Path):
            with closing(sqlite3.connect(self.store / "fencepost.db")) as embedded, embedded:
                return embedded.execute(sqlite_text).fetchall()
        with psycopg.connect(self.store) as connection:
            cursor = connection.execute((postgres_text or sqlite_text).encode())
            return cursor.fetchall() if cursor.description else []

    def rot(self, table: str, content: bytes) -> None:
        """Flip one bit of a payload."""
        if isinstance(self.store, Path):
            file = self.store / "fencepost.db"
            with closing(sqlite3.connect(file)) as embedded:
                embedded.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            whole = file.read_bytes()
            at = whole.index(content) + len(content) // 2
            assert whole.count(content) == 1
            flipped = bytes([whole[at] ^ 0x01])
            file.write_bytes(whole[:at] + flipped + whole[at + 1 :])
            return
        self.run(
            "",
            f"UPDATE {table} SET data = set_byte(data, octet_length(data) / 2,"
            " get_byte(data, octet_length(data) / 2) # 1)"
            f" WHERE data = '\\x{content.hex()}'::bytea",
        )

    def check(self) -> Report:
        if isinstance(self.store, Path):
            return check_folder(self.store)
        return check_database(PostgresSettings(url=self.store))


def fill(url: str) -> None:
    with httpx.Client(base_url=url, headers={"Content-Type": "application/json"}) as client:
        for path, body in (("good", GOOD), ("bad", BAD), ("batch", BATCH)):
            client.put(f"/v1/stream/{path}").raise_for_status()
            client.post(f"/v1/stream/{path}", content=body).raise_for_status()
        client.post("/v1/staging/t/p", content=STAGED).raise_for_status()
        item = {"stream": "staged", "content_type": "application/json", "auto_create": True}
        commit = {"appends": [{**item, "parts": [{"txn": "t", "part": "p"}]}]}
        client.post("/v1/commit", json=commit).raise_for_status()
        client.post("/v1/staging/t/waits", content=b'"waiting"').raise_for_status()


@pytest.fixture(params=[SQLITE, POSTGRES])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with emptied(request.param, tmp_path) as store:
        with server_at(store) as server:
            fill(server.url)
        yield Place(request.param, store)


def codes(report: Report) -> list[str]:
    return sorted(report.codes)


@pytest.mark.parametrize(
    ("table", "content", "stream"),
    [("log", BAD, "bad"), ("log", b"11111,22222", "batch"), ("chunks", STAGED, "staged")],
)
def test_a_flipped_bit_of_a_payload_is_never_served(
    written: Place, table: str, content: bytes, stream: str
) -> None:
    assert codes(written.check()) == []
    written.rot(table, content)

    with server_at(written.store) as server, httpx.Client(base_url=server.url) as client:
        read = client.get(f"/v1/stream/{stream}")
        log = client.get("/v1/log", params={"stream": stream})
        whole = client.get("/v1/log")
        accept = {"Accept": "application/vnd.apache.arrow.stream"}
        arrow = client.get("/v1/log", headers=accept)
        value = client.get("/v1/log?columns=value", headers=accept)
        size = client.get("/v1/log?columns=size,stream", headers=accept)
        other = client.get("/v1/stream/good")
        around = client.get("/v1/log", params={"stream": "good"})
        metrics = client.get("/metrics").text

    for refused in (read, log, whole, arrow, value, size):
        assert (refused.status_code, refused.json()["code"]) == (500, "data_damaged"), refused.text
    assert log.json()["position"] <= log.json()["behind"]
    assert other.content == b"[%b]" % GOOD
    assert around.status_code == 200
    assert "fencepost_data_damaged_total 6.0" in metrics
    assert "checksum_wrong" in codes(written.check())


def test_a_chunk_that_waits_is_checked(written: Place) -> None:
    written.rot("chunks", b'"waiting"')

    assert codes(written.check()) == ["checksum_wrong"]


@pytest.mark.parametrize(
    "change",
    ["at_ms = at_ms + 1", "checksum = checksum + 1"],
)
def test_check_notices_what_else_a_row_says(written: Place, change: str) -> None:
    # The last message of the log may be later than it was, by all other rules.
    written.run(
        f"UPDATE log SET {change} WHERE position = (SELECT max(position) FROM log WHERE kind = 0)"
    )
    written.run("UPDATE counters SET last_ms = last_ms + 1000")

    assert codes(written.check()) == ["checksum_wrong"]


def test_rows_from_before_checksums_are_read_as_they_are(written: Place) -> None:
    written.run("UPDATE log SET checksum = NULL WHERE position % 2 = 0")
    written.run("UPDATE chunks SET checksum = NULL")
    assert codes(written.check()) == []

    with server_at(written.store) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/v1/log").status_code == 200
        for path, body in (("bad", BAD), ("staged", STAGED)):
            assert client.get(f"/v1/stream/{path}").content == b"[%b]" % body
    written.rot("log", BAD)
    written.run("UPDATE log SET checksum = NULL")
    with server_at(written.store) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/v1/stream/bad").status_code == 200, "nothing tells that it rotted"


def test_a_folder_of_the_version_before_is_brought_up_to_date(tmp_path: Path) -> None:
    with server_at(tmp_path) as server:
        fill(server.url)
    place = Place(SQLITE, tmp_path)
    make_older(tmp_path, version=14)
    assert codes(place.check()) == [], "a check changes nothing, and an older folder is whole"

    with server_at(tmp_path) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/v1/log").status_code == 200
        sent = {"Content-Type": "application/json"}
        client.post("/v1/stream/good", content=b'"new row"', headers=sent).raise_for_status()

    assert place.run("SELECT count(*) FROM log WHERE checksum IS NOT NULL") == [(1,)]
    assert codes(place.check()) == []


def _flips() -> Iterator[tuple[str, Callable[[list[Any]], None]]]:
    for place, value in enumerate(ROW):
        if isinstance(value, bytes):
            for bit in range(8 * len(value)):

                def flip_bytes(row: list[Any], place: int = place, bit: int = bit) -> None:
                    changed = bytearray(row[place])
                    changed[bit // 8] ^= 1 << bit % 8
                    row[place] = bytes(changed)

                yield f"{place}.{bit}", flip_bytes
        elif isinstance(value, int):
            for bit in range(63):

                def flip_number(row: list[Any], place: int = place, bit: int = bit) -> None:
                    row[place] ^= 1 << bit

                yield f"{place}.{bit}", flip_number


def test_every_bit_of_a_row_counts() -> None:
    *_, checksum = with_checksum(ROW)
    for name, flip in _flips():
        row = list(ROW)
        flip(row)
        assert with_checksum(tuple(row))[-1] != checksum, name
