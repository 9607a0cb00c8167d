"""Writers over HTTP and through the client: opening runs, publishing batches, forgetting."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fencepost
from fencepost import CommitAppend, WriterBatch
from tests.engines import engine as engine
from tests.integration.auth_support import ALL, As, code, place, principal
from tests.integration.raw import Connection, code_of
from tests.serving import ServerProcess
from tests.unit.http.rawhttp import Reply

ROOT = "/v1/writers/"
JSON = "application/json"

_names = itertools.count()


@pytest.fixture
def wire(server_process: ServerProcess) -> Iterator[Connection]:
    with Connection(server_process.port) as connection:
        yield connection


@pytest.fixture
def client(server_process: ServerProcess) -> Iterator[fencepost.Client]:
    with fencepost.connect(server_process.url) as found:
        yield found


def fresh() -> str:
    """A name that no other test uses."""
    return f"writers-{next(_names)}"


def open_writer(wire: Connection, name: str, **body: Any) -> Reply:
    return wire.ask("POST", ROOT + name, body=json.dumps({"query": "q", **body}).encode())


def publish(wire: Connection, writer: dict[str, Any], *appends: dict[str, Any]) -> Reply:
    body = json.dumps({"writer": writer, "appends": appends}).encode()
    return wire.ask("POST", "/v1/commit", body=body)


def append(path: str, value: Any = 1) -> dict[str, Any]:
    return {"stream": path, "content_type": JSON, "data": value, "auto_create": True}


def batch_of(name: str, batch: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "query": "q", "epoch": 1, "batch": batch, "digest": "d", **more}


def body_of(reply: Reply) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(reply.body)
    return found


def test_a_run_begins_behind_the_last_batch(wire: Connection) -> None:
    name = fresh()

    first = open_writer(wire, name)
    published = publish(wire, batch_of(name, 5), append(name))
    second = open_writer(wire, name)

    assert first.status == published.status == second.status == 200
    assert first.headers["cache-control"] == "no-store"
    shown = body_of(first)
    assert (shown["name"], shown["query"], shown["epoch"]) == (name, "q", 1)
    assert (shown["batch"], shown["digest"], shown["principal"]) == (None, None, "")
    assert body_of(published)["batch"] == 5
    assert (body_of(second)["epoch"], body_of(second)["batch"]) == (2, 5)
    assert body_of(wire.ask("GET", ROOT + name)) == body_of(second)


def test_a_batch_again_says_how_far_the_writer_came_and_whether_it_is_the_same(
    wire: Connection,
) -> None:
    name = fresh()
    open_writer(wire, name)
    publish(wire, batch_of(name, 1), append(name))

    same = publish(wire, batch_of(name, 1), append(name))
    other = publish(wire, batch_of(name, 1, digest="e"), append(name))
    older = publish(wire, batch_of(name, 0), append(name))

    done = {"duplicate": True, "batch": 1, "range": None, "appends": list[object]()}
    assert body_of(same) == done | {"match": True}
    assert body_of(other) == done | {"match": False}
    assert (older.status, code_of(older)) == (409, "writer_history_gone")
    assert body_of(older)["batch"] == 1
    assert wire.ask("GET", f"/v1/stream/{name}?offset=-1").body == b"[1]"


def test_refusals_say_what_is_known_of_the_writer(wire: Connection) -> None:
    name = fresh()
    missing = publish(wire, batch_of(name, 0), append(name))
    assert (missing.status, code_of(missing)) == (409, "writer_not_found")
    open_writer(wire, name)
    publish(wire, batch_of(name, 4))
    open_writer(wire, name)

    fenced = publish(wire, batch_of(name, 5), append(name))
    foreign = publish(wire, batch_of(name, 5, query="r"), append(name))
    other = open_writer(wire, name, query="r")

    assert (fenced.status, code_of(fenced), body_of(fenced)["epoch"]) == (409, "writer_fenced", 2)
    for reply in (foreign, other):
        assert (reply.status, code_of(reply)) == (409, "writer_query_changed")
        assert (body_of(reply)["query"], body_of(reply)["batch"]) == ("q", 4)
    assert wire.ask("GET", f"/v1/stream/{name}").status == 404


def test_a_run_that_says_what_it_saw_does_not_end_one_that_began_meanwhile(
    wire: Connection,
) -> None:
    name = fresh()

    first = open_writer(wire, name, after=0)
    asleep = open_writer(wire, name, after=0)
    second = open_writer(wire, name, after=1)
    unknown = open_writer(wire, fresh(), after=1)
    foreign = open_writer(wire, name, query="r", after=1)
    wrong = open_writer(wire, name, after=-1)

    assert (first.status, body_of(first)["epoch"]) == (200, 1)
    assert (asleep.status, code_of(asleep), body_of(asleep)["epoch"]) == (409, "writer_fenced", 1)
    assert (second.status, body_of(second)["epoch"]) == (200, 2)
    assert (unknown.status, code_of(unknown)) == (409, "writer_not_found")
    assert (foreign.status, code_of(foreign)) == (409, "writer_query_changed")
    assert (wrong.status, code_of(wrong)) == (400, "writer_invalid")


def test_another_query_begins_anew_when_that_is_meant(wire: Connection) -> None:
    name = fresh()
    open_writer(wire, name)
    publish(wire, batch_of(name, 4))

    anew = body_of(open_writer(wire, name, query="r", allow_new=True))

    assert (anew["query"], anew["epoch"], anew["batch"]) == ("r", 2, None)


def test_a_forgotten_writer_is_gone(wire: Connection) -> None:
    name = fresh()
    open_writer(wire, name)

    assert wire.ask("DELETE", ROOT + name).status == 204
    for method in ("GET", "DELETE"):
        reply = wire.ask(method, ROOT + name)
        assert (reply.status, code_of(reply)) == (404, "writer_not_found")


def test_writers_are_listed_by_name_in_pages(client: fencepost.Client, wire: Connection) -> None:
    folder = fresh()
    names = [f"{folder}/{number:02}" for number in range(7)]
    for name in reversed(names):
        client.open_writer(name, "q")

    assert [one.name for one in client.writers(match=f"{folder}/*")] == names
    first = body_of(wire.ask("GET", f"/v1/writers?match={folder}/*&limit=3"))
    after = first["next"]
    second = body_of(wire.ask("GET", f"/v1/writers?match={folder}/*&limit=4&after={after}"))
    assert [one["name"] for one in first["writers"]] == names[:3]
    assert [one["name"] for one in second["writers"]] == names[3:]
    assert second["next"] is None


BAD_OPENS: list[tuple[bytes, str]] = [
    (b"", "writer_invalid"),
    (b"{", "writer_invalid"),
    (b"[]", "writer_invalid"),
    (b"{}", "writer_invalid"),
    (b'{"query": 1}', "writer_invalid"),
    (b'{"query": ""}', "writer_invalid"),
    (b'{"query": "a\\u0000"}', "writer_invalid"),
    (b'{"query": "\xff"}', "writer_invalid"),
    (json.dumps({"query": "q" * 257}).encode(), "writer_invalid"),
    (b'{"query": "q", "allow_new": 1}', "writer_invalid"),
    (b'{"query": "q", "epoch": 1}', "writer_invalid"),
    (b"[" * 100_000, "writer_invalid"),
]


@pytest.mark.parametrize(("body", "expected"), BAD_OPENS, ids=lambda value: repr(value)[:30])
def test_a_malformed_run_is_refused(wire: Connection, body: bytes, expected: str) -> None:
    reply = wire.ask("POST", ROOT + "bad", body=body)

    assert (reply.status, code_of(reply)) == (400, expected)


@pytest.mark.parametrize("name", ["", "a//b", "a/../b", "__ds", "%00", "a%2Fb", "%ff"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_malformed_name_is_refused(wire: Connection, method: str, name: str) -> None:
    reply = wire.ask(method, ROOT + name, body=b'{"query": "q"}' if method == "POST" else b"")

    assert (reply.status, code_of(reply)) in ((400, "path_invalid"), (400, "path_reserved"))


BAD_BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "path_invalid"),
    ({"name": "a//b"}, "path_invalid"),
    ({"name": "n" * 1025}, "path_too_long"),
    ({"query": ""}, "writer_invalid"),
    ({"query": "q" * 257}, "writer_invalid"),
    ({"digest": "d" * 257}, "writer_invalid"),
    ({"digest": "a\nb"}, "writer_invalid"),
    ({"epoch": -1}, "writer_invalid"),
    ({"batch": -1}, "writer_invalid"),
    ({"batch": 2**53}, "writer_invalid"),
    ({"batch": 1.5}, "commit_invalid"),
    ({"batch": None}, "commit_invalid"),
    ({"run": 1}, "commit_invalid"),
]


@pytest.mark.parametrize(("fields", "expected"), BAD_BATCHES, ids=lambda value: repr(value)[:30])
def test_a_malformed_batch_is_refused(
    wire: Connection, fields: dict[str, Any], expected: str
) -> None:
    reply = publish(wire, batch_of("bad", 0) | fields, append("bad"))

    assert (reply.status, code_of(reply)) == (400, expected)


def test_a_commit_without_appends_needs_a_writer(wire: Connection) -> None:
    body = json.dumps({"appends": [], "writer": None}).encode()

    reply = wire.ask("POST", "/v1/commit", body=body)

    assert (reply.status, code_of(reply)) == (400, "commit_empty")


@pytest.mark.parametrize(("method", "target"), [("PUT", ROOT + "w"), ("POST", "/v1/writers")])
def test_another_method_is_refused(wire: Connection, method: str, target: str) -> None:
    reply = wire.ask(method, target)

    assert (reply.status, code_of(reply)) == (405, "method_not_allowed")
    assert method not in reply.headers["allow"].split(", ")


# The client


def test_a_pipeline_publishes_each_batch_once_through_the_client(client: fencepost.Client) -> None:
    name = fresh()
    run = client.open_writer(name, "q")

    def batch(number: int, digest: str = "d") -> fencepost.Committed:
        client.stage(f"{name}-{number}", "p0", [number])
        return client.commit(
            [CommitAppend(stream=name, auto_create=True, parts=[(f"{name}-{number}", "p0", 1)])],
            writer=WriterBatch(name=name, query="q", epoch=run.epoch, batch=number, digest=digest),
        )

    first = batch(0)
    second = batch(1)
    again = client.commit(
        [], writer=WriterBatch(name=name, query="q", epoch=1, batch=1, digest="other")
    )

    assert (first.duplicate, first.batch, len(first.appends)) == (False, 0, 1)
    assert (second.duplicate, second.batch) == (False, 1)
    assert (again.duplicate, again.batch, again.match) == (True, 1, False)
    assert client.stream(name).read().messages() == [0, 1]
    assert client.writer(name).batch == 1


def test_the_client_sends_ranges_and_shows_the_history(client: fencepost.Client) -> None:
    name = fresh()
    client.open_writer(name, "q")

    def publish(number: int, after: int | None, until: int) -> fencepost.Committed:
        read = fencepost.PositionRange(after=after, until=until)
        batch = WriterBatch(name=name, query="q", epoch=1, batch=number, digest="d", range=read)
        return client.commit([], writer=batch)

    publish(0, None, 9)
    publish(1, 9, 19)
    again = publish(0, None, 9)
    with pytest.raises(fencepost.WriterRangeMismatchError) as other:
        publish(1, 9, 29)
    client.commit([], writer=WriterBatch(name=name, query="q", epoch=1, batch=7))
    with pytest.raises(fencepost.WriterHistoryGoneError) as gone:
        publish(5, 9, 29)

    assert (again.match, again.range) == (True, fencepost.PositionRange(until=9))
    assert other.value.batch == 1
    assert other.value.published == {"after": 9, "until": 19}
    assert other.value.sent == {"after": 9, "until": 29}
    assert gone.value.batch == 7
    shown = [(one.batch, one.range, one.digest) for one in client.writer_history(name)]
    assert shown == [
        (7, None, None),
        (1, fencepost.PositionRange(after=9, until=19), "d"),
        (0, fencepost.PositionRange(until=9), "d"),
    ]
    client.forget_writer(name)
    with pytest.raises(fencepost.WriterNotFoundError):
        list(client.writer_history(name))


def test_the_client_raises_what_the_server_refuses(client: fencepost.Client) -> None:
    name = fresh()
    with pytest.raises(fencepost.WriterNotFoundError):
        client.writer(name)
    with pytest.raises(fencepost.WriterNotFoundError):
        client.commit([], writer=WriterBatch(name=name, query="q", epoch=1, batch=0))
    client.open_writer(name, "q")
    client.commit([], writer=WriterBatch(name=name, query="q", epoch=1, batch=9))
    client.open_writer(name, "q")

    with pytest.raises(fencepost.WriterFencedError) as fenced:
        client.commit([], writer=WriterBatch(name=name, query="q", epoch=1, batch=10))
    with pytest.raises(fencepost.WriterQueryChangedError) as changed:
        client.open_writer(name, "r")

    assert fenced.value.epoch == 2
    assert (changed.value.query, changed.value.batch) == ("q", 9)
    client.forget_writer(name)
    with pytest.raises(fencepost.WriterNotFoundError):
        client.forget_writer(name)


def test_a_part_is_dropped_unless_a_commit_used_it(client: fencepost.Client) -> None:
    name = fresh()
    client.stage(name, "idle", [1])
    client.stage(name, "used", [2])
    client.commit([CommitAppend(stream=name, auto_create=True, parts=[(name, "used")])])

    client.unstage(name, "idle")
    with pytest.raises(fencepost.PartError) as missing:
        client.unstage(name, "idle")
    with pytest.raises(fencepost.PartError) as used:
        client.unstage(name, "used")

    assert (missing.value.status, missing.value.code) == (404, "part_missing")
    assert (used.value.status, used.value.code) == (409, "part_committed")
    with pytest.raises(fencepost.PartError):
        client.commit([CommitAppend(stream=name, parts=[(name, "idle")])])
    assert client.stream(name).read().messages() == [2]


# Across a kill, and among principals


def test_a_writer_survives_its_server(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        with Connection(server.port) as wire:
            open_writer(wire, "w")
            assert publish(wire, batch_of("w", 3), append("s")).status == 200
        server.kill()
        server.restart()
        with Connection(server.port) as wire:
            again = publish(wire, batch_of("w", 3), append("s"))
            shown = body_of(wire.ask("GET", ROOT + "w"))

    assert (body_of(again)["duplicate"], body_of(again)["match"]) == (True, True)
    assert (shown["epoch"], shown["batch"], shown["digest"]) == (1, 3, "d")


def test_a_writer_is_its_principals_and_administrators(tmp_path: Path) -> None:
    ann, ben = (principal(name, ("**", ALL)) for name in ("ann", "ben"))
    root = principal("root", ("**", ["admin"]))
    body = {"writer": batch_of("w", 0, epoch=1), "appends": [append("s")]}

    def names(view: As) -> list[str]:
        return [one["name"] for one in view.get("/v1/writers").json()["writers"]]

    with place(tmp_path, root, ann, ben, principal("none")) as here:
        opened = here("ann").client.post(ROOT + "w", json={"query": "q"})
        assert opened.json()["principal"] == "ann"
        stolen = here("ben").client.post(ROOT + "w", json={"query": "q"})
        assert code(stolen) == (403, "writer_held")
        assert code(here("ben").client.post("/v1/commit", json=body)) == (403, "writer_held")
        assert code(here("ben").get(ROOT + "w")) == (404, "writer_not_found")
        assert code(here("ben").client.delete(ROOT + "w")) == (404, "writer_not_found")
        nobody = here("none").client.post(ROOT + "n", json={"query": "q"})
        assert code(nobody) == (403, "forbidden")
        assert (names(here("ann")), names(here("ben")), names(here("root"))) == (["w"], [], ["w"])
        assert here("ann").client.post("/v1/commit", json=body).status_code == 200
        over = here("root").client.post(ROOT + "w", json={"query": "q"})
        assert (over.json()["epoch"], over.json()["principal"]) == (2, "ann")
        assert here("root").client.delete(ROOT + "w").status_code == 204
