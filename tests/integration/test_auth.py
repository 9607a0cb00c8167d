"""Who is let in: tokens on a real server, seen by clients without one."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

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
from tests.integration.raw import Connection, request
from tests.serving import ServerProcess


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place(tmp_path_factory.mktemp("auth"), ROOT, ANN, BOB) as found:
        found("ann").create("orders/1")
        found("ann").append("orders/1", "secret")
        yield found


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        f"Basic {token('ann')}",
        token("ann"),
        f"Bearer {token('ann')}x",
        f"Bearer {token('ann')[:-1]}",
        f"Bearer {token('ann').upper()}",
        f"Bearer {hashlib.sha256(token('ann').encode()).hexdigest()}",
        "Bearer a.b.c",
    ],
)
def test_without_a_good_token_there_is_nothing_here(here: Place, value: str | None) -> None:
    headers = {} if value is None else {"Authorization": value}

    for path in ("/v1/stream/orders/1", "/v1/stream/nothing", "/v1/streams", "/nowhere"):
        answer = httpx.get(here.process.url + path, headers=headers)

        assert code(answer) == (401, "unauthorized")
        assert answer.headers["WWW-Authenticate"].startswith("Bearer ")


def test_a_bad_token_is_told_from_a_missing_one(here: Place) -> None:
    wrong = httpx.get(f"{here.process.url}/v1/streams", headers={"Authorization": "Bearer wrong"})

    assert 'error="invalid_token"' in wrong.headers["WWW-Authenticate"]
    assert "error" not in here(None).get("/v1/streams").headers["WWW-Authenticate"]


def test_the_scheme_is_read_in_any_case(here: Place) -> None:
    for scheme in ("bearer", "BEARER", "Bearer"):
        headers = {"Authorization": f"{scheme} {token('ann')}"}
        assert httpx.get(f"{here.process.url}/v1/streams", headers=headers).status_code == 200


def test_two_authorization_headers_are_one_too_many(here: Place) -> None:
    with Connection(here.process.port) as connection:
        connection.send(
            request(
                "GET",
                "/v1/stream/orders/1",
                f"Authorization: Bearer {token('bob')}",
                f"Authorization: Bearer {token('ann')}",
            )
        )
        reply = connection.reply()

    assert reply.status == 400
    assert b"header_repeated" in reply.body


@pytest.mark.parametrize(
    "name", ["token", "access_token", "Authorization", "jwt", "acc%65ss_token"]
)
def test_a_token_in_the_url_is_refused(here: Place, name: str) -> None:
    for who in (None, "ann"):
        answer = here(who).get(f"/v1/stream/orders/1?offset=-1&{name}={token('ann')}")

        assert code(answer) == (400, "token_in_url")


@pytest.mark.parametrize(
    ("method", "url", "body", "said"),
    [
        ("GET", "/v1/stream/secret/1?offset=-1", None, "read on secret/1"),
        ("POST", "/v1/stream/secret/1", b"x", "append on secret/1"),
        ("PUT", "/v1/stream/secret/1", b"x", "append and create on secret/1"),
        ("PUT", "/v1/groups/billing", b'{"sources": ["**"]}', "create on __groups/billing"),
        ("POST", "/v1/mesh/shop/negotiate", b"{}", "read on __mesh/shop"),
        (
            "POST",
            "/v1/mesh/shop/send",
            b'{"kind": "dm", "ref": "ben", "body": "x"}',
            "append on __mesh/shop/inbox/ben",
        ),
    ],
)
def test_a_refusal_names_the_verb_and_the_path_that_a_grant_is_missing_for(
    here: Place, method: str, url: str, body: bytes | None, said: str
) -> None:
    headers = {"Content-Type": "text/plain"}

    answer = here("bob").client.request(method, url, content=body, headers=headers)

    assert code(answer) == (403, "forbidden")
    assert answer.json()["detail"] == f"you lack the verb {said}"


def test_liveness_preflights_and_public_keys_are_for_everybody(here: Place) -> None:
    nobody = here(None)

    assert nobody.get("/healthz").text == "ok\n"
    assert nobody.client.options("/v1/stream/orders/1").status_code == 204
    assert "keys" in nobody.get("/v1/stream/__ds/jwks.json").json()


def test_how_the_server_is_doing_is_for_administrators_unless_opened(
    here: Place, tmp_path: Path
) -> None:
    for path in ("/metrics", "/readyz"):
        assert here(None).get(path).status_code == 401
        assert code(here("ann").get(path)) == FORBIDDEN
        assert here("root").get(path).status_code == 200

    with place(tmp_path, ROOT, metrics_open="true", readyz_open="true") as opened:
        assert opened(None).get("/metrics").status_code == 200
        assert opened(None).get("/readyz").status_code == 200
        assert opened(None).get("/v1/streams").status_code == 401


def test_a_stream_that_may_not_be_read_looks_the_same_whether_it_exists_or_not(
    here: Place,
) -> None:
    bob = here("bob")

    for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
        there, absent = (
            bob.client.request(
                method,
                f"/v1/stream/{path}",
                content=b"1" if method == "POST" else b"",
                headers={"Content-Type": "application/json"},
            )
            for path in ("orders/1", "orders/9")  # only the first is there
        )
        assert there.status_code == absent.status_code == 403
        # It names the path that was asked for, and is the same otherwise.
        assert there.content.replace(b"orders/1", b"orders/9") == absent.content
        shown = [
            {
                name: value
                for name, value in answer.headers.items()
                if name not in ("date", "x-request-id")
            }
            for answer in (there, absent)
        ]
        assert shown[0] == shown[1]


@pytest.mark.parametrize(
    "path",
    [
        "bills/../orders/1",
        "bills/%2e%2e/orders/1",
        "bills/%2E%2E/orders/1",
        "bills/..%2forders/1",
        "bills%2f..%2forders%2f1",
        "%6frders/1",
        "orders%2F1",
        "ORDERS/1",
        "Orders/1",
        "orders//1",
        "//orders/1",
        "orders/1/",
        "./orders/1",
        "orders/./1",
        "orders/1%00",
        "orders/1;bills/1",
        "orders/1%3Fbills",
        "bills/%252e%252e/orders/1",
        "orders\\1",
        "bills\\..\\orders\\1",
        "\u006f\u0301rders/1",
    ],
)
def test_no_spelling_of_a_path_dodges_a_glob(here: Place, path: str) -> None:
    """Whatever bob writes: he never gets at ann's stream, and never a 200."""
    target = f"/v1/stream/{path}".encode()
    for method in ("GET", "POST", "DELETE"):
        with Connection(here.process.port) as connection:
            connection.send(
                request(
                    method,
                    target,
                    f"Authorization: Bearer {token('bob')}",
                    "Content-Type: application/json",
                    body=b"1" if method == "POST" else b"",
                )
            )
            reply = connection.reply()

        assert reply.status in (400, 403, 404), (method, path, reply.status)
        assert b"secret" not in reply.body
    assert here("ann").get("/v1/stream/orders/1").json() == ["secret"]


