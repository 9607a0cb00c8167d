"""How far a principal reaches: into lists, the log, forks, commits, staging and subscriptions."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines import empty_store as empty_store
from tests.engines import engine as engine
from tests.integration.auth_support import (
    ALL,
    ANN,
    BOB,
    FORBIDDEN,
    ROOT,
    Place,
    code,
    place,
    principal,
    token,
)
from tests.integration.raw import Connection, events, request

READER = principal("reader", ("orders/open/*", ["read"]))
WRITER = principal("writer", ("orders/**", ["append", "create"]))
SOME_ADMIN = principal("some-admin", ("orders/**", ["admin"]))
SECRET = "bobs-secret"


@pytest.fixture
def here(empty_store: Path | str) -> Iterator[Place]:
    """Streams of ann and of bob; ann must never see bob's."""
    with place(empty_store, ROOT, ANN, BOB, READER, WRITER, SOME_ADMIN) as found:
        for path in ("orders/1", "orders/open/2", "wakes/ann"):
            found("ann").create(path)
        found("ann").send("orders/1", "ann-1", 0, 0, "for ann")
        for path in ("bills/1", f"bills/{SECRET}", "wakes/bob"):
            found("bob").create(path)
        found("bob").send(f"bills/{SECRET}", SECRET, 0, 0, SECRET, idempotency_key=SECRET)
        yield found


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code in (200, 204), answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


# Lists


def test_lists_show_what_may_be_read_and_nothing_else(here: Place) -> None:
    streams = here("ann").get("/v1/streams").json()
    producers = here("ann").get("/v1/producers").json()
    keys = here("ann").get("/v1/keys").json()

    assert [entry["path"] for entry in streams["streams"]] == [
        "orders/1",
        "orders/open/2",
        "wakes/ann",
    ]
    assert [entry["id"] for entry in producers["producers"]] == ["ann-1"]
    assert keys["keys"] == []
    for answer in (streams, producers, keys):
        assert SECRET not in json.dumps(answer)
    assert [e["path"] for e in here("reader").get("/v1/streams").json()["streams"]] == [
        "orders/open/2"
    ]


@pytest.mark.parametrize("match", ["**", "bills/**", "bills/*", f"bills/{SECRET}", "*/*"])
def test_no_pattern_widens_a_list(here: Place, match: str) -> None:
    for path in ("/v1/streams", "/v1/producers?match=*"):
        name = "stream" if "producers" in path else "match"
        answer = here("ann").get(path, params={name: match})

        assert answer.status_code == 200
        assert SECRET not in answer.text


def test_where_a_list_goes_on_does_not_tell_what_is_there(here: Place) -> None:
    """Neither does the size of its pages: they hold what a principal may see, and are full."""
    for number in range(5):
        here("bob").append("bills/1", number, idempotency_key=f"{SECRET}-{number}")
    seen: list[str] = []
    after: str | None = ""
    pages = 0
    while after is not None:
        params = {"limit": 1} | ({"after": after} if after else {})
        page = here("ann").get("/v1/keys", params=params)
        assert SECRET not in page.text
        seen += [entry["key"] for entry in page.json()["keys"]]
        after = page.json()["next"]
        if after is not None:
            assert SECRET.encode() not in _decoded(after)
        pages += 1

    assert seen == []
    assert pages == 1
    assert code(here("ann").get("/v1/keys?after=WyIxIiwiIiwiayJd"))[1] == "after_invalid"
    assert code(here("ann").get("/v1/streams?after=/made-up"))[1] == "after_invalid"


def _decoded(token: str) -> bytes:
    import base64

    return base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))


def test_pages_of_lists_add_up_for_those_who_see_all(here: Place) -> None:
    for what, field in (("streams", "path"), ("producers", "id"), ("keys", "key")):
        whole = here("root").get(f"/v1/{what}").json()[what]
        found, after = [], None
        while True:
            params = {"limit": 1} | ({"after": after} if after else {})
            page = here("root").get(f"/v1/{what}", params=params).json()
            found += page[what]
            after = page["next"]
            if after is None:
                break

        assert [entry[field] for entry in found] == [entry[field] for entry in whole]


# The log


