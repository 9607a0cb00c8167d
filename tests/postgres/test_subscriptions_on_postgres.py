"""Subscriptions on several servers: one engine at a time, reached through every node."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import psycopg
import pytest

from fencepost.server.subscriptions.cluster import LEADER_MS_MAX
from fencepost.testing.postgres import PostgresServer
from tests.integration.auth_support import ANN, BOB, ROOT, As
from tests.integration.subscriptions_support import DONE, JSON, Client, Receiver, Reply, code, tails
from tests.postgres.nodes import Node, again, leader_url, nodes, rows, until

pytestmark = pytest.mark.timeout(300)

QUICK = {"FENCEPOST_STORE_LEADER_SILENCE_MS": "2000", "FENCEPOST_STORE_POLL_INTERVAL_MS": "200"}


class Cluster(NamedTuple):
    """A database and a client for each node."""

    dsn: str
    clients: list[Client]


@pytest.fixture(scope="module")
def cluster(postgres_server: PostgresServer) -> Iterator[Cluster]:
    """Three nodes that stay up, the first of which leads."""
    dsn = postgres_server.new_database()
    with nodes(dsn, 3) as started, ExitStack() as stack:
        yield Cluster(dsn, [stack.enter_context(Client(node.url)) for node in started])
    postgres_server.drop_database(dsn)


def test_a_subscription_made_on_one_node_is_claimed_on_another_and_acked_on_a_third(
    cluster: Cluster,
) -> None:
    one, two, three = cluster.clients
    one.create("wake/claimed")
    two.pull("claimed", pattern="claimed/*", wake_stream="wake/claimed")
    three.create("claimed/a", 1)
    until(lambda: len(one.read("wake/claimed")) == 1, "the wake is announced")

    claimed = two.claim("claimed")
    acked = three.say("ack", "claimed", claimed.json(), acks=tails(claimed.json()), done=True)

    assert claimed.status_code == 200
    assert acked.json() == {"ok": True, "next_wake": False}
    assert one.cursors("claimed") == tails(claimed.json())
    assert code(one.claim("claimed")) == "NO_PENDING_WORK"


def test_a_stream_is_linked_when_its_creation_is_answered_on_whichever_node(
    cluster: Cluster,
) -> None:
    leading, other, _ = cluster.clients
    leading.pull("linked", pattern="linked/*")
    for number in range(20):
        other.create(f"linked/{number}")
        assert len(leading.cursors("linked")) == number + 1
    for number in range(20):
        other.http.delete(f"linked/{number}").raise_for_status()
        assert len(other.cursors("linked")) == 19 - number


def test_the_streams_of_a_large_commit_are_linked_and_wake_when_it_is_answered(
    cluster: Cluster,
) -> None:
    """More of them than one row of turns tells of."""
    leading, other, third = cluster.clients
    count = 1_200
    leading.create("wake/large")
    third.pull("large", pattern="large/*", wake_stream="wake/large")
    appends = [
        {
            "stream": f"large/{number:04}",
            "content_type": "application/json",
            "data": number,
            "auto_create": True,
        }
        for number in range(count)
    ]
    committed = other.http.post(other.http.base_url.join("/v1/commit"), json={"appends": appends})

    assert committed.status_code == 200
    assert len(third.cursors("large")) == count
    until(lambda: len(leading.read("wake/large")) == 1, "the wake is announced")
    assert other.claim("large").status_code == 200


def test_a_stream_by_name_is_watched_from_its_tail_and_again_when_it_is_made_anew(
    cluster: Cluster,
) -> None:
    _, two, three = cluster.clients
    tail = two.create("named/a", 1, 2)
    three.pull("named", pattern=None, streams=["named/a", "named/b"])
    before = two.cursors("named")
    two.http.delete("named/a").raise_for_status()
    without = three.cursors("named")
    two.create("named/a")
    added = two.http.post("__ds/subscriptions/named/streams", json={"streams": ["named/c"]})

    assert before["named/a"] == tail
    assert without["named/a"] == before["named/b"]
    assert added.status_code == 204
    assert sorted(three.cursors("named")) == ["named/a", "named/b", "named/c"]
    [(links,)] = rows(
        cluster.dsn,
        "SELECT count(*) FROM links l JOIN streams s ON s.id = l.stream AND s.path = l.path"
        " WHERE l.path LIKE 'named/%' AND s.state = 0",
    )
    assert links == 1


def test_a_fork_is_watched_from_where_it_leaves_its_source(cluster: Cluster) -> None:
    _, two, three = cluster.clients
    tail = two.create("sources/a", 1, 2, 3)
    three.pull("forks", pattern="forks/*")
    two.http.put(
        "forks/a", headers={**JSON, "Stream-Forked-From": "/v1/stream/sources/a"}
    ).raise_for_status()

    assert three.cursors("forks") == {"forks/a": tail}
    assert code(three.claim("forks")) == "NO_PENDING_WORK"


def test_wakes_are_announced_once_their_stream_is_made(cluster: Cluster) -> None:
    one, two, three = cluster.clients
    two.pull("late", pattern="late/*", wake_stream="wake/late")
    three.create("late/a", 1)
    until(lambda: one.look("late")["generation"] == 1, "there is a wake")
    two.create("wake/late")

    until(lambda: len(three.read("wake/late")) > 0, "the wake is announced")
    assert three.claim("late").status_code == 200


def test_callbacks_go_where_the_client_found_the_server(cluster: Cluster) -> None:
    _, other, _ = cluster.clients
    with Receiver() as receiver:
        other.webhook("called-back", receiver.url, pattern="called-back/*")
        other.create("called-back/a", 1)

        wake = receiver.next().wake
        answer = other.say("callback", "called-back", wake, acks=tails(wake), done=True)

    assert wake["callback_url"].startswith(f"{other.url}/")
    assert answer.status_code == 200


def test_every_wake_is_delivered_once_while_all_nodes_are_up(cluster: Cluster) -> None:
    with Receiver(DONE) as receiver:
        cluster.clients[1].webhook("once", receiver.url, pattern="once/*")
        generations = []
        for number in range(12):
            cluster.clients[number % 3].create(f"once/{number}", number)
            wake = receiver.next().wake
            generations.append(wake["generation"])
            assert list(tails(wake)) == [f"once/{number}"]

        assert generations == sorted(set(generations))
        look = cluster.clients[2].look
        until(lambda: look("once")["pending_streams"] == 0, "the last wake is over")
        assert receiver.is_empty


def test_keys_are_the_same_on_every_node(cluster: Cluster) -> None:
    shown = [client.http.get("__ds/jwks.json").json() for client in cluster.clients]

    assert shown[0] == shown[1] == shown[2]
    assert len(shown[0]["keys"]) == 1


def test_a_header_that_came_twice_is_refused_through_every_node(cluster: Cluster) -> None:
    other = cluster.clients[1]
    other.pull("twice", pattern="twice/*")
    answer = other.http.post(
        "__ds/subscriptions/twice/ack",
        json={"wake_id": "w", "generation": 1},
        headers=[("Authorization", "Bearer a"), ("Authorization", "Bearer b")],
    )

    assert code(answer) == "INVALID_REQUEST"
    assert "more than once" in answer.text


def test_a_request_that_was_passed_on_is_not_passed_on_again(cluster: Cluster) -> None:
    answer = cluster.clients[1].http.get(
        "__ds/subscriptions/s", headers={"Fencepost-Forwarded": "http:"}
    )

    assert answer.status_code == 503
    assert code(answer) == "NO_LEADER"
    assert answer.headers["retry-after"] == "1"


def test_a_stream_that_nobody_looks_at_expires_once_and_leaves_its_subscriptions(
    cluster: Cluster,
) -> None:
    one, two, _ = cluster.clients
    one.pull("brief", pattern="brief/*")
    two.http.put("brief/a", headers={**JSON, "Stream-TTL": "1"}).raise_for_status()
    assert list(two.cursors("brief")) == ["brief/a"]

    until(lambda: not two.cursors("brief"), "the stream has expired")

    assert rows(cluster.dsn, "SELECT count(*) FROM log WHERE kind = 3") == [(1,)]


def test_when_the_leader_is_killed_another_goes_on_and_no_stream_is_missed(
    postgres_dsn: str,
) -> None:
    with (
        nodes(postgres_dsn, 3) as (first, second, third),
        Client(second.url) as two,
        Client(third.url) as three,
        Receiver(DONE) as receiver,
    ):
        two.webhook("hook", receiver.url)
        two.create("events/before", 1)
        assert list(tails(receiver.next().wake)) == ["events/before"]

        first.kill()
        made = {f"events/{number}" for number in range(30)}
        for number, path in enumerate(sorted(made)):
            (two, three)[number % 2].create(path, number)
        seen: set[str] = set()
        while not made <= seen:
            seen |= tails(receiver.next().wake).keys()

        assert leader_url(postgres_dsn) in (second.url, third.url)
        answer = again(lambda: three.http.get("__ds/subscriptions/hook"))
        assert answer.json()["streams_total"] == 31


def test_a_wake_that_nobody_took_is_delivered_again_by_the_next_leader(postgres_dsn: str) -> None:
    taking = threading.Event()
    with (
        nodes(postgres_dsn, 2) as (first, second),
        Client(second.url) as other,
        Receiver(Reply(hold=taking)) as receiver,
    ):
        other.webhook("hook", receiver.url)
        other.create("events/a", 1)
        before = receiver.next().wake
        first.kill()

        after = receiver.next().wake
        taking.set()
        acked = again(lambda: other.say("callback", "hook", after, acks=tails(after), done=True))

        assert after["wake_id"] == before["wake_id"]
        assert after["generation"] == before["generation"]
        assert acked.status_code == 200


def test_a_lease_ends_under_the_next_leader_and_its_worker_is_fenced(postgres_dsn: str) -> None:
    with (
        nodes(postgres_dsn, 2) as (first, second),
        Client(second.url) as other,
        Receiver() as receiver,
    ):
        other.webhook("hook", receiver.url, lease_ttl_ms=1_000)
        other.create("events/a", 1)
        before = receiver.next().wake
        leased = "SELECT 1 FROM subscriptions WHERE lease_until_ms IS NOT NULL"
        until(lambda: rows(postgres_dsn, leased) == [(1,)], "the delivery is written down")
        first.kill()

        after = receiver.next().wake
        late = again(lambda: other.say("callback", "hook", before, done=True))
        acked = other.say("callback", "hook", after, acks=tails(after), done=True)

        assert after["generation"] > before["generation"]
        assert code(late) == "FENCED"
        assert acked.status_code == 200


def test_a_leader_that_is_stopped_and_goes_on_later_writes_nothing(postgres_dsn: str) -> None:
    with nodes(postgres_dsn, 2, QUICK) as (first, second), Client(second.url) as other:
        other.create("wake/pool")
        # The stale worker's lease has to run out, and the fresh one's has to last to the end.
        other.pull("s", lease_ttl_ms=5_000)
        other.create("events/a", 1)
        until(lambda: len(other.read("wake/pool")) == 1, "the wake is announced")
        stale = other.claim("s", "stale").json()

        first.freeze()
        until(lambda: leader_url(postgres_dsn) == second.url, "the other node leads")
        fresh = _claimed(other)
        first.thaw()
        with Client(first.url) as thawed:
            late = again(lambda: thawed.say("ack", "s", stale, acks=tails(stale), done=True))
            shown = again(lambda: thawed.http.get("__ds/subscriptions/s")).json()

        assert leader_url(postgres_dsn) == second.url
        assert code(late) == "FENCED"
        assert shown["holder"] == "fresh"
        assert shown["generation"] == fresh["generation"]
        assert other.say("ack", "s", fresh, acks=tails(fresh), done=True).status_code == 200


def test_a_request_that_a_hanging_leader_took_is_not_waited_for_once_another_leads(
    postgres_dsn: str,
) -> None:
    # For longer than a request waits for somebody to lead.
    silence = {"FENCEPOST_STORE_LEADER_SILENCE_MS": str(LEADER_MS_MAX + 1_000)}
    with nodes(postgres_dsn, 3, QUICK | silence) as (first, second, third):
        with Client(second.url) as two, Client(third.url) as three:
            two.pull("s")
            first.freeze()

            read = two.http.get("__ds/subscriptions/s")
            written = [client.claim("s") for client in (two, three)]

        # Whether the one that hangs has done what it was asked is not known.
        assert read.status_code == 200
        assert {answer.json()["code"] for answer in written} <= {
            "outcome_unknown",
            "no_pending_work",
        }


def _claimed(client: Client) -> dict[str, object]:
    """Claim as soon as the lease before has run out."""
    claimed: list[dict[str, object]] = []

    def claim() -> bool:
        answer = client.claim("s", "fresh")
        if answer.status_code == 200:
            claimed.append(answer.json())
        return bool(claimed)

    until(claim, "the lease has run out")
    return claimed[0]


def test_a_leader_that_leaves_in_order_hands_over(postgres_dsn: str) -> None:
    with nodes(postgres_dsn, 1) as (first,), Node(postgres_dsn) as second:
        with Client(first.url) as one:
            one.pull("s")
        with Client(second.url) as other:
            first.stop()

            answer = again(lambda: other.http.get("__ds/subscriptions/s"))

        assert answer.status_code == 200
        assert leader_url(postgres_dsn) == second.url
        assert rows(postgres_dsn, "SELECT count(*) FROM nodes") == [(1,)]


def test_a_session_that_is_cut_is_no_reason_to_lose_subscriptions(postgres_dsn: str) -> None:
    """As when the database is restarted: whoever comes back first leads."""
    with (
        nodes(postgres_dsn, 2) as (first, second),
        Client(first.url) as one,
        Client(second.url) as two,
    ):
        one.create("wake/pool")
        one.pull("s")

        with psycopg.connect(postgres_dsn, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        made = again(lambda: two.http.put("events/a", headers=JSON, content="[1]"))

        assert made.status_code == 201
        until(lambda: again(lambda: two.http.get("wake/pool")).text != "[]", "there is a wake")
        assert again(lambda: one.claim("s")).status_code == 200


def test_who_may_do_what_is_the_same_through_every_node(postgres_dsn: str) -> None:
    principals = {"FENCEPOST_PRINCIPALS": json.dumps([ROOT, ANN, BOB])}
    asked = {"type": "pull-wake", "pattern": "orders/*", "wake_stream": "wakes/ann"}
    path = "/v1/stream/__ds/subscriptions/s"
    with (
        nodes(postgres_dsn, 2, principals) as (_, second),
        As(second.url, "ann") as ann,
        As(second.url, "bob") as bob,
        As(second.url, None) as nobody,
    ):
        made = ann.client.put(path, json=asked)
        own, foreign, unknown = (who.client.get(path) for who in (ann, bob, nobody))
        pretending = bob.client.put(path, json=asked)

    assert made.status_code == 201
    assert own.status_code == 200
    assert code(foreign) == "SUBSCRIPTION_NOT_FOUND"
    assert unknown.status_code == 401
    assert pretending.status_code == 403
