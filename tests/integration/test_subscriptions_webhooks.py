"""Webhook subscriptions against a real server: signed, retried, fenced, and kept over kills."""

import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import httpx
import pytest
from cryptography.exceptions import InvalidSignature

from tests.engines import engine as engine
from tests.engines import serving_on
from tests.integration.subscriptions_support import (
    DONE,
    Client,
    Got,
    Receiver,
    Reply,
    code,
    polled,
    tails,
    verifies,
)
from tests.serving import ServerProcess


@pytest.fixture
def server(engine: str, tmp_path: Path) -> Iterator[ServerProcess]:
    with serving_on(engine, tmp_path / "data") as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.url) as found:
        yield found


def test_a_wake_is_signed_with_a_key_that_the_server_publishes(client: Client) -> None:
    with Receiver(DONE) as receiver:
        made = client.webhook("s", receiver.url)
        tail = client.create("events/a", 1)

        got = receiver.next()

    jwks = httpx.get(made["webhook"]["signing"]["jwks_url"])
    assert jwks.headers["content-type"] == "application/jwk-set+json"
    assert jwks.headers["cache-control"] == "public, max-age=300"
    assert verifies(got, jwks.json())
    assert made["webhook"]["signing"]["kid"] in got.headers["webhook-signature"]
    assert got.wake["streams"] == [
        {
            "path": "events/a",
            "link_type": "glob",
            "acked_offset": "0" * 16 + "_" + "0" * 16,
            "tail_offset": tail,
            "has_pending": True,
        }
    ]


def test_a_changed_body_does_not_verify(client: Client) -> None:
    with Receiver(DONE) as receiver:
        made = client.webhook("s", receiver.url)
        client.create("events/a", 1)
        got = receiver.next()
    jwks = httpx.get(made["webhook"]["signing"]["jwks_url"]).json()

    got.body = got.body.replace(b"events/a", b"events/b")

    with pytest.raises(InvalidSignature):
        verifies(got, jwks)


def test_the_signing_key_is_the_same_after_a_restart(server: ServerProcess, client: Client) -> None:
    before = client.http.get("__ds/jwks.json").json()

    server.stop()
    server.restart()

    assert client.http.get("__ds/jwks.json").json() == before


def test_done_acks_the_snapshot_and_what_came_after_is_woken_again(client: Client) -> None:
    hold = threading.Event()
    replies = iter([Reply(body=b'{"done": true}', hold=hold)])
    with Receiver(lambda: next(replies, DONE)) as receiver:
        client.webhook("s", receiver.url)
        client.create("events/a", 1)
        first = receiver.next().wake
        later = client.append("events/a", 2)
        hold.set()

        second = receiver.next().wake

        assert tails(second) == {"events/a": later}
        assert second["streams"][0]["acked_offset"] == tails(first)["events/a"]
        assert second["generation"] == first["generation"] + 1
        assert second["wake_id"] != first["wake_id"]
        for cursors in polled(lambda: client.cursors("s")):
            if cursors == {"events/a": later}:
                break


def test_a_callback_may_come_before_the_webhook_has_answered(client: Client) -> None:
    hold = threading.Event()
    with Receiver(Reply(hold=hold)) as receiver:
        client.webhook("s", receiver.url)
        client.create("events/a", 1)
        wake = receiver.next().wake

        answer = client.say("callback", "s", wake, acks=tails(wake), done=True)

        assert answer.json() == {"ok": True, "next_wake": False}
        assert client.cursors("s") == tails(wake)
        hold.set()


def test_a_callback_without_done_keeps_the_wake_and_says_so(client: Client) -> None:
    with Receiver() as receiver:
        client.webhook("s", receiver.url)
        client.create("events/a", 1, 2)
        wake = receiver.next().wake

        heartbeat = client.say("callback", "s", wake)
        done = client.say("callback", "s", wake, acks=tails(wake), done=True)

        assert heartbeat.json() == {"ok": True, "next_wake": False}
        assert done.json() == {"ok": True, "next_wake": False}


def test_a_lease_that_runs_out_leads_to_a_new_generation_and_fences_the_old(
    client: Client,
) -> None:
    with Receiver() as receiver:
        client.webhook("s", receiver.url, lease_ttl_ms=1000)
        client.create("events/a", 1)
        first = receiver.next().wake

        second = receiver.next().wake
        late = client.say("callback", "s", first, acks=tails(first), done=True)
        mixed = client.say("callback", "s", {**second, "wake_id": first["wake_id"]}, done=True)

        assert second["generation"] == first["generation"] + 1
        assert (late.status_code, code(late)) == (409, "FENCED")
        assert (mixed.status_code, code(mixed)) == (409, "FENCED")
        assert client.cursors("s") == {"events/a": "0" * 16 + "_" + "0" * 16}


