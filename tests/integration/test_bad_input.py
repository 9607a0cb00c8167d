"""Bad input: each row is a request, the status and code it must get, and that nothing changed.

The server is a real process and the requests are bytes. Before and after every row the tables of
its database are compared, and a witness stream is read: a refusal leaves no trace.
"""

import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.bad_input_requests import JSON, NEW, ROOT, TEXT, WITNESS, Row
from tests.integration.bad_input_rows import TABLE
from tests.integration.raw import Connection, code_of, request
from tests.serving import ServerProcess
from tests.unit.http.rawhttp import Reply


class Witness:
    """A server with streams that no row may change, and a look at all that it has stored."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._connection = Connection(server.port)
        self._database = sqlite3.connect(f"file:{server.data / 'fencepost.db'}?mode=ro", uri=True)
        self._make()

    def _make(self) -> None:
        make = self._connection.ask
        assert make("PUT", WITNESS, TEXT, body=b"seen").status == 201
        producer = ("Producer-Id: p", "Producer-Epoch: 5", "Producer-Seq: 0")
        assert make("POST", WITNESS, TEXT, *producer, "Stream-Seq: m", body=b"!").status == 200
        assert make("PUT", ROOT + "witness-json", JSON, body=b"[1,2]").status == 201
        assert make("PUT", ROOT + "closed", TEXT, "Stream-Closed: true", body=b"x").status == 201
        assert make("PUT", ROOT + "gone", TEXT, body=b"x").status == 201
        assert make("PUT", ROOT + "fork", f"Stream-Forked-From: {ROOT}gone").status == 201
        assert make("DELETE", ROOT + "gone").status == 204

    def state(self) -> list[Any]:
        """Everything that is stored, and the witness as a client sees it."""
        tables = [
            self._database.execute(query).fetchall()
            for query in (
                "SELECT * FROM streams ORDER BY id",
                "SELECT * FROM log ORDER BY position",
                "SELECT * FROM producers ORDER BY stream, id",
                "SELECT next_position, next_stream FROM counters",
            )
        ]
        head = self._connection.ask("HEAD", WITNESS)
        read = self._connection.ask("GET", WITNESS + "?offset=-1")
        assert (head.status, read.status, read.body) == (200, 200, b"seen!")
        return [tables, _stable(head), _stable(read)]

    def send(self, raw: bytes) -> Reply:
        """The answer to a request on a connection of its own."""
        with Connection(self._server.port) as connection:
            connection.send(raw)
            return connection.reply()

    def close(self) -> None:
        self._database.close()
        self._connection.close()


def _stable(reply: Reply) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name != "date"}


@pytest.fixture(scope="module")
def witness(server_process: ServerProcess) -> Iterator[Witness]:
    made = Witness(server_process)
    yield made
    made.close()


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_bad_input_is_refused_by_name_and_changes_nothing(witness: Witness, row: Row) -> None:
    before = witness.state()

    reply = witness.send(row.raw)

    assert (reply.status, code_of(reply)) == (row.status, row.code), reply.body
    assert witness.state() == before


def test_no_two_rows_have_the_same_name() -> None:
    names = [row.name for row in TABLE]

    assert len(set(names)) == len(names)


def test_a_close_without_a_body_is_not_judged_by_its_content_type(witness: Witness) -> None:
    """The protocol forbids it: libraries attach a Content-Type of their own to everything."""
    witness.send(request("PUT", NEW, TEXT))
    closing = request("POST", NEW, "Content-Type: nonsense", "Stream-Closed: true")

    assert witness.send(closing).status == 204

    assert witness.send(request("DELETE", NEW)).status == 204


def test_what_is_only_unusual_is_accepted(witness: Witness) -> None:
    """The other side of the table: none of these is an error."""
    accepted = [
        ("PUT", ROOT + "a" * 1024, (TEXT,)),
        ("PUT", ROOT + "%c3%a9/%20/~!$&'()*+,;=:@", (TEXT,)),
        ("PUT", ROOT + "x/__ds", (TEXT,)),
        ("PUT", ROOT + "...", (TEXT,)),
        ("PUT", ROOT + "%61", (f"Content-Type: text/{'x' * 251}",)),
        ("PUT", ROOT + "b", ("Content-Type: text/plain;charset=utf-8",)),
        ("PUT", ROOT + "c", (TEXT, "Stream-TTL: 0")),
        ("PUT", ROOT + "d", (TEXT, f"Stream-TTL: {10 * 365 * 86_400}")),
        ("PUT", ROOT + "e", (TEXT, "Stream-Expires-At: 2999-01-01t00:00:00.123456789z")),
        ("PUT", ROOT + "f", (TEXT, "Stream-Expires-At: 2999-01-01T00:00:00+14:00")),
        ("PUT", ROOT + "g", (TEXT, "Stream-Closed: yes")),
        ("PUT", ROOT + "h", (TEXT, "Unknown-Header: 1", "Unknown-Header: 2")),
    ]

    for method, target, headers in accepted:
        reply = witness.send(request(method, target, *headers))
        assert reply.status == 201, (target, reply.body)