def test_an_escaped_path_is_judged_by_what_it_means(here: Place) -> None:
    assert here("ann").get("/v1/stream/%6frders/1").json() == ["secret"]
    assert code(here("bob").get("/v1/stream/%6frders/1")) == FORBIDDEN


def test_pipelined_requests_are_each_their_own_senders(here: Place) -> None:
    who = ["ann", "bob", None, "ann", "root", "bob", "ann"]
    sent = b"".join(
        request(
            "GET",
            "/v1/stream/orders/1",
            *(() if name is None else (f"Authorization: Bearer {token(name)}",)),
        )
        for name in who
    )

    with Connection(here.process.port) as connection:
        connection.send(sent)
        replies = [connection.reply() for _ in who]

    assert [reply.status for reply in replies] == [200, 403, 401, 200, 200, 403, 200]
    assert [b"secret" in reply.body for reply in replies] == [
        *(True, False, False, True),
        *(True, False, True),
    ]


def test_what_only_some_may_read_is_not_for_shared_caches(here: Place) -> None:
    answer = here("ann").get("/v1/stream/orders/1")

    assert answer.headers["Cache-Control"].startswith("private,")


def test_each_kind_of_write_needs_its_own_verbs(tmp_path: Path) -> None:
    names = {
        "a": ["append"],
        "c": ["create"],
        "ac": ["append", "create"],
        "al": ["append", "close"],
        "l": ["close"],
        "cl": ["create", "close"],
        "d": ["delete"],
        "at": ["append", "claim"],
    }
    who = [principal(name, ("s/*", verbs)) for name, verbs in names.items()]
    with place(tmp_path, ROOT, *who) as here:
        for path in ("s/1", "s/2", "s/3"):
            here("root").create(path)

        def allowed(**request: Any) -> set[str]:
            """Who may, of all of them; a path may have their name in it."""
            found = set()
            for name in names:
                method, path, headers = request["method"], request["path"], request["headers"]
                answer = here(name).client.request(
                    method,
                    f"/v1/stream/{path.format(name)}",
                    content=request.get("body", b""),
                    headers={"Content-Type": "application/json", **headers},
                )
                if code_of(answer) != "forbidden":
                    found.add(name)
            return found

        def code_of(answer: httpx.Response) -> str:
            return str(answer.json()["code"]) if answer.status_code >= 400 else ""

        post = {"method": "POST", "path": "s/1", "body": b"1"}
        assert allowed(**post, headers={}) == {"a", "ac", "al", "at"}
        assert allowed(**post, headers={"Stream-Auto-Create": "true"}) == {"ac"}
        assert allowed(**post, headers={"If-None-Match": "*"}) == {"ac"}
        closing = {"Stream-Closed": "true"}
        assert allowed(method="POST", path="s/2", body=b"1", headers=closing) == {"al"}
        assert allowed(method="POST", path="s/2", headers=closing) == {"al", "l", "cl"}
        put = {"method": "PUT", "path": "s/put-{0}"}
        assert allowed(**put, headers={}) == {"c", "ac", "cl"}
        assert allowed(**put, body=b"1", headers={}) == {"ac"}
        assert allowed(**put, headers=closing) == {"cl"}
        assert allowed(method="POST", path="s/3?truncate&before=now", headers={}) == {"d"}
        assert allowed(method="DELETE", path="s/none-{0}", headers={}) == {"d"}
        task = {"Producer-Id": "task:1", "Producer-Epoch": "0", "Producer-Seq": "0"}
        assert allowed(**post, headers=task) == {"at"}