def test_the_log_shows_what_may_be_read_and_nothing_else(here: Place) -> None:
    assert {row["stream"] for row in lines(here("ann").get("/v1/log"))} == {"orders/1"}
    assert {row["stream"] for row in lines(here("bob").get("/v1/log"))} == {f"bills/{SECRET}"}
    assert lines(here("reader").get("/v1/log")) == []
    assert {row["stream"] for row in lines(here("root").get("/v1/log"))} == {
        "orders/1",
        f"bills/{SECRET}",
    }


@pytest.mark.parametrize(
    "query",
    [
        "match=**",
        "match=bills/**",
        f"stream=bills/{SECRET}",
        f"stream=bills/{SECRET}&match=**",
        "part=0/1",
        "match=**&live=long-poll",
    ],
)
def test_no_selection_widens_the_log(here: Place, query: str) -> None:
    answer = here("ann").get(f"/v1/log?{query}")
    plan = here("ann").get(f"/v1/log/plan?{query.removesuffix('&live=long-poll')}")

    assert SECRET not in answer.text
    own = sum(1 for row in lines(answer) if row["stream"] == "orders/1")
    assert plan.json()["rows"] == own
    arrow = {"Accept": "application/vnd.apache.arrow.stream"}
    assert SECRET.encode() not in here("ann").get(f"/v1/log?{query}", headers=arrow).content


def test_who_follows_the_log_hears_of_their_own_streams_only(here: Place) -> None:
    with Connection(here.process.port) as connection:
        connection.send(
            request("GET", "/v1/log?live=sse&after=now", f"Authorization: Bearer {token('ann')}")
        )
        assert connection.head().status == 200
        following = events(connection.chunks())
        assert next(following).kind == "control"
        here("bob").append("bills/1", SECRET)
        here("ann").append("orders/1", "news")
        shown = []
        for event in following:
            shown.append(event.data)
            if "news" in event.data:
                break

    assert not any(SECRET in data for data in shown)


def test_a_long_poll_of_the_log_is_not_ended_by_what_it_may_not_see(here: Place) -> None:
    head = here("ann").client.head("/v1/log").headers["Log-Head"]
    here("bob").append("bills/1", SECRET)

    answer = here("ann").get(f"/v1/log?live=long-poll&after={head}")

    assert answer.status_code == 204


# Live reads of one stream


@pytest.mark.parametrize("live", ["long-poll", "sse"])
def test_a_live_read_without_the_grant_is_refused_at_once(here: Place, live: str) -> None:
    answer = here("ann").get(f"/v1/stream/bills/1?live={live}&offset=-1")

    assert code(answer) == FORBIDDEN


# Forks


def test_a_fork_reaches_only_into_what_may_be_read(here: Place) -> None:
    for source in ("bills/1", f"bills/{SECRET}", "bills/none"):
        answer = here("ann").create("orders/fork", stream_forked_from=f"/v1/stream/{source}")
        assert code(answer) == FORBIDDEN
    for source in ("__audit", "bills/../orders/1"):
        answer = here("root").create("orders/fork", stream_forked_from=f"/v1/stream/{source}")
        assert answer.status_code == 400
    good = here("ann").create("orders/fork", stream_forked_from="/v1/stream/orders/1")
    assert good.status_code == 201
    assert here("ann").get("/v1/stream/orders/fork").json() == ["for ann"]


def test_a_list_does_not_name_the_source_of_a_fork_that_may_not_be_read(here: Place) -> None:
    here("root").create("orders/fork", stream_forked_from="/v1/stream/bills/1")

    shown = {e["path"]: e for e in here("ann").get("/v1/streams").json()["streams"]}

    assert "forked_from" not in shown["orders/fork"]
    assert "bills" not in json.dumps(shown)


# Commits and staging


def test_a_commit_that_reaches_too_far_does_nothing_at_all(here: Place) -> None:
    answer = here("ann").commit(
        {"stream": "orders/1", "data": "x"}, {"stream": "bills/1", "data": "x"}
    )

    assert code(answer) == FORBIDDEN
    assert answer.json()["item"] == 1
    assert here("ann").get("/v1/stream/orders/1").json() == ["for ann"]
    for path in ("bills/none", "bills/../orders/1", "__audit"):
        assert here("ann").commit({"stream": path, "data": 1}).status_code in (400, 403)


def test_a_commit_needs_what_each_of_its_appends_needs(here: Place) -> None:
    one = {"stream": "orders/1", "data": 1}

    assert here("writer").commit(one).status_code == 200
    assert code(here("writer").commit({**one, "close": True})) == FORBIDDEN
    assert here("writer").commit({**one, "stream": "orders/new", "auto_create": True}).is_success
    assert code(here("reader").commit({**one, "stream": "orders/open/2"})) == FORBIDDEN


