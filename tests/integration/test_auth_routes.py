"""Every endpoint against every verb: a route that is missing in this table fails here."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest

from tests.integration.auth_support import ROOT, Place, place, principal
from tests.integration.openapi import DOCUMENT

VERBS = ("read", "append", "create", "close", "delete", "claim")
EVERYBODY = frozenset((*VERBS, "none", "admin"))
NOBODY = frozenset(("admin",))
METHODS = ("get", "head", "post", "put", "delete", "patch")
SUBSCRIPTION = "/v1/stream/__ds/subscriptions/{id}"
WRITER = "/v1/writers/{name}"
GROUP = "/v1/groups/{group}"
MESH = "/v1/mesh/{mesh}"
WAKE_TOKEN = ("token_missing", "token_invalid")


def only(*verbs: str) -> frozenset[str]:
    """Principals that may use it: those with one of these verbs, and administrators."""
    return frozenset((*verbs, "admin"))


class Route(NamedTuple):
    """Who may use a route, each principal having one verb on all streams."""

    allowed: frozenset[str]
    open: bool = False
    hidden: bool = False
    """Whether it is a 404 for others, not a 403: a subscription is its owner's."""
    json: object = None
    content: bytes = b""


TABLE: dict[tuple[str, str], Route] = {
    ("put", "/v1/stream/{path}"): Route(only("create")),
    ("post", "/v1/stream/{path}"): Route(only("append"), content=b"1"),
    ("get", "/v1/stream/{path}"): Route(only("read")),
    ("head", "/v1/stream/{path}"): Route(only("read")),
    ("delete", "/v1/stream/{path}"): Route(only("delete")),
    ("post", "/v1/commit"): Route(
        only("append"),
        json={"appends": [{"stream": "s", "content_type": "application/json", "data": 1}]},
    ),
    ("post", "/v1/staging/{txn}/{part}"): Route(only("append"), content=b"1"),
    ("delete", "/v1/staging/{txn}/{part}"): Route(only("append")),
    ("get", "/v1/writers"): Route(EVERYBODY),
    ("post", WRITER): Route(only("append"), json={"query": "q"}),
    ("get", WRITER): Route(NOBODY, hidden=True),
    ("delete", WRITER): Route(NOBODY, hidden=True),
    ("get", "/v1/writer-history/{name}"): Route(NOBODY, hidden=True),
    # What these show is narrowed: see test_auth_reach.
    ("get", "/v1/log"): Route(only("read")),
    ("get", "/v1/log/plan"): Route(only("read")),
    ("get", "/v1/streams"): Route(EVERYBODY),
    ("get", "/v1/producers"): Route(EVERYBODY),
    ("get", "/v1/keys"): Route(EVERYBODY),
    ("post", "/v1/tokens"): Route(only("read"), json={"stream": "s"}),
    ("get", "/v1/openapi.json"): Route(EVERYBODY),
    ("get", "/v1/subscriptions"): Route(EVERYBODY),
    ("put", SUBSCRIPTION): Route(
        only("read"),
        json={
            "type": "webhook",
            "pattern": "a/*",
            "webhook": {"url": "http://127.0.0.1:9/"},
        },
    ),
    ("get", SUBSCRIPTION): Route(NOBODY, hidden=True),
    ("delete", SUBSCRIPTION): Route(NOBODY, hidden=True),
    ("post", f"{SUBSCRIPTION}/streams"): Route(NOBODY, hidden=True, json={"streams": ["s"]}),
    ("delete", f"{SUBSCRIPTION}/streams/{{path}}"): Route(NOBODY, hidden=True),
    ("post", f"{SUBSCRIPTION}/claim"): Route(NOBODY, hidden=True, json={"worker": "w"}),
    # A worker shows the token of its wake here, which stands for a principal.
    **{
        ("post", f"{SUBSCRIPTION}/{action}"): Route(
            EVERYBODY, open=True, json={"wake_id": "w", "generation": 1}
        )
        for action in ("ack", "callback", "release")
    },
    ("get", "/v1/groups"): Route(EVERYBODY),
    ("put", GROUP): Route(only("create"), json={"sources": ["a/*"]}),
    ("get", GROUP): Route(only("read")),
    ("delete", GROUP): Route(only("delete")),
    ("post", f"{GROUP}/correlate"): Route(only("claim"), json={"after": -1, "until": -1}),
    ("post", f"{GROUP}/claim"): Route(only("claim"), json={"worker": "w"}),
    ("post", f"{GROUP}/ack"): Route(only("claim"), json={"items": []}),
    ("post", f"{GROUP}/renew"): Route(only("claim"), json={"tokens": []}),
    ("post", f"{GROUP}/release"): Route(only("claim"), json={"tokens": []}),
    **{
        ("post", f"{GROUP}/{action}"): Route(
            NOBODY, json={"filter": {}, "until_ms": 1, "priority": 1}
        )
        for action in ("unblock", "reset", "defer", "prioritize", "skip")
    },
    **{
        ("post", f"{GROUP}/{action}"): Route(NOBODY, json={"filter": {}})
        for action in ("park", "replay")
    },
    **{
        ("get", f"{GROUP}/{what}"): Route(only("read"))
        for what in ("streams", "parked", "workers", "stats", "events")
    },
    ("get", "/v1/mesh"): Route(EVERYBODY),
    ("put", MESH): Route(only("create")),
    ("get", MESH): Route(only("read")),
    ("delete", MESH): Route(only("delete")),
    **{("get", f"{MESH}/{plural}"): Route(EVERYBODY) for plural in ("members", "topics", "queues")},
    **{
        (method, f"{MESH}/{plural}/{{{plural[:-1]}}}"): Route(only(verb))
        for plural in ("members", "topics", "queues")
        for method, verb in (("put", "create"), ("get", "read"), ("delete", "delete"))
    },
    ("get", f"{MESH}/topics/{{topic}}/members"): Route(only("read")),
    # A member listens where one may create on the topic, and send to its inbox or read it.
    ("put", f"{MESH}/topics/{{topic}}/members/{{member}}"): Route(NOBODY),
    **{
        (method, f"{MESH}/topics/{{topic}}/members/{{member}}"): Route(only(verb))
        for method, verb in (("get", "read"), ("delete", "delete"))
    },
    ("post", f"{MESH}/send"): Route(
        only("append"), json={"kind": "topic", "ref": "topic", "body": ""}
    ),
    # Each send of a batch is granted or refused by itself.
    ("post", f"{MESH}/sends"): Route(
        EVERYBODY, json={"sends": [{"kind": "topic", "ref": "topic", "body": ""}]}
    ),
    ("get", f"{MESH}/features"): Route(only("read")),
    ("post", f"{MESH}/negotiate"): Route(only("read"), json={}),
    ("get", f"{MESH}/session"): Route(only("read")),
    ("get", f"{MESH}/dedupe"): Route(NOBODY),
    **{("post", f"{MESH}/{what}"): Route(NOBODY) for what in ("check", "rebuild", "sweep")},
    ("get", "/v1/stream/__ds/jwks.json"): Route(EVERYBODY, open=True),
    ("get", "/healthz"): Route(EVERYBODY, open=True),
    ("get", "/readyz"): Route(NOBODY),
    ("get", "/metrics"): Route(NOBODY),
}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    who = [principal(verb, ("**", [verb])) for verb in VERBS]
    none = principal("none")
    admin = principal("admin", ("**", ["admin"]))
    # A feed is a route like others, and shall not be waited for.
    soon = {"FENCEPOST_SERVER_SSE_MS": "50"}
    folder = tmp_path_factory.mktemp("routes")
    with place(folder, ROOT, admin, none, *who, environment=soon) as found:
        yield found


