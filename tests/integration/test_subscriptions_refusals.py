"""What subscriptions refuse: unsafe webhooks, malformed requests, and everything beyond a limit."""

from collections.abc import Iterator

import pytest

from tests.engines import engine as engine
from tests.integration.subscriptions_support import Client, code
from tests.serving import ServerProcess

PULL = {"type": "pull-wake", "pattern": "events/*", "wake_stream": "wake/pool"}
HOOK = {"type": "webhook", "pattern": "events/*", "webhook": {"url": "https://worker.example/"}}


@pytest.fixture(scope="module")
def client(server_process: ServerProcess) -> Iterator[Client]:
    with Client(server_process.url) as found:
        yield found


@pytest.mark.parametrize(
    "url",
    [
        "http://worker.example/hook",
        "ftp://worker.example/hook",
        "worker.example/hook",
        "",
        "https://",
        "https:///hook",
        "http://10.0.0.1/hook",
        "https://10.0.0.1/hook",
        "https://172.16.9.9/",
        "https://192.168.1.1/",
        "https://100.64.0.1/",
        "https://169.254.169.254/latest/meta-data",
        "https://0.0.0.0/",
        "https://0/",
        "https://127.1/",
        "https://2130706433/",
        "https://0x7f000001/",
        "https://0x7f.0.0.1/",
        "https://0177.0.0.1/",
        "https://017700000001/",
        "https://127.0.0.1.0x1/",
        "https://127.1.2.3/",
        "http://127.1.2.3/",
        "https://[::1]/",
        "http://[::1]/",
        "https://[::]/",
        "https://[::ffff:127.0.0.1]/",
        "https://[::ffff:7f00:1]/",
        "https://[::ffff:8.8.8.8]/",
        "https://[64:ff9b::7f00:1]/",
        "https://[2002:7f00:1::]/",
        "https://[fe80::1]/",
        "https://[fe80::1%25eth0]/",
        "https://[fc00::1]/",
        "https://[ff02::1]/",
        "https://[fd00:ec2::254]/",
        "https://224.0.0.1/",
        "https://255.255.255.255/",
        "https://metadata.google.internal/",
        "https://printer.local/",
        "https://sub.localhost/",
        "http://localhost.example@10.0.0.1/",
        "https://user:secret@worker.example/",
        "https://worker.example/#fragment",
        "https://worker.example:0/",
        "https://worker.example:99999/",
        "https://worker.example:port/",
        "https://worker.example\\@10.0.0.1/",
        "https://worker .example/",
        "https://worker.example/\r\nX-Injected: yes",
        "https://\uff11\uff12\uff17.0.0.1/",
        "https://-worker.example/",
        "https://worker..example/",
    ],
)
def test_an_unsafe_webhook_is_refused(client: Client, url: str) -> None:
    answer = client.subscribe("unsafe", **{**HOOK, "webhook": {"url": url}})

    assert answer.status_code == 400, answer.text
    assert code(answer) == "WEBHOOK_URL_REJECTED"
    assert client.http.get("__ds/subscriptions/unsafe").status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[]",
        b"{}",
        b'{"type": "webhook", "pattern": "a", "webhook": {"url": "\xff"}}',
        b'{"type": "carrier-pigeon", "pattern": "a"}',
        b"[" * 100_000,
    ],
)
def test_a_malformed_body_is_refused(client: Client, body: bytes) -> None:
    answer = client.http.put(
        "__ds/subscriptions/malformed",
        content=body,
        headers={"Content-Type": "application/json"},
    )

    assert (answer.status_code, code(answer)) == (400, "INVALID_REQUEST")