def test_the_answer_to_a_commit_says_nothing_of_streams_that_may_not_be_read(here: Place) -> None:
    item = {"stream": "orders/1", "data": "w"}
    answers = [here("writer").commit(item, idempotency_key="k").json() for _ in range(2)]
    full = here("ann").commit(item).json()

    assert [answer["appends"] for answer in answers] == [[{"stream": "orders/1"}]] * 2
    assert [answer["duplicate"] for answer in answers] == [False, True]
    assert "offset" in full["appends"][0]


def stage(here: Place, name: str, txn: str, value: object) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    return here(name).client.post(
        f"/v1/staging/{txn}/p", content=json.dumps(value), headers=headers
    )


def test_what_one_principal_stages_is_not_there_for_another(here: Place) -> None:
    assert stage(here, "bob", "load", SECRET).status_code == 201
    taken = here("ann").commit({"stream": "orders/1", "parts": [{"txn": "load", "part": "p"}]})
    # The name is free for ann, and means her own.
    own = stage(here, "ann", "load", "mine")
    committed = here("ann").commit({"stream": "orders/1", "parts": [{"txn": "load", "part": "p"}]})
    bobs = here("bob").commit({"stream": "bills/1", "parts": [{"txn": "load", "part": "p"}]})

    assert code(taken) == (409, "part_missing")
    assert "load/p" in taken.json()["detail"]
    assert own.status_code == 201
    assert (own.json()["txn"], own.json()["duplicate"]) == ("load", False)
    assert committed.status_code == bobs.status_code == 200
    assert here("ann").get("/v1/stream/orders/1").json() == ["for ann", "mine"]
    assert here("bob").get("/v1/stream/bills/1").json() == [SECRET]


def test_a_bundle_needs_append_on_every_stream_that_it_is_for(here: Place) -> None:
    def bundle(*streams: str) -> tuple[int, str]:
        line = [
            {"piece": number, "stream": one, "content_type": "application/json", "bytes": 1}
            for number, one in enumerate(streams)
        ]
        body = json.dumps(line) + "\n" + "1" * len(streams)
        headers = {"Content-Type": "application/vnd.fencepost.bundle"}
        answer = here("writer").client.post("/v1/staging/wide/p", content=body, headers=headers)
        return answer.status_code, answer.json().get("code", "")

    assert bundle("orders/1", "orders/2") == (201, "")
    assert bundle("orders/3", "bills/1") == FORBIDDEN
    assert bundle("orders/3", "__audit") == (400, "path_reserved")


@pytest.mark.parametrize("txn", ["bob\x1fload", "bob/load", "\x1fload", "../bob/load", "load"])
def test_no_name_of_a_part_reaches_another_principals(here: Place, txn: str) -> None:
    assert stage(here, "bob", "load", SECRET).status_code == 201

    answer = here("ann").commit({"stream": "orders/1", "parts": [{"txn": txn, "part": "p"}]})

    assert answer.status_code in (400, 409)
    assert here("ann").get("/v1/stream/orders/1").json() == ["for ann"]


def test_who_may_append_nothing_stages_nothing(here: Place) -> None:
    assert code(stage(here, "reader", "t", 1)) == FORBIDDEN


# Subscriptions


def pull(pattern: str | None, wake_stream: str, *streams: str) -> dict[str, Any]:
    body: dict[str, Any] = {"type": "pull-wake", "wake_stream": wake_stream, "lease_ttl_ms": 30000}
    if pattern is not None:
        body["pattern"] = pattern
    if streams:
        body["streams"] = list(streams)
    return body


def subscribe(here: Place, who: str, name: str, body: dict[str, Any]) -> httpx.Response:
    return here(who).client.put(f"/v1/stream/__ds/subscriptions/{name}", json=body)


def act(here: Place, who: str, name: str, action: str, body: object) -> httpx.Response:
    return here(who).client.post(f"/v1/stream/__ds/subscriptions/{name}/{action}", json=body)