def test_a_failed_delivery_is_tried_again_as_the_same_wake(client: Client) -> None:
    replies = iter([Reply(500)])
    with Receiver(lambda: next(replies, DONE)) as receiver:
        client.webhook("s", receiver.url)
        client.create("events/a", 1)
        first = receiver.next().wake
        for look in polled(lambda: client.look("s")):
            if look["status"] == "failed":
                assert look["attempts"] == 1
                assert look["next_attempt_at"] is not None
                break

        second = receiver.next().wake

        assert second["wake_id"] == first["wake_id"]
        assert second["generation"] == first["generation"]
        for look in polled(lambda: client.look("s")):
            if look["status"] == "active":
                break


def test_a_redirect_is_a_failure_and_is_not_followed(client: Client) -> None:
    with Receiver() as elsewhere:
        moved = Reply(302, headers={"Location": elsewhere.url})
        with Receiver(moved) as receiver:
            client.webhook("s", receiver.url)
            client.create("events/a", 1)
            receiver.next()
            for look in polled(lambda: client.look("s")):
                if look["status"] == "failed":
                    break

        assert elsewhere.is_empty


def test_a_kill_while_the_delivery_is_under_way_delivers_the_same_wake_again(
    server: ServerProcess, client: Client
) -> None:
    hold = threading.Event()
    replies = iter([Reply(hold=hold)])
    with Receiver(lambda: next(replies, DONE)) as receiver:
        client.webhook("s", receiver.url)
        tail = client.create("events/a", 1)
        first = receiver.next().wake

        server.kill()
        server.restart()
        second = receiver.next().wake

        assert second["wake_id"] == first["wake_id"]
        assert second["generation"] == first["generation"]
        for cursors in polled(lambda: client.cursors("s")):
            if cursors == {"events/a": tail}:
                break
        hold.set()


def test_a_kill_between_delivery_and_ack_leaves_the_wake_to_its_worker(
    server: ServerProcess, client: Client
) -> None:
    with Receiver() as receiver:
        client.webhook("s", receiver.url)
        client.create("events/a", 1)
        wake = receiver.next().wake
        for look in polled(lambda: client.look("s")):
            if look["lease_expires_at"] is not None:
                break

        server.kill()
        server.restart()
        answer = client.say("callback", "s", wake, acks=tails(wake), done=True)

        assert answer.json() == {"ok": True, "next_wake": False}
        assert client.cursors("s") == tails(wake)
        assert receiver.is_empty


def test_a_kill_after_an_accepted_ack_does_not_take_it_back(
    server: ServerProcess, client: Client
) -> None:
    with Receiver() as receiver:
        client.webhook("s", receiver.url)
        client.create("events/a", 1)
        wake = receiver.next().wake
        client.say("callback", "s", wake, acks=tails(wake), done=True).raise_for_status()

        server.kill()
        server.restart()
        again = client.say("callback", "s", wake, acks=tails(wake), done=True)

        assert (again.status_code, code(again)) == (409, "FENCED")
        assert client.cursors("s") == tails(wake)
        assert client.look("s")["generation"] == wake["generation"]


def test_a_kill_during_backoff_keeps_the_schedule(server: ServerProcess, client: Client) -> None:
    replies = iter([Reply(500), Reply(503)])
    with Receiver(lambda: next(replies, DONE)) as receiver:
        client.webhook("s", receiver.url)
        client.create("events/a", 1)
        first = receiver.next().wake
        receiver.next()
        for before in polled(lambda: client.look("s")):
            if before["attempts"] == 2:
                break

        server.kill()
        server.restart()
        after = client.look("s")
        third = receiver.next()

        assert after["next_attempt_at"] == before["next_attempt_at"]
        assert (after["attempts"], after["status"]) == (2, "failed")
        assert third.wake["wake_id"] == first["wake_id"]
        assert _sent_ms(third) >= _instant_ms(before["next_attempt_at"]) // 1000 * 1000


def _sent_ms(got: Got) -> int:
    """When the server signed it, to the second."""
    return int(got.headers["webhook-signature"].split(",")[0].removeprefix("t=")) * 1000


def _instant_ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000)


def test_a_lease_that_runs_out_while_the_server_is_down_is_over_when_it_is_back(
    server: ServerProcess, client: Client
) -> None:
    with Receiver() as receiver:
        client.webhook("s", receiver.url, lease_ttl_ms=1000)
        client.create("events/a", 1)
        first = receiver.next().wake
        for look in polled(lambda: client.look("s")):
            if look["lease_expires_at"] is not None:
                break

        server.kill()
        server.restart()
        second = receiver.next().wake

        assert second["generation"] == first["generation"] + 1