def test_a_principal_sends_only_as_the_producers_that_are_its_own(tmp_path: Path) -> None:
    carl = principal("carl", ("**", ALL), producers=["carl-*", "row:*"])
    with place(tmp_path, carl) as here:
        here("carl").create("s")

        assert here("carl").send("s", "carl-1", 0, 0).status_code == 200
        assert here("carl").send("s", "row:a/b", 0, 0).status_code == 200
        assert code(here("carl").send("s", "ann-1", 0, 0)) == FORBIDDEN
        assert code(here("carl").send("s", "Carl-1", 0, 0)) == FORBIDDEN
        item = {"stream": "s", "data": 1, "producer": {"id": "ann-1", "epoch": 0, "seq": 0}}
        assert code(here("carl").commit(item)) == FORBIDDEN


def test_keys_of_different_principals_never_meet(tmp_path: Path) -> None:
    both = (principal("one", ("**", ALL)), principal("two", ("**", ALL)))
    with place(tmp_path, *both, ROOT) as here:
        here("one").create("s")

        assert here("one").append("s", 1, idempotency_key="k").status_code == 204
        assert here("two").append("s", 2, idempotency_key="k").status_code == 204
        assert here("one").append("s", 1, idempotency_key="k").status_code == 200
        assert code(here("one").append("s", 2, idempotency_key="k"))[0] == 409
        item = {"stream": "s", "data": 3}
        first, second = (here(name).commit(item, idempotency_key="c") for name in ("one", "two"))
        assert (first.json()["duplicate"], second.json()["duplicate"]) == (False, False)
        assert here("one").commit(item, idempotency_key="c").json()["duplicate"]

        assert here("one").get("/v1/stream/s").json() == [1, 2, 3, 3]
        keys = here("one").get("/v1/keys").json()["keys"]
        assert {(entry["principal"], entry["key"]) for entry in keys} == {
            ("one", "k"),
            ("one", "c"),
        }
        assert len(here("root").get("/v1/keys").json()["keys"]) == 4
        here.restart()
        assert here("one").append("s", 1, idempotency_key="k").status_code == 200