@pytest.mark.parametrize(
    "body",
    [
        pull("**", "wakes/ann"),
        pull("bills/*", "wakes/ann"),
        pull("*/1", "wakes/ann"),
        pull(None, "wakes/ann", "bills/1"),
        pull(None, "wakes/ann", "orders/1", "bills/none"),
        pull("orders/*", "wakes/bob"),
        pull("orders/*", "bills/1"),
    ],
)
def test_a_subscription_needs_read_on_whatever_it_can_match_and_append_on_its_wakes(
    here: Place, body: dict[str, Any]
) -> None:
    assert code(subscribe(here, "ann", "s", body)) == FORBIDDEN


def test_a_subscription_is_its_owners_and_for_others_it_is_not_there(here: Place) -> None:
    assert subscribe(here, "ann", "s", pull("orders/**", "wakes/ann")).status_code == 201
    here("ann").append("orders/1", "work")
    absent = act(here, "bob", "none", "claim", {"worker": "w"})

    for answer in (
        here("bob").get("/v1/stream/__ds/subscriptions/s"),
        here("bob").client.delete("/v1/stream/__ds/subscriptions/s"),
        act(here, "bob", "s", "streams", {"streams": ["bills/1"]}),
        here("bob").client.delete("/v1/stream/__ds/subscriptions/s/streams/orders%2F1"),
        act(here, "bob", "s", "claim", {"worker": "w"}),
        act(here, "reader", "s", "claim", {"worker": "w"}),
    ):
        assert answer.status_code == 404
        assert answer.json() == absent.json()
    assert code(subscribe(here, "bob", "s", pull("bills/**", "wakes/bob"))) == FORBIDDEN
    claimed = act(here, "ann", "s", "claim", {"worker": "w"})
    assert [entry["path"] for entry in claimed.json()["streams"]] == ["orders/1"]
    assert here("root").get("/v1/stream/__ds/subscriptions/s").status_code == 200


def test_a_list_of_subscriptions_has_those_of_its_reader(here: Place) -> None:
    for name in ("b", "a", "c"):
        who = "bob" if name == "c" else "ann"
        body = pull("orders/**" if who == "ann" else "bills/**", f"wakes/{who}")
        assert subscribe(here, who, name, body).status_code == 201

    def listed(who: str, query: str = "") -> tuple[list[str], str | None]:
        found = here(who).get(f"/v1/subscriptions{query}").json()
        return [one["id"] for one in found["subscriptions"]], found["next"]

    assert listed("ann") == (["a", "b"], None)
    assert listed("ann", "?limit=1") == (["a"], "a")
    assert listed("ann", "?limit=1&after=a") == (["b"], None)
    assert listed("bob") == (["c"], None)
    assert listed("reader") == ([], None)
    assert listed("root") == (["a", "b", "c"], None)


def test_a_worker_speaks_by_the_token_of_its_wake_and_no_other(here: Place) -> None:
    subscribe(here, "ann", "s", pull("orders/**", "wakes/ann"))
    here("ann").append("orders/1", "work")
    claimed = act(here, "ann", "s", "claim", {"worker": "w"}).json()
    body = {"wake_id": claimed["wake_id"], "generation": claimed["generation"], "done": True}

    def say(bearer: str | None, name: str = "s") -> httpx.Response:
        headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
        url = f"{here.process.url}/v1/stream/__ds/subscriptions/{name}/ack"
        return httpx.post(url, json=body, headers=headers)

    assert code(say(None)) == (401, "token_missing")
    assert code(say(None, "none")) == (401, "token_missing")
    for bearer in (token("ann"), token("root")):
        assert code(say(bearer)) == code(say(bearer, "none")) == (401, "token_invalid")
    assert say(claimed["token"]).status_code == 200


def test_more_streams_are_linked_only_if_the_owner_may_read_them(here: Place) -> None:
    subscribe(here, "ann", "s", pull("orders/**", "wakes/ann"))

    for who in ("ann", "root"):
        assert code(act(here, who, "s", "streams", {"streams": ["bills/1"]})) == FORBIDDEN
    assert act(here, "ann", "s", "streams", {"streams": ["orders/9"]}).status_code == 204


def test_a_worker_of_another_principal_may_claim_with_the_verb_and_the_grants(
    empty_store: Path | str,
) -> None:
    worker = principal("worker", ("orders/**", ["read"]), ("wakes/ann", ["claim"]))
    blind = principal("blind", ("wakes/ann", ["claim"]))
    with place(empty_store, ANN, worker, blind) as here:
        here("ann").create("orders/1")
        here("ann").create("wakes/ann")
        subscribe(here, "ann", "s", pull("orders/**", "wakes/ann"))
        here("ann").append("orders/1", "work")

        assert act(here, "blind", "s", "claim", {"worker": "w"}).status_code == 404
        assert act(here, "worker", "s", "claim", {"worker": "w"}).status_code == 200