def test_a_deleted_subscription_refuses_callbacks_and_so_does_its_successor(
    client: Client,
) -> None:
    with Receiver() as receiver:
        client.webhook("s", receiver.url)
        client.create("events/a", 1)
        wake = receiver.next().wake

        assert client.http.delete("__ds/subscriptions/s").status_code == 204
        gone = client.say("callback", "s", wake, acks=tails(wake), done=True)
        client.webhook("s", receiver.url)
        client.append("events/a", 2)
        successor = receiver.next().wake
        stale = client.say("callback", "s", wake, acks=tails(wake), done=True)

        assert (gone.status_code, code(gone)) == (404, "SUBSCRIPTION_NOT_FOUND")
        assert successor["generation"] == wake["generation"]
        assert (stale.status_code, code(stale)) == (409, "FENCED")
        assert client.cursors("s") == {"events/a": tails(wake)["events/a"]}


def test_a_deleted_subscription_stays_deleted_over_a_kill(
    server: ServerProcess, client: Client
) -> None:
    with Receiver() as receiver:
        client.webhook("s", receiver.url)
        assert client.http.delete("__ds/subscriptions/s").status_code == 204

        server.kill()
        server.restart()

        assert client.http.get("__ds/subscriptions/s").status_code == 404


def test_a_callback_needs_its_token(client: Client) -> None:
    with Receiver() as receiver:
        client.webhook("s", receiver.url)
        client.webhook("other", receiver.url, pattern="others/*")
        client.create("events/a", 1)
        wake = receiver.next().wake
        body = {"wake_id": wake["wake_id"], "generation": wake["generation"], "done": True}
        url = "__ds/subscriptions/s/callback"
        token = wake["callback_token"]
        head, claims, signature = token.split(".")

        for authorization, expected in [
            (None, "TOKEN_MISSING"),
            ("Basic abc", "TOKEN_MISSING"),
            ("Bearer", "TOKEN_MISSING"),
            ("Bearer nonsense", "TOKEN_INVALID"),
            (f"Bearer {head}.{claims}.{signature[::-1]}", "TOKEN_INVALID"),
            (f"Bearer eyJhbGciOiJub25lIn0.{claims}.", "TOKEN_INVALID"),
        ]:
            headers = {} if authorization is None else {"Authorization": authorization}
            answer = client.http.post(url, json=body, headers=headers)
            assert (answer.status_code, code(answer)) == (401, expected), authorization
            assert answer.headers["www-authenticate"] == "Bearer"

        elsewhere = client.say("callback", "other", wake, done=True)
        assert (elsewhere.status_code, code(elsewhere)) == (401, "TOKEN_INVALID")
        assert client.look("s")["generation"] == wake["generation"]


def test_existing_streams_are_linked_at_their_tails_and_not_replayed(client: Client) -> None:
    tail = client.create("events/old", 1, 2, 3)
    with Receiver() as receiver:
        client.webhook("s", receiver.url)
        assert client.cursors("s") == {"events/old": tail}

        client.create("events/new", 4)
        wake = receiver.next().wake

        assert [stream["path"] for stream in wake["streams"]] == ["events/new"]


def test_a_fork_is_woken_for_its_own_messages_only(client: Client) -> None:
    tail = client.create("source", 1, 2, 3)
    with Receiver() as receiver:
        client.webhook("s", receiver.url)
        headers = {"Content-Type": "application/json", "Stream-Forked-From": "/v1/stream/source"}
        assert client.http.put("events/fork", headers=headers).status_code == 201
        assert client.cursors("s") == {"events/fork": tail}

        client.append("events/fork", 4)
        [stream] = receiver.next().wake["streams"]

        assert stream["acked_offset"] == tail


def test_a_deleted_stream_loses_its_link_and_a_new_one_starts_at_its_own_beginning(
    client: Client,
) -> None:
    with Receiver(DONE) as receiver:
        client.webhook("s", receiver.url, streams=["named"])
        for path in ("events/a", "named"):
            client.create(path, 1, 2)
            receiver.next()
        for path in ("events/a", "named"):
            assert client.http.delete(path).status_code == 204
        assert client.cursors("s") == {"named": "0" * 16 + "_" + "0" * 16}

        client.create("events/a", 3)

        [stream] = receiver.next().wake["streams"]
        assert stream["acked_offset"] == "0" * 16 + "_" + "0" * 16


def test_localhost_can_be_refused_by_a_setting(tmp_path: Path) -> None:
    refusing = {"FENCEPOST_SUBSCRIPTIONS_WEBHOOK_ALLOW_LOCALHOST": "refuse"}
    with (
        ServerProcess(tmp_path / "data", environment=refusing) as server,
        Client(server.url) as client,
    ):
        answer = client.subscribe(
            "s", type="webhook", pattern="*", webhook={"url": "http://localhost:8000/hook"}
        )

        assert (answer.status_code, code(answer)) == (400, "WEBHOOK_URL_REJECTED")
