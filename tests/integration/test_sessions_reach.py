"""Sessions with principals, tokens that end, and two servers on one database."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import InvalidStatus

import fencepost
from tests.engines import POSTGRES, emptied, server_at
from tests.faults.test_groups import Unfenced
from tests.integration.auth_support import ROOT, place, principal, token
from tests.integration.mesh_support import Shop
from tests.integration.test_auth_jwt import AUDIENCE, ISSUER, jwks, signed
from tests.integration.test_sessions import session

MESH = ("__mesh/shop", ["read"])
INBOX = "__mesh/shop/inbox/ann"
GROUP = "__groups/mesh:shop:inbox:ann"


def test_a_session_has_the_grants_of_http(tmp_path: Path) -> None:
    people = (
        principal("all", MESH, (INBOX, ["read"]), (GROUP, ["claim"])),
        principal("reader", MESH, (INBOX, ["read"])),
        principal("claimer", MESH, (GROUP, ["claim"])),
        principal("sender", MESH, ("__mesh/shop/topic/alerts", ["append"])),
        principal("stranger", ("other/**", ["read"])),
    )
    with place(tmp_path, ROOT, *people) as found:
        Shop(found("root").client, "shop")
        shop = _View(found("root").client)

        def headers(name: str) -> dict[str, str]:
            return {"Authorization": f"Bearer {token(name)}"}

        for name, lacks in (("all", None), ("reader", "claim"), ("claimer", "read")):
            with session(shop, additional_headers=headers(name)) as raw:
                raw.say(hello={"member": "ann"})
                if lacks is None:
                    assert "welcome" in raw.hear()
                    continue
                close, kind, said = raw.end()
                assert (close, kind) == (1008, "forbidden")
                assert f"the verb {lacks} " in said["detail"]
        with session(shop, additional_headers=headers("sender")) as raw:
            raw.hello()
            send = {"body": "x", "client_message_id": "m-1", "kind": "topic"}
            sent = raw.ask(send={**send, "ref": "alerts"})
            refused = raw.ask(send={**send, "ref": "none"})
            faked = raw.ask(send={**send, "ref": "alerts", "sender": "root"})
        with (
            pytest.raises(InvalidStatus) as strange,
            session(shop, additional_headers=headers("stranger")),
        ):
            pass
        with pytest.raises(InvalidStatus) as unknown, session(shop):
            pass
        held = found("root").get("/v1/stream/__mesh/shop/topic/alerts").json()

    assert (sent["status"], refused["status"], faked["status"]) == (201, 403, 400)
    assert [message["sender"] for message in held] == ["sender"]
    assert strange.value.response.status_code == 403
    assert unknown.value.response.status_code == 401


def test_a_session_ends_with_the_token_that_began_it(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(jwks())
    workers = {
        "name": "workers",
        "subjects": ["worker-*"],
        "grants": [{"streams": ["__mesh/shop"], "verbs": ["read"]}],
    }
    with place(
        tmp_path / "data",
        ROOT,
        workers,
        jwt_keys=tmp_path / "keys.json",
        jwt_issuer=ISSUER,
        jwt_audience=AUDIENCE,
        jwt_leeway_s=1,
    ) as found:
        Shop(found("root").client, "shop")
        shop = _View(found("root").client)
        bearer = signed(exp=int(time.time()) + 2)
        with session(shop, additional_headers={"Authorization": f"Bearer {bearer}"}) as raw:
            raw.hello()
            close, kind, said = raw.end()

    assert (close, kind) == (1008, "unauthorized")
    assert "expired" in said["detail"]


def test_a_claim_that_takes_needs_the_verb_read_too(tmp_path: Path) -> None:
    """`take` gave the entries of an inbox to every principal that could claim of its group."""
    people = (principal("claimer", MESH, (GROUP, ["claim"])),)
    with place(tmp_path, ROOT, *people) as found:
        Shop(found("root").client, "shop")
        send = {"kind": "dm", "ref": "ann", "body": "secret"}
        assert found("root").client.post("/v1/mesh/shop/send", json=send).status_code == 201
        take = {"worker": "w", "take": True}
        answer = found("claimer").client.post("/v1/groups/mesh:shop:inbox:ann/claim", json=take)

    assert answer.status_code == 200
    assert answer.json()["leases"] == []


def stale_ack(url: str) -> int:
    """The status of an ack by a session whose inbox a worker has taken over HTTP."""
    with httpx.Client(base_url=url, timeout=30) as http:
        shop = Shop(http)
        with session(shop) as raw:
            raw.hello("ann")
            shop.send("m-1")
            token_, _, at = raw.delivery()
            claim = f"/v1/groups/mesh:{shop.name}:inbox:ann/claim"
            taken = http.post(claim, json={"worker": "w", "take": True})
            assert len(taken.json()["leases"]) == 1
            status: int = raw.ask(ack={"token": token_, "at": at})["status"]
            return status


def test_only_the_fence_keeps_a_stale_session_from_acknowledging(tmp_path: Path) -> None:
    with server_at(tmp_path / "fenced") as fenced, Unfenced(tmp_path / "open") as unfenced:
        assert stale_ack(fenced.url) == 409
        assert stale_ack(unfenced.url) == 200, "without the fence this test would notice nothing"


def test_on_two_servers_the_newer_session_wins_and_both_deliver(tmp_path: Path) -> None:
    quick = {"FENCEPOST_SESSIONS_LEASE_MS": "1500"}
    with (
        emptied(POSTGRES, tmp_path) as store,
        server_at(store, environment=quick) as one,
        server_at(store, environment=quick) as two,
        httpx.Client(base_url=one.url, timeout=30) as http,
        httpx.Client(base_url=two.url, timeout=30) as other,
    ):
        shop = Shop(http, "shop")
        with session(shop) as old, session(_View(other)) as new:
            old.hello("ann")
            new.hello()
            assert new.send("m-1")["status"] == 201
            token_, ids, at = old.delivery()
            assert ids == ["m-1"], "what one server stores the other one delivers"
            with session(_View(other)) as newer:
                newer.hello("ann")
                assert newer.delivery()[1] == ["m-1"]
                assert old.end()[:2] == (4003, "replaced_by_newer_connection")
                stale = newer.ask(ack={"token": token_, "at": at})
                assert stale["status"] == 409
        oldest = Shop(http, "oldest", default_policy="prefer_oldest")
        with session(oldest) as first, session(_View(other, "oldest")) as second:
            first.hello("ann")
            second.say(hello={"member": "ann"})
            assert second.end()[:2] == (4004, "member_already_connected")


def test_dedupe_switched_off_refuses_sessions_and_keeps_the_rows(tmp_path: Path) -> None:
    """Scenario 22: a daemon that requires dedupe stops, and goes on when it is back."""
    require = {"client_message_id_dedupe": {"version": 2}}
    send = {"kind": "topic", "ref": "alerts", "sender": "bob", "body": "x"}

    off = {"FENCEPOST_MESH_DEDUPE": "false"}
    with server_at(tmp_path) as server, httpx.Client(base_url=server.url) as http:
        Shop(http, "shop")
        with (
            fencepost.connect(server.url) as client,
            client.mesh("shop").session("ann", require=require) as daemon,
        ):
            first = daemon.send_fields({**send, "client_message_id": "m-1"}).receipt()
    with server_at(tmp_path, environment=off) as server, fencepost.connect(server.url) as client:
        with pytest.raises(fencepost.FeatureUnavailableError) as refused:
            client.mesh("shop").session("ann", require=require).open()
        with client.mesh("shop").session() as careless:
            doubled = careless.send_fields({**send, "client_message_id": "m-1"}).receipt()
    with (
        server_at(tmp_path) as server,
        fencepost.connect(server.url) as client,
        client.mesh("shop").session("ann", require=require) as daemon,
    ):
        again = daemon.send_fields({**send, "client_message_id": "m-1"}).receipt()
        findings = client.mesh("shop").check().findings

    assert refused.value.close_code == 4010
    assert (first.duplicate, doubled.duplicate, again.duplicate) == (False, False, True)
    assert again.broker_message_id == first.broker_message_id
    assert findings == []


class _View(Shop):
    """A mesh that is there already, seen through a client of its own."""

    def __init__(self, http: httpx.Client, name: str = "shop") -> None:
        self.http, self.name, self.root = http, name, f"/v1/mesh/{name}"