def test_a_server_with_principals_may_listen_to_the_network(tmp_path: Path) -> None:
    with place(tmp_path, ROOT, arguments=("--host", "0.0.0.0")) as here:
        url = f"http://127.0.0.1:{here.process.port}"
        headers = {"Authorization": f"Bearer {token('root')}"}

        assert httpx.get(f"{url}/v1/streams").status_code == 401
        assert httpx.get(f"{url}/v1/streams", headers=headers).status_code == 200


def test_without_principals_everybody_may_do_everything(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as process:
        url = process.url
        made = httpx.put(f"{url}/v1/stream/s", headers={"Content-Type": "application/json"})
        task = {"Producer-Id": "task:1", "Producer-Epoch": "0", "Producer-Seq": "0"}
        json_ = {"Content-Type": "application/json"}

        assert made.status_code == 201
        for extra in ({}, task, {"Authorization": "Bearer nonsense"}, {"Audit-Reason": "none"}):
            answer = httpx.post(f"{url}/v1/stream/s", content=b"1", headers={**json_, **extra})
            assert answer.status_code in (200, 204)
        assert httpx.get(f"{url}/metrics").status_code == 200
        assert httpx.get(f"{url}/v1/stream/s").headers["Cache-Control"] == "no-cache"


# Settings


def refusal(tmp_path: Path, config: str, **environment: str) -> str:
    """What a server says that does not start."""
    file = tmp_path / "config.toml"
    file.write_text(config)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fencepost", "serve", "--port", "0"),
            *("--data", str(tmp_path / "data"), "--config", str(file)),
        ],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert done.stdout == ""
    return done.stderr