def test_every_route_of_the_server_is_in_the_table() -> None:
    """The document has exactly the routes of the server: test_openapi holds it to that."""
    documented = {
        (method, path)
        for path, item in DOCUMENT["paths"].items()
        for method in METHODS
        if method in item
    }

    assert documented == set(TABLE), "say in this table who may use a route"


@pytest.mark.parametrize("method_and_path", TABLE, ids=lambda key: f"{key[0]} {key[1]}")
def test_a_route_is_for_those_who_have_its_verb(
    here: Place, method_and_path: tuple[str, str]
) -> None:
    route = TABLE[method_and_path]

    found = {name for name in sorted(EVERYBODY) if is_let_in(here, name, method_and_path)}

    assert found == route.allowed


@pytest.mark.parametrize("method_and_path", TABLE, ids=lambda key: f"{key[0]} {key[1]}")
def test_nobody_gets_further_than_the_door(here: Place, method_and_path: tuple[str, str]) -> None:
    route = TABLE[method_and_path]

    answer = ask(here, None, method_and_path)

    if route.open:
        assert answer.status_code != 403
        assert answer.status_code < 400 or answer.json()["code"] != "unauthorized"
    else:
        assert answer.status_code == 401


READ_ROUTES = [(method, path) for method, path in TABLE if method == "get"]


@pytest.mark.parametrize("method_and_path", READ_ROUTES, ids=lambda key: key[1])
def test_a_head_is_refused_to_those_to_whom_the_get_is(
    here: Place, method_and_path: tuple[str, str]
) -> None:
    for name in (*sorted(EVERYBODY), None):
        answer = ask(here, name, method_and_path)
        head = ask(here, name, method_and_path, method="head")

        assert head.status_code == answer.status_code, name


def test_a_route_that_nobody_knows_is_for_administrators(here: Place) -> None:
    for path in ("/v1/groups/g/other", "/v1/mesh/m/other", "/_/", "/", "/v1/log/", "/healthz/"):
        assert here("read").get(path).status_code == 403
        assert here(None).get(path).status_code == 401
        assert here("admin").get(path).status_code == 404


def is_let_in(here: Place, name: str, method_and_path: tuple[str, str]) -> bool:
    answer = ask(here, name, method_and_path)
    assert answer.status_code != 401 or answer.json()["code"] in WAKE_TOKEN
    if answer.status_code == 404 and TABLE[method_and_path].hidden:
        return False
    return answer.status_code != 403


def ask(
    here: Place, name: str | None, method_and_path: tuple[str, str], *, method: str = ""
) -> httpx.Response:
    """Use a route on things that are there and another principal's, or ask it by another method."""
    here("root").create("s")
    body = {
        "type": "pull-wake",
        "pattern": "a/*",
        "wake_stream": "wakes",
    }
    here("root").client.put(SUBSCRIPTION.format(id="theirs"), json=body)
    here("root").client.post(WRITER.format(name="theirs"), json={"query": "q"})
    here("root").client.put(GROUP.format(group="theirs"), json={"sources": ["a/*"]})
    method, path = method or method_and_path[0], method_and_path[1]
    route = TABLE[method_and_path]
    values = {"path": "s", "txn": "t", "part": f"p-{name}", "id": "theirs", "name": "theirs"}
    values["group"] = "theirs"
    values |= {"mesh": "theirs", "member": "ann", "topic": "topic", "queue": "jobs"}
    if method == "put":
        values["id"] = f"new-{name}"
    if method == "post":
        values["name"] = f"new-{name}"
    url = re.sub(r"\{(\w+)\}", lambda found: values[found[1]], path)
    return here(name).client.request(
        method,
        url,
        headers={"Content-Type": "application/json"},
        **({"content": route.content} if route.json is None else {"json": route.json}),
    )