def test_a_pattern_never_takes_in_the_audit_stream_of_somebody_who_may_not_read_it(
    empty_store: Path | str,
) -> None:
    every = principal("every", ("**", ALL))
    with place(empty_store, ROOT, every) as here:
        here("every").create("wakes")

        made = subscribe(here, "every", "s", pull("**", "wakes"))

        assert made.status_code == 201
        assert "__audit" not in made.text
        assert "__audit" not in here("every").get("/v1/streams").text
        assert here("every").get("/v1/log?match=__audit").text == ""


def test_a_subscription_whose_owner_lost_a_grant_tells_of_that_stream_no_more(
    empty_store: Path | str,
) -> None:
    with place(empty_store, ROOT, ANN) as here:
        for path in ("orders/1", "orders/open/2", "wakes/ann"):
            here("ann").create(path)
        subscribe(here, "ann", "s", pull("orders/**", "wakes/ann"))
        here("ann").append("orders/1", "work")
    less = principal("ann", ("orders/open/*", ALL), ("wakes/ann", ALL))
    with place(empty_store, ROOT, less) as here:
        shown = here("ann").get("/v1/stream/__ds/subscriptions/s").json()
        nothing = act(here, "ann", "s", "claim", {"worker": "w"})
        here("root").create("orders/later")
        here("root").append("orders/later", 1)
        here("ann").append("orders/open/2", "open")
        claimed = act(here, "ann", "s", "claim", {"worker": "w"}).json()

        assert [link["path"] for link in shown["streams"]] == ["orders/open/2"]
        assert code(nothing) == (409, "no_pending_work")
        assert [entry["path"] for entry in claimed["streams"]] == ["orders/open/2"]
    with place(empty_store, ROOT, BOB) as here:
        shown = here("root").get("/v1/stream/__ds/subscriptions/s").json()
        assert shown["streams"] == []
        assert shown["pending_streams"] == 0


def test_pages_of_keys_are_full_whatever_others_store(here: Place) -> None:
    """For a principal that sees its own keys, and for one that administers some streams."""
    for number in range(4):
        for name, path in (("ann", "orders/1"), ("bob", "bills/1")):
            here(name).append(path, number, idempotency_key=f"page-{number}")

    for name in ("ann", "some-admin"):
        after, sizes = None, []
        while True:
            params = {"limit": 2} | ({"after": after} if after else {})
            page = here(name).get("/v1/keys", params=params).json()
            sizes.append(len(page["keys"]))
            after = page["next"]
            if after is None:
                break

        assert sizes[:2] == [2, 2], name
        assert all(size == 2 for size in sizes[:-1]), name


def test_lists_of_meshes_tell_nothing_of_what_may_not_be_read(empty_store: Path | str) -> None:
    """Neither by where a page ends, nor by whether the mesh exists."""
    own = principal("own", ("__mesh/mine", ALL), ("__mesh/mine/**", ALL))
    with place(empty_store, ROOT, own) as here:
        root, view = here("root").client, here("own").client
        for mesh in ("hidden", "mine", "secret"):
            assert root.put(f"/v1/mesh/{mesh}").status_code == 201
            for noun in ("members", "queues", "topics"):
                assert root.put(f"/v1/mesh/{mesh}/{noun}/ann").status_code == 201
                assert root.put(f"/v1/mesh/{mesh}/{noun}/bea").status_code == 201

        meshes = view.get("/v1/mesh?limit=1").json()
        assert [mesh["mesh"] for mesh in meshes["meshes"]] == ["mine"]
        assert meshes["next"] is None
        for noun in ("members", "queues", "topics"):
            empty: dict[str, Any] = {noun: [], "next": None}
            assert view.get(f"/v1/mesh/secret/{noun}?limit=1").json() == empty
            assert view.get(f"/v1/mesh/missing/{noun}?limit=1").json() == empty
            first = view.get(f"/v1/mesh/mine/{noun}?limit=1").json()
            assert (len(first[noun]), first["next"]) == (1, "ann")
            second = view.get(f"/v1/mesh/mine/{noun}?limit=1&after=ann").json()
            assert (len(second[noun]), second["next"]) == (1, None)
            assert root.get(f"/v1/mesh/missing/{noun}").status_code == 404