DIGEST = "a" * 64
ENTRY = f'[[principals]]\nname = "a"\ntoken_sha256 = "{DIGEST}"\n'


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("[auth]\nmetrics_open = true\n", "[auth] needs [[principals]]"),
        ("[auth]\nbogus = 1\n", "[auth] has no setting 'bogus'"),
        ('[auth]\nclaims_per_s = "many"\n', "claims_per_s must be of type float"),
        ("[auth]\nclaims_per_s = -1\n", "claims_per_s must be greater than zero"),
        ('[[principals]]\nname = "a"\n', "'a' needs token_sha256 or subjects"),
        ('[[principals]]\ntoken_sha256 = "x"\n', "[[principals]]: Object missing required field"),
        (f'[[principals]]\nname = ""\ntoken_sha256 = "{DIGEST}"\n', "name '' is not of letters"),
        (f'[[principals]]\nname = "a b"\ntoken_sha256 = "{DIGEST}"\n', "name 'a b' is not of"),
        ('[[principals]]\nname = "a"\ntoken_sha256 = "plain"\n', "token_sha256 is 64 hexadecimal"),
        (f"{ENTRY}bogus = 1\n", "[[principals]] has no setting 'bogus'"),
        (f'{ENTRY}grants = [{{streams = "a"}}]\n', "a grant needs streams and verbs"),
        (f'{ENTRY}grants = [{{streams = "a", verbs = "fly"}}]\n', "there is no verb 'fly'"),
        (f'{ENTRY}grants = [{{streams = "/a", verbs = "read"}}]\n', "streams '/a': a pattern has"),
        (f'{ENTRY}grants = [{{stream = "a", verbs = "read"}}]\n', "grants has no setting 'stream'"),
        (f"{ENTRY}abandon_ratio_max = 2\n", "abandon_ratio_max is at most 1"),
        (f"{ENTRY}claims_per_s = -3\n", "claims_per_s must not be below zero"),
        (f"{ENTRY}{ENTRY}", "has two called 'a'"),
        (ENTRY + ENTRY.replace('"a"', '"b"'), "another principal has this token already"),
        ("principals = 3\n", "it may have"),
        (f'{ENTRY}[[producer_rules]]\nmatch = "x"\nraising = "maybe"\n', "raising is never, stale"),
        (f'{ENTRY}[[producer_rules]]\nmatch = "x"\ngoing_on = "me"\n', "going_on is holder or"),
        (f"{ENTRY}[[producer_rules]]\nraising = 'never'\n", "missing required field `match`"),
        (f'{ENTRY}[auth]\njwt_keys = "k"\n', "JWTs need all of jwt_keys, jwt_issuer"),
        ('[[principals]]\nname = "a"\nsubjects = "*"\n', "subjects need jwt_keys"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_a_sentence(
    tmp_path: Path, config: str, said: str
) -> None:
    shown = refusal(tmp_path, config)

    assert said in shown
    assert shown.startswith("fencepost: ")
    assert "Traceback" not in shown


def test_principals_in_the_environment_must_be_json(tmp_path: Path) -> None:
    assert "FENCEPOST_PRINCIPALS is not JSON" in refusal(tmp_path, "", FENCEPOST_PRINCIPALS="{")
    assert "is a list of tables" in refusal(tmp_path, "", FENCEPOST_PRINCIPALS='{"name": 1}')


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--verbs", "read,write"), "there is no verb 'write'; there are read, append, "),
        (("--streams", "orders//*"), "--streams 'orders//*': "),
    ],
)
def test_a_token_is_not_made_with_a_grant_that_the_server_would_refuse(
    options: tuple[str, ...], said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fencepost", "token", "new", "carl", *options],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"fencepost: {said}")


def test_a_new_token_works_with_the_lines_that_came_with_it(tmp_path: Path) -> None:
    made = subprocess.run(
        [
            *(sys.executable, "-m", "fencepost", "token", "new", "carl"),
            *("--streams", "orders/**", "--verbs", "read,create"),
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    secret, _, lines = made.partition("\n")
    config = tmp_path / "config.toml"
    config.write_text(lines)

    assert secret not in lines
    with ServerProcess(tmp_path / "data", arguments=("--config", str(config))) as process:
        headers = {"Authorization": f"Bearer {secret}"}
        put = httpx.put(f"{process.url}/v1/stream/orders/1", headers=headers)
        post = httpx.post(f"{process.url}/v1/stream/orders/1", headers=headers, content=b"x")
    assert put.status_code == 201
    assert post.status_code == 400
    assert json.loads(post.content)["code"] == "content_type_missing"


def test_tokens_are_not_in_the_logs_of_a_server(here: Place) -> None:
    here("ann").get("/v1/streams")
    here("bob").get(f"/v1/stream/x?token={token('bob')}")

    assert "fp_" not in here.process.output


def test_tokens_are_compared_in_constant_time() -> None:
    """A digest is found by its first bytes, and believed only after `hmac.compare_digest`."""
    import inspect

    from fencepost.server.auth import Auth

    source = inspect.getsource(Auth.recognise)
    assert "hmac.compare_digest(found[0], digest)" in source
    assert "token ==" not in source
