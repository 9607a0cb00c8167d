"""A row or a chunk is gone: a read gives all that was asked for, or says that it is damaged.

Each damage is planted in a stream of its own while the server is stopped. Then every way to read
that stream must refuse: a part of its messages under the status 200 is what nobody would notice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import apsw
import psycopg
import pytest

import fencepost
from fencepost.client.operations import CommitAppend
from fencepost.store.sqlite.connection import FILE
from tests.engines import emptied, server_at
from tests.engines import engine as engine
from tests.integration.log_support import ARROW, Client, Reply
from tests.serving import ServerProcess

CUT = "UPDATE log SET data = substr(data, 1, 3) WHERE position = "
THIRD = "{first} + 2"
CHUNK = "id = (SELECT min(chunk) + 1 FROM log WHERE {of_stream})"


class Damage(NamedTuple):
    """What is done to a stream, and which of its reads cannot be answered then."""

    kind: str
    statement: str
    in_stream: bool = True
    in_log: bool = True


DAMAGES: dict[str, Damage] = {
    "row": Damage("lines", f"DELETE FROM log WHERE position = {THIRD}"),
    # What is left follows on each other in the log: the audit and `fencepost check` find these.
    "first-row": Damage("lines", "DELETE FROM log WHERE position = {first}", in_log=False),
    "last-row": Damage("lines", "DELETE FROM log WHERE position = {last}", in_log=False),
    "short-row": Damage("lines", CUT + THIRD),
    "json-row": Damage("json", f"DELETE FROM log WHERE position = {THIRD}"),
    # Without their lengths, messages that are joined already can still be given.
    "lengths": Damage(
        "batch", "UPDATE log SET lengths = NULL WHERE position = {first}", in_stream=False
    ),
    "short-batch": Damage("batch", CUT + "{first}"),
    "chunk": Damage("staged", f"DELETE FROM chunks WHERE {CHUNK}"),
    "short-chunk": Damage("staged", f"UPDATE chunks SET data = substr(data, 1, 3) WHERE {CHUNK}"),
}
WHOLE = [f"whole/{kind}" for kind in ("lines", "json", "batch", "staged")]


@pytest.fixture(scope="module")
def damaged_server(
    engine: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server on a store that has every damage, each in the stream of its name."""
    with emptied(engine, tmp_path_factory.mktemp("damaged")) as store:
        with server_at(store) as server, fencepost.connect(server.url) as client:
            for name in WHOLE:
                _fill(client, name, name.removeprefix("whole/"))
            for name, damage in DAMAGES.items():
                _fill(client, name, damage.kind)
        for name, damage in DAMAGES.items():
            _run(store, damage.statement, name)
        with server_at(store) as server:
            yield server


@pytest.fixture
def asking(damaged_server: ServerProcess) -> Iterator[Client]:
    with closing(Client(damaged_server.port)) as client:
        yield client


def _fill(client: fencepost.Client, name: str, kind: str) -> None:
    is_text = kind in ("lines", "staged")
    stream = client.create(name, content_type="text/plain" if is_text else "application/json")
    if kind == "batch":
        stream.append_many([{"n": number} for number in range(4)])
        return
    if kind != "staged":
        for number in range(5):
            stream.append(f"line {number}\n" if is_text else number)
        return
    txn = name.replace("/", "-")
    for part in ("one", "two", "three"):
        client.stage(txn, part, [f"chunk {part}\n"], content_type="text/plain")
    staged = [(txn, part) for part in ("one", "two", "three")]
    client.commit([CommitAppend(stream=name, content_type="text/plain", parts=[*staged])])


def _run(store: Path | str, statement: str, stream: str) -> None:
    of_stream = f"stream = (SELECT id FROM streams WHERE path = '{stream}') AND kind = 0"
    filled = statement.format(
        first=f"(SELECT min(position) FROM log WHERE {of_stream})",
        last=f"(SELECT max(position) FROM log WHERE {of_stream})",
        of_stream=of_stream,
    )
    if isinstance(store, Path):
        with closing(apsw.Connection(str(store / FILE))) as connection:
            connection.execute(filled)
            assert connection.changes() == 1
        return
    with psycopg.connect(store) as database:
        assert database.execute(filled.encode()).rowcount == 1


def _refused(reply: Reply) -> None:
    assert reply.status == 500, reply
    assert reply.json()["code"] == "data_damaged", reply


def _counted(client: Client) -> int:
    text = client.ask("GET", "/metrics").body.decode()
    found = re.search(r"^fencepost_data_damaged_total (\d+)", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1])


@pytest.mark.parametrize("name", [name for name, one in DAMAGES.items() if one.in_stream])
def test_a_stream_is_read_whole_or_not_at_all(asking: Client, name: str) -> None:
    before = _counted(asking)
    for query in ("", "?offset=-1&live=long-poll", "?offset=-1&live=sse"):
        _refused(asking.ask("GET", f"/v1/stream/{name}{query}"))

    assert _counted(asking) == before + 3


@pytest.mark.parametrize("name", WHOLE)
def test_other_streams_are_read_as_before(asking: Client, name: str) -> None:
    assert asking.ask("GET", f"/v1/stream/{name}").status == 200
    assert len(asking.log(f"stream={name}").lines()) in (3, 4, 5)


@pytest.mark.parametrize("name", [name for name, one in DAMAGES.items() if one.in_log])
def test_the_log_is_read_whole_or_not_at_all(asking: Client, name: str) -> None:
    for query in ("", "&match=*&part=0/1", "&live=long-poll", "&live=sse", "&order=desc"):
        _refused(asking.log(f"stream={name}{query}"))
    # Payloads are looked at for these columns, and missing rows are noticed with any.
    is_missing = DAMAGES[name].statement.startswith("DELETE FROM log")
    for columns in ("value", "size", *(("position",) if is_missing else ())):
        _refused(asking.log(f"stream={name}&columns={columns}", Accept=ARROW))
    _refused(asking.log(f"stream={name}", Accept=ARROW))

    problem = asking.log(f"stream={name}").json()
    # What is before and what is behind can be read.
    before = asking.log(f"stream={name}&until={problem['position'] - 1}")
    behind = asking.log(f"stream={name}&after={problem['behind']}")
    assert before.status == behind.status == 200, (before, behind)
    assert behind.at_head


def test_the_whole_log_is_read_between_its_damages(asking: Client) -> None:
    after, damages = -1, 0
    while True:
        reply = asking.log(f"after={after}")
        if reply.status == 200:
            assert reply.at_head
            break
        _refused(reply)
        damages += 1
        problem = reply.json()
        assert asking.log(f"after={after}&until={problem['position'] - 1}").status == 200
        after = problem["behind"]

    assert damages == sum(one.in_log for one in DAMAGES.values())


def test_the_client_asks_once(damaged_server: ServerProcess, asking: Client) -> None:
    before = _counted(asking)
    with fencepost.connect(damaged_server.url) as client:
        with pytest.raises(fencepost.DataDamagedError, match="fencepost check") as caught:
            list(client.stream("chunk").read())
        assert caught.value.position is None
        with pytest.raises(fencepost.DataDamagedError) as caught:
            list(client.log(streams=["chunk"]))
        assert caught.value.position is not None
        assert caught.value.behind is not None

    assert _counted(asking) == before + 2
