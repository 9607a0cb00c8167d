"""A principal that takes all it can get is stopped at its share, told which, and alone in that."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from fencepost.protocol.shares import Shares, limit_of
from tests.attacks.attacking import bearer
from tests.engines import POSTGRES, SQLITE, emptied
from tests.integration.auth_support import ALL, ROOT, As, Place, place, principal
from tests.integration.raw import Connection

MALLORY = principal("mallory", ("mallory/**", ALL), ("__groups/**", ALL), ("__mesh/**", ALL))
ANN = principal("ann", ("ann/**", ALL), ("__groups/**", ALL), ("__mesh/**", ALL))
SHARE = 3
JSON_TYPE = {"Content-Type": "application/json"}


def environment(**shares: int) -> dict[str, str]:
    return {f"FENCEPOST_SHARES_{limit_of(name).upper()}": str(n) for name, n in shares.items()}


def _producer(view: As, me: str, n: int) -> httpx.Response:
    return view.send(f"{me}/many", f"id{n}", 0, 0, stream_auto_create="true")


def _key(view: As, me: str, n: int) -> httpx.Response:
    return view.append(f"{me}/many", n, idempotency_key=f"k{n}", stream_auto_create="true")


def _commit_key(view: As, me: str, n: int) -> httpx.Response:
    return view.commit(
        {"stream": f"{me}/many", "data": n, "auto_create": True}, idempotency_key=f"k{n}"
    )


def _stream(view: As, me: str, n: int) -> httpx.Response:
    return view.create(f"{me}/{n}")


def _auto(view: As, me: str, n: int) -> httpx.Response:
    return view.append(f"{me}/{n}", stream_auto_create="true")


def _committed(view: As, me: str, n: int) -> httpx.Response:
    return view.commit({"stream": f"{me}/{n}", "data": n, "auto_create": True})


def _part(view: As, me: str, n: int) -> httpx.Response:
    return view.client.post(f"/v1/staging/{me}/{n}", content=b"[1]", headers=JSON_TYPE)


def _chunk(view: As, me: str, n: int) -> httpx.Response:
    return view.client.post(f"/v1/staging/{me}/p?chunk={n}", content=b'["abc"]', headers=JSON_TYPE)


def _writer(view: As, me: str, n: int) -> httpx.Response:
    return view.client.post(f"/v1/writers/{me}-{n}", json={"query": "q"})


def _subscription(view: As, me: str, n: int) -> httpx.Response:
    body = {"type": "pull-wake", "pattern": f"{me}/**", "wake_stream": f"{me}/wakes"}
    return view.client.put(f"/v1/stream/__ds/subscriptions/{me}-{n}", json=body)


def _group(view: As, me: str, n: int) -> httpx.Response:
    return view.client.put(f"/v1/groups/{me}-{n}", json={"sources": [f"{me}/**"]})


def _name(view: As, me: str, n: int) -> httpx.Response:
    view.client.put(f"/v1/mesh/{me}-names", json={})
    return view.client.put(f"/v1/mesh/{me}-names/queues/{n}")


def _fork(view: As, me: str, n: int) -> httpx.Response:
    view.create(f"{me}/0")
    return view.create(f"{me}/{n}", stream_forked_from=f"/v1/stream/{me}/0")


def _mesh(view: As, me: str, n: int) -> httpx.Response:
    return view.client.put(f"/v1/mesh/{me}-{n}", json={})


Take = Callable[[As, str, int], httpx.Response]


TAKES: dict[str, tuple[str, int, Take]] = {
    # what is taken: which share, how large it is, and how to take one more of it
    "streams put": ("streams", SHARE, _stream),
    "streams auto-created": ("streams", SHARE, _auto),
    "streams in commits": ("streams", SHARE, _committed),
    "streams of meshes": ("streams", SHARE, _name),
    "streams forked": (
        "streams",
        SHARE,
        lambda view, me, n: _fork(view, me, n) if n else _stream(view, me, n),
    ),
    "producers": ("producers", SHARE, _producer),
    "keys": ("keys", SHARE, _key),
    "keys of commits": ("keys", SHARE, _commit_key),
    "parts": ("parts", SHARE, _part),
    "staged bytes": ("staged_bytes", SHARE * 5, _chunk),
    "writers": ("writers", SHARE, _writer),
    "subscriptions": ("subscriptions", SHARE, _subscription),
    "groups": ("groups", SHARE, _group),
    "meshes": ("meshes", SHARE, _mesh),
}


def is_stored(answer: httpx.Response) -> bool:
    return answer.status_code in (200, 201, 204)


NAMES = {what: f"m{n}" for n, what in enumerate(TAKES)}
"""Each takes one thing, so that one server does for all of them."""
FREED = {
    "streams put": "/v1/stream/{0}/1",
    "parts": "/v1/staging/{0}/1",
    "writers": "/v1/writers/{0}-1",
    "subscriptions": "/v1/stream/__ds/subscriptions/{0}-1",
    "groups": "/v1/groups/{0}-1",
}


def taker(name: str) -> dict[str, Any]:
    return principal(name, (f"{name}/**", ALL), ("__groups/**", ALL), ("__mesh/**", ALL))


@pytest.mark.parametrize("engine", [SQLITE, POSTGRES])
def test_a_share_stops_its_principal_alone_and_never_a_retry(engine: str, tmp_path: Path) -> None:
    shares = dict.fromkeys((resource for resource, _, _ in TAKES.values()), SHARE)
    given = environment(**{**shares, "staged_bytes": SHARE * 5})
    with (
        emptied(engine, tmp_path) as store,
        place(store, ROOT, ANN, *map(taker, NAMES.values()), environment=given) as at,
    ):
        for what in TAKES:
            _is_stopped_alone(at, what)
        at.restart()
        for what, (_, _, take) in TAKES.items():
            name = NAMES[what]
            assert take(at(name), name, SHARE + 1).status_code == 413, what
        for what, gone in FREED.items():
            name, (_, _, take) = NAMES[what], TAKES[what]
            assert at(name).client.delete(gone.format(name)).status_code == 204, gone
            assert is_stored(take(at(name), name, SHARE + 1)), what
            assert take(at(name), name, SHARE + 2).status_code == 413, what


def _is_stopped_alone(at: Place, what: str) -> None:
    resource, share, take = TAKES[what]
    name = NAMES[what]
    if what == "subscriptions":
        for path in (f"{name}/wakes", "ann/wakes"):
            assert is_stored(at(path.partition("/")[0]).create(path))

    stored = [take(at(name), name, n) for n in range(SHARE)]
    past = take(at(name), name, SHARE)

    assert all(map(is_stored, stored)), (what, [answer.text for answer in stored])
    assert (past.status_code, past.json()["code"]) == (413, "limit_exceeded"), (what, past.text)
    assert limit_of(resource) in past.json()["detail"]
    assert _used(at, name, resource) == share
    if what == "subscriptions":
        assert is_stored(take(at("ann"), "ann", 0))
    if what != "writers":  # opening a writer again begins a run: it is no retry
        assert is_stored(take(at(name), name, SHARE - 1)), what


def _used(at: Place, name: str, resource: str) -> float:
    labels = f'fencepost_principal_usage{{principal="{name}",resource="{resource}"}} '
    shown = at("root").get("/metrics").text
    [line] = [line for line in shown.splitlines() if line.startswith(labels)]
    return float(line.removeprefix(labels))


def test_a_commit_past_a_share_names_its_append_and_changes_nothing(tmp_path: Path) -> None:
    with (
        emptied("sqlite", tmp_path) as store,
        place(store, ROOT, MALLORY, environment=environment(streams=SHARE)) as at,
    ):
        items = [{"stream": f"mallory/{n}", "data": n, "auto_create": True} for n in range(5)]
        past = at("mallory").commit(*items)
        large = at("mallory").commit(
            *({"stream": f"mallory/{n}", "data": n, "auto_create": True} for n in range(300))
        )

        assert (past.status_code, past.json()["item"]) == (413, SHARE)
        assert large.status_code == 413
        assert at("mallory").get("/v1/streams").json()["streams"] == []
        assert is_stored(at("mallory").commit(*items[:SHARE]))


def test_two_nodes_share_the_counts_of_their_database(tmp_path: Path) -> None:
    with (
        emptied("postgres", tmp_path) as store,
        place(store, ROOT, MALLORY, environment=environment(streams=4, writers=2)) as one,
        place(store, ROOT, MALLORY, environment=environment(streams=4, writers=2)) as two,
    ):
        made = [_auto((one, two)[n % 2]("mallory"), "mallory", n) for n in range(4)]
        past = [_auto(node("mallory"), "mallory", 9) for node in (one, two)]
        writers = [_writer(node("mallory"), "mallory", n) for n, node in enumerate((one, two, one))]

        assert all(map(is_stored, made))
        assert [answer.status_code for answer in past] == [413, 413]
        assert [answer.status_code for answer in writers] == [200, 200, 413]
        assert one("mallory").client.delete("/v1/stream/mallory/0").status_code == 204
        assert is_stored(_auto(two("mallory"), "mallory", 9))
        assert _auto(one("mallory"), "mallory", 10).status_code == 413


@pytest.mark.parametrize("engine", [SQLITE, POSTGRES])
def test_targets_and_parked_events_have_shares(engine: str, tmp_path: Path) -> None:
    shares = environment(targets=2, parked_events=1)
    with (
        emptied(engine, tmp_path) as store,
        place(store, ROOT, MALLORY, environment=shares) as at,
    ):
        view = at("mallory")
        for n in range(3):
            _auto(view, "mallory", n)
        assert is_stored(view.client.put("/v1/groups/g", json={"sources": ["mallory/**"]}))
        head = int(view.get("/v1/log?limit=1").headers["Log-Head"])
        found = [
            {"target": f"mallory/{n}", "source": f"mallory/{n}", "position": n} for n in range(3)
        ]
        past = view.client.post(
            "/v1/groups/g/correlate", json={"after": -1, "until": head, "targets": found}
        )
        kept = view.client.post(
            "/v1/groups/g/correlate", json={"after": -1, "until": head, "targets": found[:2]}
        )
        assert (past.status_code, past.json().get("limit")) == (413, limit_of("targets")), past.text
        assert kept.status_code == 200, kept.text
        events = [{"target": f"mallory/{n}", "position": n} for n in range(2)]
        parked = at("root").client.post("/v1/groups/g/park", json={"events": events})
        assert (parked.status_code, parked.json().get("limit")) == (
            413,
            limit_of("parked_events"),
        ), parked.text
        assert at("root").client.post("/v1/groups/g/park", json={"events": events[:1]}).is_success


@pytest.mark.parametrize("engine", [SQLITE, POSTGRES])
def test_what_targets_are_told_of_has_a_share(engine: str, tmp_path: Path) -> None:
    with (
        emptied(engine, tmp_path) as store,
        place(store, ROOT, MALLORY, environment=environment(told_events=2)) as at,
    ):
        view = at("mallory")
        for n in range(4):
            _auto(view, "mallory", n)

        def tell(after: int, *positions: int) -> httpx.Response:
            source = {"source": "mallory/**", "note": ""}
            targets = [{**source, "target": f"t{n}", "position": n} for n in positions]
            body = {"after": after, "until": positions[-1], "targets": targets}
            return view.client.post("/v1/groups/g/correlate", json=body)

        settings = {"sources": ["mallory/**"], "targets": "computed"}
        assert is_stored(view.client.put("/v1/groups/g", json=settings))
        past = tell(-1, 0, 1, 2)
        assert (past.status_code, past.json().get("limit")) == (413, limit_of("told_events"))
        assert tell(-1, 0, 1).status_code == 200
        assert tell(1, 2).status_code == 413
        claim = {"worker": "ann", "streams_max": 1}
        [lease] = view.client.post("/v1/groups/g/claim", json=claim).json()["leases"]
        items = [{"token": lease["token"], "at": lease["read_to"]}]
        assert view.client.post("/v1/groups/g/ack", json={"items": items}).is_success

        assert tell(1, 2).status_code == 200
        assert view.client.delete("/v1/groups/g").is_success
        assert is_stored(view.client.put("/v1/groups/g", json=settings))
        assert tell(-1, 0, 1).status_code == 200


@pytest.mark.parametrize("engine", [SQLITE, POSTGRES])
def test_what_a_reset_takes_back_from_aside_counts_as_told(engine: str, tmp_path: Path) -> None:
    with (
        emptied(engine, tmp_path) as store,
        place(store, ROOT, MALLORY, environment=environment(told_events=3)) as at,
    ):
        view = at("mallory")
        for n in range(6):
            _auto(view, "mallory", n)

        def tell(after: int, *positions: int) -> int:
            source = {"source": "mallory/**", "note": ""}
            targets = [{**source, "target": f"t{n}", "position": n} for n in positions]
            body = {"after": after, "until": positions[-1], "targets": targets}
            return view.client.post("/v1/groups/g/correlate", json=body).status_code

        settings = {"sources": ["mallory/**"], "targets": "computed"}
        assert is_stored(view.client.put("/v1/groups/g", json=settings))
        assert tell(-1, 0, 1, 2) == 200
        aside = {"events": [{"target": "t0", "position": 0}]}
        assert at("root").client.post("/v1/groups/g/park", json=aside).is_success
        assert tell(2, 3, 4) == 413  # from here on it is known that there is room for one
        back = {"targets": ["t0"], "at": -1}
        assert at("root").client.post("/v1/groups/g/reset", json=back).is_success

        assert tell(2, 3) == 413


@pytest.mark.parametrize("engine", [SQLITE, POSTGRES])
def test_patterns_follow_as_many_streams_as_their_principal_may(
    engine: str, tmp_path: Path
) -> None:
    """Streams that others make are not refused for it: they are not followed, and counted."""

    def unfollowed() -> float:
        shown = at("root").get("/metrics").text.splitlines()
        name = "fencepost_subscription_streams_unfollowed_total "
        return float(next(line for line in shown if line.startswith(name)).removeprefix(name))

    def followed() -> set[str]:
        shown = view.get("/v1/stream/__ds/subscriptions/mallory-1").json()["streams"]
        return {stream["path"] for stream in shown}

    with (
        emptied(engine, tmp_path) as store,
        place(store, ROOT, MALLORY, environment=environment(links=SHARE)) as at,
    ):
        view = at("mallory")
        for path in ("wakes", "1", "2"):
            view.create(f"mallory/{path}")
        assert is_stored(_subscription(view, "mallory", 1))
        past = _subscription(view, "mallory", 2)
        for n in (3, 4, 5):
            assert is_stored(view.create(f"mallory/{n}"))
        while unfollowed() < 2:
            pass  # on PostgreSQL the leading node hears of them a little later
        at_share = followed()
        assert view.client.delete("/v1/stream/mallory/1").status_code == 204
        while _used(at, "mallory", "links") == SHARE:
            pass
        assert is_stored(view.create("mallory/6"))
        while "mallory/6" not in followed():
            pass

    assert (past.status_code, past.json()["code"]) == (413, "limit_exceeded")
    assert "links_per_principal_max" in past.json()["detail"]
    assert at_share == {"mallory/1", "mallory/2", "mallory/3"}


def test_waiters_and_connections_have_shares(tmp_path: Path) -> None:
    shares = environment(waiters=2, connections=4)
    with (
        emptied("sqlite", tmp_path) as store,
        place(store, ROOT, ANN, MALLORY, environment=shares) as at,
    ):
        at("ann").create("ann/a")
        at("mallory").create("mallory/a")
        at.close()
        port = at.process.port

        def waiting(name: str) -> socket.socket:
            sent = socket.create_connection(("127.0.0.1", port))
            line = f"GET /v1/stream/{name}/a?offset=now&live=sse HTTP/1.1\r\nHost: x\r\n"
            sent.sendall(f"{line}{bearer(name)}\r\n\r\n".encode())
            sent.settimeout(20)
            return sent

        held = [waiting("mallory") for _ in range(2)]
        assert all(b" 200 " in one.recv(4096) for one in held)
        third = waiting("mallory")
        refused = third.recv(4096)
        assert b" 503 " in refused
        assert b"waiters_per_principal_max" in refused

        # Three connections by now, with that of the client above closed; a fifth is one too many.
        for_ann = waiting("ann")
        assert b" 200 " in for_ann.recv(4096)
        fourth, fifth = Connection(port), Connection(port)
        assert fourth.ask("HEAD", "/v1/stream/mallory/a", bearer("mallory")).status == 200
        reply = fifth.ask("GET", "/v1/stream/mallory/a", bearer("mallory"))
        assert reply.status == 503
        assert json.loads(reply.body)["code"] == "too_many_connections"
        assert fifth.socket.recv(1) == b""

        for one in held:
            one.close()
        again = Connection(port)
        while again.ask("HEAD", "/v1/stream/mallory/a", bearer("mallory")).status == 503:
            again.close()
            again = Connection(port)
        for one in (third, for_ann):
            one.close()
        for other in (again, fourth, fifth):
            other.close()


@pytest.mark.parametrize("engine", [SQLITE, POSTGRES])
def test_an_administrator_removes_what_a_gone_principal_left(engine: str, tmp_path: Path) -> None:
    with emptied(engine, tmp_path) as store:
        with place(store, ROOT, ANN, MALLORY) as at:
            at("mallory").create("mallory/wakes")
            assert is_stored(_writer(at("mallory"), "mallory", 1))
            assert is_stored(_subscription(at("mallory"), "mallory", 1))
        with place(store, ROOT, ANN) as at:
            root, ann = at("root"), at("ann")
            [writer] = root.get("/v1/writers").json()["writers"]
            [subscription] = root.get("/v1/subscriptions").json()["subscriptions"]
            assert writer["principal"] == "mallory"
            assert subscription["principal"] == "mallory"
            assert ann.get("/v1/writers").json()["writers"] == []
            assert ann.get("/v1/subscriptions").json()["subscriptions"] == []
            for path in ("/v1/writers/mallory-1", "/v1/stream/__ds/subscriptions/mallory-1"):
                assert ann.client.delete(path).status_code in (403, 404)
                assert root.client.delete(path).status_code == 204, path
            assert root.get("/v1/writers").json()["writers"] == []
            assert root.get("/v1/subscriptions").json()["subscriptions"] == []


def test_every_share_is_a_setting_that_may_be_zero() -> None:
    assert Shares(**dict.fromkeys(Shares.__dataclass_fields__, 0)).share_of("streams") == 0
    with pytest.raises(ValueError, match="streams_per_principal_max"):
        Shares(streams_per_principal_max=-1)