@pytest.mark.parametrize(
    "changes",
    [
        {"pattern": None},
        {"pattern": None, "streams": []},
        {"pattern": ""},
        {"pattern": "a**"},
        {"pattern": "/a"},
        {"pattern": 7},
        {"pattern": "a" * 1025},
        {"streams": ["__ds/x"]},
        {"streams": ["a/../b"]},
        {"streams": ["a\u0000b"]},
        {"streams": ["/a"]},
        {"streams": ["a" * 1025]},
        {"streams": ["wake/pool"]},
        {"streams": "a"},
        {"wake_stream": None},
        {"wake_stream": "__ds/wake"},
        {"wake_stream": ""},
        {"lease_ttl_ms": 999},
        {"lease_ttl_ms": 600_001},
        {"lease_ttl_ms": "30000"},
        {"lease_ttl_ms": 1.5},
        {"description": "d" * 5000},
        {"description": 7},
        {"type": "webhook"},
        {"type": "webhook", "webhook": {}},
        {"type": "webhook", "webhook": "https://worker.example/"},
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(
    client: Client, changes: dict[str, object]
) -> None:
    answer = client.subscribe("senseless", **{**PULL, **changes})

    assert answer.status_code == 400, answer.text
    problem = answer.json()
    assert problem["error"]["code"] == "INVALID_REQUEST"
    assert problem["code"] == "invalid_request"
    assert problem["detail"] == problem["error"]["message"]
    assert answer.headers["content-type"] == "application/json"
    assert client.http.get("__ds/subscriptions/senseless").status_code == 404


def test_another_configuration_under_the_same_id_is_a_conflict(client: Client) -> None:
    assert client.subscribe("twice", **PULL).status_code == 201

    same = client.subscribe("twice", **PULL, lease_ttl_ms=30_000, unknown="ignored")
    other = client.subscribe("twice", **PULL, description="other")

    assert same.status_code == 200
    assert (other.status_code, code(other)) == (409, "SUBSCRIPTION_EXISTS")


def test_a_body_of_another_type_is_refused(client: Client) -> None:
    answer = client.http.put(
        "__ds/subscriptions/x", content=b"{}", headers={"Content-Type": "text/plain"}
    )

    assert (answer.status_code, code(answer)) == (415, "UNSUPPORTED_MEDIA_TYPE")


@pytest.mark.parametrize("name", ["%00", "a%0Ab", "%FF", "%zz", "n" * 257, ""])
def test_an_id_that_is_no_name_is_refused(client: Client, name: str) -> None:
    answer = client.subscribe(name, **PULL)

    assert (answer.status_code, code(answer)) == (400, "INVALID_REQUEST")


def test_an_id_may_be_any_text_and_comes_back_in_its_urls(client: Client) -> None:
    url = "__ds/subscriptions/gr%C3%BC%C3%9Fe%20%2F%3F"

    made = client.http.put(url, json=PULL)

    assert made.status_code == 201
    assert made.json()["id"] == "grüße /?"
    assert client.http.get(url).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "s", "GET, HEAD, PUT, DELETE"),
        ("GET", "s/claim", "POST"),
        ("PUT", "s/ack", "POST"),
        ("GET", "s/streams", "POST"),
        ("GET", "s/streams/a", "DELETE"),
    ],
)
def test_a_method_that_is_not_offered_is_refused_with_those_that_are(
    client: Client, method: str, path: str, allowed: str
) -> None:
    answer = client.http.request(method, f"__ds/subscriptions/{path}")

    assert answer.status_code == 405
    assert answer.headers["allow"] == f"{allowed}, OPTIONS"
    assert answer.json()["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["subscriptions", "subscriptions/s/other", "other", ""])
def test_what_is_not_there_below_the_reserved_prefix_is_a_404(client: Client, path: str) -> None:
    assert client.http.get(f"__ds/{path}").status_code in (400, 404)


@pytest.mark.parametrize("action", ["claim", "ack", "callback", "release", "streams"])
def test_nothing_can_be_said_about_a_subscription_that_does_not_exist(
    client: Client, action: str
) -> None:
    body = {"worker": "w", "wake_id": "w", "generation": 1, "streams": ["a"]}

    answer = client.http.post(f"__ds/subscriptions/nobody/{action}", json=body)

    assert (answer.status_code, code(answer)) == (404, "SUBSCRIPTION_NOT_FOUND")


def test_a_webhook_subscription_is_not_claimed(client: Client) -> None:
    assert client.subscribe("hook", **HOOK).status_code == 201

    answer = client.claim("hook")

    assert (answer.status_code, code(answer)) == (409, "NOT_CLAIMABLE")


def test_a_host_header_that_is_no_host_is_not_put_into_urls(client: Client) -> None:
    answer = client.http.put(
        "__ds/subscriptions/host", json=PULL, headers={"Host": "evil.example/path"}
    )

    assert answer.status_code == 400


def test_a_browser_may_read_every_answer(client: Client) -> None:
    refused = client.claim("nobody")
    jwks = client.http.get("__ds/jwks.json")

    for answer in (refused, jwks):
        assert answer.headers.get_list("access-control-allow-origin") == ["*"]
        assert answer.headers["x-content-type-options"] == "nosniff"
