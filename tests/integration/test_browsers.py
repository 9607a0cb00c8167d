"""What web pages meet: fresh answers, events that resume, read tokens, and origins that may ask."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.engines import engine as engine
from tests.integration.auth_support import (
    ADA,
    ANN,
    ROOT,
    As,
    Place,
    asked_token,
    code,
    place,
    token,
)
from tests.serving import ServerProcess

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def client(server_process: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server_process.url}/v1/stream/") as made:
        yield made


def make(client: httpx.Client, path: str, body: object = None, **headers: str) -> None:
    content = None if body is None else json.dumps(body)
    assert client.put(path, headers={**JSON, **headers}, content=content).status_code == 201


# Caches


def test_what_reaches_the_tail_is_asked_again_each_time(client: httpx.Client, path: str) -> None:
    make(client, path, [{"n": 1}])

    first = client.get(path)
    again = client.get(path, headers={"If-None-Match": first.headers["etag"]})
    client.post(path, headers=JSON, content=b'{"n": 2}')
    news = client.get(path, headers={"If-None-Match": first.headers["etag"]})

    assert first.headers["cache-control"] == "no-cache"
    assert (again.status_code, again.headers["cache-control"]) == (304, "no-cache")
    assert news.json() == [{"n": 1}, {"n": 2}]


def test_what_cannot_change_may_be_kept(client: httpx.Client, path: str) -> None:
    make(client, path, [1], **{"Stream-Closed": "true"})

    answer = client.get(path)

    assert answer.headers["cache-control"].startswith("public, max-age=60")
    assert answer.headers["vary"] == "Origin"


def test_a_piece_before_the_tail_may_be_kept(client: httpx.Client, path: str) -> None:
    make(client, path)
    for _ in range(3):
        client.post(path, headers=JSON, content=json.dumps("x" * 900_000).encode())

    answer = client.get(path)

    assert "stream-up-to-date" not in answer.headers
    assert answer.headers["cache-control"].startswith("public, max-age=60")


# Events


def sse(server: ServerProcess, target: str, *headers: str) -> list[tuple[str, str, str]]:
    """The events of a connection that ends by itself: id, kind, data."""
    lines: list[tuple[str, str, str]] = []
    with httpx.Client(headers=dict(header.split(": ") for header in headers)) as client:
        body = client.get(f"{server.url}/v1/stream/{target}").text
    for block in body.split("\n\n")[:-1]:
        fields = dict(line.split(":", 1) for line in block.split("\n"))
        lines.append((fields["id"].strip(), fields["event"].strip(), fields["data"]))
    return lines


def test_the_id_of_every_event_is_the_offset_after_it(
    server_process: ServerProcess, client: httpx.Client, path: str
) -> None:
    make(client, path, [1, 2], **{"Stream-Closed": "true"})
    tail = client.head(path).headers["stream-next-offset"]

    found = sse(server_process, f"{path}?offset=-1&live=sse")

    assert [(at, kind) for at, kind, _ in found] == [(tail, "data"), (tail, "control")]


def test_last_event_id_beats_the_offset_in_the_url(
    server_process: ServerProcess, client: httpx.Client, path: str
) -> None:
    make(client, path, [1])
    seen = client.head(path).headers["stream-next-offset"]
    client.post(path, headers={**JSON, "Stream-Closed": "true"}, content=b"2")

    found = sse(server_process, f"{path}?offset=-1&live=sse", f"Last-Event-ID: {seen}")

    assert [data for _, kind, data in found if kind == "data"] == ["[2]"]


def test_a_reader_that_comes_back_to_the_end_of_a_closed_stream_is_told_to_stay_away(
    client: httpx.Client, path: str
) -> None:
    """An EventSource reconnects after every end, except after a 204."""
    make(client, path, [1], **{"Stream-Closed": "true"})
    seen = client.head(path).headers["stream-next-offset"]

    answer = client.get(f"{path}?offset=-1&live=sse", headers={"Last-Event-ID": seen})

    assert (answer.status_code, answer.headers["stream-closed"]) == (204, "true")


def test_a_last_event_id_that_is_no_offset_is_refused(client: httpx.Client, path: str) -> None:
    make(client, path, [1])

    answer = client.get(f"{path}?offset=-1&live=sse", headers={"Last-Event-ID": "soon"})

    assert code(answer) == (400, "offset_invalid")


# Read tokens


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place(tmp_path_factory.mktemp("tokens"), ROOT, ANN, ADA) as found:
        for path in ("orders/1", "orders/2"):
            assert found("ann").create(path).status_code == 201
            assert found("ann").append(path, path).status_code in (200, 204)
        yield found


def test_a_read_token_reads_its_stream_without_a_header(guarded: Place) -> None:
    made = asked_token(guarded("ada"), "orders/1").json()

    answer = guarded(None).get(f"/v1/stream/orders/1?token={made['token']}")
    by_url = httpx.get(made["url"])

    assert (answer.status_code, answer.json()) == (200, ["orders/1"])
    assert by_url.json() == ["orders/1"]
    assert answer.headers["cache-control"] == "private, no-cache"


def test_a_read_token_is_good_for_nothing_else(guarded: Place) -> None:
    made = asked_token(guarded("ann"), "orders/1").json()["token"]
    bare = guarded(None).client

    assert code(bare.get(f"/v1/stream/orders/2?token={made}")) == (401, "unauthorized")
    assert bare.head(f"/v1/stream/orders/1?token={made}").status_code == 400
    for method, path in (
        ("POST", "/v1/stream/orders/1"),
        ("PUT", "/v1/stream/orders/1"),
        ("DELETE", "/v1/stream/orders/1"),
        ("GET", "/v1/log"),
        ("GET", "/v1/streams"),
        ("POST", "/v1/tokens"),
    ):
        assert code(bare.request(method, f"{path}?token={made}")) == (400, "token_in_url"), path
    header = {"Authorization": f"Bearer {made}"}
    assert code(bare.get("/v1/stream/orders/1", headers=header)) == (401, "unauthorized")


def test_a_token_of_a_principal_is_still_refused_in_a_url(guarded: Place) -> None:
    answer = guarded(None).get(f"/v1/stream/orders/1?token={token('ann')}")

    assert code(answer) == (400, "token_in_url")


def test_a_read_token_that_was_changed_is_refused(guarded: Place) -> None:
    made = asked_token(guarded("ann"), "orders/1").json()["token"]
    head, body, seal = made.split(".")

    for forged in (f"{head}.{body}.{seal[::-1]}", f"{head}.{body}.", "x", ""):
        answer = guarded(None).get(f"/v1/stream/orders/1?token={forged}")
        assert code(answer) == (400, "token_in_url")


def test_only_those_who_may_read_a_stream_make_tokens_for_it(guarded: Place) -> None:
    assert code(asked_token(guarded("ada"), "bills/1")) == (403, "forbidden")
    assert code(asked_token(guarded(None), "orders/1")) == (401, "unauthorized")


@pytest.mark.parametrize(
    "body",
    [{}, {"stream": 1}, {"stream": "orders/1", "ttl_s": 0}, {"stream": "orders/1", "ttl_s": 86400}],
)
def test_a_token_needs_a_stream_and_a_time_in_bounds(
    guarded: Place, body: dict[str, object]
) -> None:
    answer = guarded("ann").client.post("/v1/tokens", json=body)

    assert code(answer) == (400, "token_request_invalid")


def test_a_read_token_ends(guarded: Place) -> None:
    made = asked_token(guarded("ann"), "orders/1", ttl_s=1).json()["token"]
    target = f"/v1/stream/orders/1?token={made}"

    # Nothing but time ends it, and the clock of a real server cannot be moved.
    deadline = time.monotonic() + 30
    while guarded(None).get(target).status_code != 401:
        assert time.monotonic() < deadline

    assert code(guarded(None).get(target)) == (401, "unauthorized")


def test_a_read_token_is_never_logged(tmp_path: Path) -> None:
    environment = {"FENCEPOST_PRINCIPALS": json.dumps([ROOT, ANN])}
    server = ServerProcess(
        tmp_path / "data", arguments=("--log-level", "debug"), environment=environment
    )
    with server, As(server.url, "ann") as ann:
        ann.create("orders/1")
        made = asked_token(ann, "orders/1").json()["token"]
        assert httpx.get(f"{server.url}/v1/stream/orders/1?token={made}").status_code == 200
        assert httpx.get(f"{server.url}/v1/stream/orders/2?token={made}").status_code == 401
        assert httpx.get(f"{server.url}/v1/log?token={made}").status_code == 400

    assert made not in server.output


# Origins


FOREIGN = {"Origin": "https://evil.example"}
LOCAL = {"Origin": "http://localhost:5173"}


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE"])
def test_pages_of_foreign_origins_get_nothing_of_an_open_server(
    client: httpx.Client, path: str, method: str
) -> None:
    make(client, path, [1])

    answer = client.request(method, path, headers={**FOREIGN, **JSON}, content=b"2")

    assert answer.status_code == 403
    assert method == "HEAD" or answer.json()["code"] == "origin_not_allowed"
    assert client.get(path).json() == [1]


def test_pages_on_this_machine_read_and_append_but_neither_create_nor_delete(
    client: httpx.Client, path: str
) -> None:
    make(client, path, [1])

    assert client.post(path, headers={**LOCAL, **JSON}, content=b"2").status_code == 204
    assert client.get(path, headers=LOCAL).json() == [1, 2]
    for refused in (
        client.delete(path, headers=LOCAL),
        client.put(path, headers={**LOCAL, **JSON}),
        client.post(f"{path}?truncate&before=now", headers=LOCAL),
        client.put("__ds/subscriptions/s", headers=LOCAL, json={}),
    ):
        assert code(refused) == (403, "origin_may_not")
    assert client.get(path).json() == [1, 2]


def test_a_page_of_our_own_origin_may_do_everything(
    server_process: ServerProcess, client: httpx.Client, path: str
) -> None:
    make(client, path)

    answer = client.delete(path, headers={"Origin": server_process.url})

    assert answer.status_code == 204


def test_a_preflight_promises_what_the_server_then_takes(client: httpx.Client, path: str) -> None:
    local = client.options(path, headers={**LOCAL, "Access-Control-Request-Method": "DELETE"})
    foreign = client.options(path, headers={**FOREIGN, "Access-Control-Request-Method": "GET"})

    assert local.status_code == 204
    assert local.headers["access-control-allow-methods"] == "GET, HEAD, POST, OPTIONS"
    assert "access-control-allow-origin" in local.headers
    assert "access-control-allow-origin" not in foreign.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 404),
        ("127.0.0.1", 404),
        ("[::1]:4437", 404),
        ("app.localhost", 404),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:80", 403),
    ],
)
def test_a_name_that_leads_here_by_rebinding_is_refused(
    client: httpx.Client, host: str, status: int
) -> None:
    answer = client.get("nothing", headers={"Host": host})

    assert answer.status_code == status
    assert status == 404 or answer.json()["code"] == "host_not_allowed"


def test_settings_name_further_origins_and_hosts(tmp_path: Path) -> None:
    environment = {
        "FENCEPOST_SERVER_ALLOWED_ORIGINS": "https://app.example",
        "FENCEPOST_SERVER_ALLOWED_HOSTS": "streams.example",
    }
    with ServerProcess(tmp_path / "data", environment=environment) as server:
        url = f"{server.url}/v1/stream/s"
        httpx.put(url, headers=JSON)

        assert httpx.get(url, headers={"Origin": "https://app.example"}).status_code == 200
        assert httpx.get(url, headers={"Host": "streams.example"}).status_code == 200
        assert httpx.get(url, headers=LOCAL).status_code == 403


def test_with_principals_every_origin_may_ask(guarded: Place) -> None:
    answer = guarded("ann").client.delete("/v1/stream/orders/none", headers=FOREIGN)

    assert answer.status_code == 404
