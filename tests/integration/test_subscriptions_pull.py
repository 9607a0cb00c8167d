"""Pull-wake subscriptions against a real server: wake events, claims, acks, releases, kills."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from tests.engines import engine as engine
from tests.engines import serving_on
from tests.integration.subscriptions_support import Client, code, polled, tails
from tests.serving import ServerProcess

START = "0" * 16 + "_" + "0" * 16


@pytest.fixture
def server(engine: str, tmp_path: Path) -> Iterator[ServerProcess]:
    with serving_on(engine, tmp_path / "data") as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.url) as found:
        found.create("wake/pool")
        yield found


def wakes(client: Client, count: int) -> list[dict[str, object]]:
    """The wake stream's events, once there are `count` of them."""
    for events in polled(lambda: client.read("wake/pool")):
        if len(events) >= count:
            assert len(events) == count
            return list(events)
    raise AssertionError


def test_pending_work_is_announced_once_and_claimed_under_the_announced_generation(
    client: Client,
) -> None:
    client.pull("s")
    client.create("events/a", 1)
    client.append("events/a", 2)

    [event] = wakes(client, 1)
    claimed = client.claim("s").json()

    assert event["type"] == "wake"
    assert event["subscription_id"] == "s"
    assert event["stream"] == "events/a"
    assert event["generation"] == claimed["generation"] == 1
    assert isinstance(event["ts"], int)
    assert claimed["lease_ttl_ms"] == 30_000
    assert claimed["wake_id"].startswith("w_")


def test_of_many_claimers_exactly_one_wins(client: Client) -> None:
    client.pull("s")
    client.create("events/a", 1)
    workers = [f"worker-{number}" for number in range(12)]

    with ThreadPoolExecutor(len(workers)) as threads:
        answers = list(threads.map(lambda worker: client.claim("s", worker), workers))

    won = [
        worker for worker, answer in zip(workers, answers, strict=True) if answer.status_code == 200
    ]
    assert len(won) == 1
    for answer in answers:
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert answer.status_code == 409
            assert (error["code"], error["current_holder"]) == ("ALREADY_CLAIMED", won[0])
            assert error["generation"] == 1


def test_there_is_nothing_to_claim_without_work(client: Client) -> None:
    client.pull("s")

    answer = client.claim("s")

    assert (answer.status_code, code(answer)) == (409, "NO_PENDING_WORK")
    assert client.look("s")["generation"] == 0


def test_an_ack_with_done_says_whether_there_is_more(client: Client) -> None:
    client.pull("s")
    client.create("events/a", 1)
    first = client.claim("s").json()
    later = client.append("events/a", 2)

    more = client.say("ack", "s", first, acks=tails(first), done=True)
    second = client.claim("s").json()
    nothing = client.say("ack", "s", second, acks=tails(second), done=True)

    assert more.json() == {"ok": True, "next_wake": True}
    assert tails(second) == {"events/a": later}
    assert second["generation"] == 2
    assert nothing.json() == {"ok": True, "next_wake": False}
    assert [event["generation"] for event in wakes(client, 2)] == [1, 2]


def test_a_release_without_acks_announces_the_work_again(client: Client) -> None:
    client.pull("s")
    client.create("events/a", 1)
    claimed = client.claim("s").json()

    released = client.say("release", "s", claimed)
    again = client.say("release", "s", claimed)

    assert released.status_code == 204
    assert (again.status_code, code(again)) == (409, "FENCED")
    assert [event["generation"] for event in wakes(client, 2)] == [1, 2]
    assert client.cursors("s") == {"events/a": START}


def test_a_worker_that_stops_is_replaced_and_cannot_ack_any_more(client: Client) -> None:
    client.pull("s", lease_ttl_ms=1000)
    client.create("events/a", 1)
    lost = client.claim("s", "lost").json()

    wakes(client, 2)
    found = client.claim("s", "found")
    late = client.say("ack", "s", lost, acks=tails(lost), done=True)

    assert found.status_code == 200
    assert found.json()["generation"] == 2
    assert (late.status_code, code(late)) == (409, "FENCED")
    assert client.look("s")["holder"] == "found"
    assert client.cursors("s") == {"events/a": START}


def test_a_heartbeat_extends_the_lease(client: Client) -> None:
    client.pull("s", lease_ttl_ms=1000)
    client.create("events/a", 1)
    claimed = client.claim("s").json()
    first = client.look("s")["lease_expires_at"]

    for look in polled(lambda: client.look("s")):
        assert client.say("ack", "s", claimed).status_code == 200
        # Twice over what the lease was given for: without heartbeats it would be gone.
        if _seconds(look["lease_expires_at"]) - _seconds(first) >= 2:
            break

    done = client.say("ack", "s", claimed, acks=tails(claimed), done=True)
    assert done.json() == {"ok": True, "next_wake": False}


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def test_a_claim_and_its_lease_survive_a_kill(server: ServerProcess, client: Client) -> None:
    client.pull("s")
    client.create("events/a", 1)
    claimed = client.claim("s", "ann").json()
    before = client.look("s")

    server.kill()
    server.restart()
    busy = client.claim("s", "bob")
    after = client.look("s")
    done = client.say("ack", "s", claimed, acks=tails(claimed), done=True)

    assert busy.json()["error"]["current_holder"] == "ann"
    assert after["lease_expires_at"] == before["lease_expires_at"]
    assert done.json() == {"ok": True, "next_wake": False}
    assert len(client.read("wake/pool")) == 1


def test_an_unclaimed_wake_survives_a_kill_and_is_not_announced_twice(
    server: ServerProcess, client: Client
) -> None:
    client.pull("s")
    client.create("events/a", 1)
    wakes(client, 1)

    server.kill()
    server.restart()
    claimed = client.claim("s").json()

    assert claimed["generation"] == 1
    assert len(client.read("wake/pool")) == 1


def test_a_wake_waits_for_its_wake_stream_to_be_made(client: Client) -> None:
    client.pull("s", wake_stream="wake/later")
    client.create("events/a", 1)
    for look in polled(lambda: client.look("s")):
        if look["status"] == "failed":
            break

    client.create("wake/later")

    for events in polled(lambda: client.read("wake/later")):
        if events:
            assert [event["generation"] for event in events] == [1]
            break
    assert client.look("s")["status"] == "active"


def test_a_wake_stream_that_is_not_json_gets_a_line_for_each_wake(client: Client) -> None:
    answer = client.http.put("wake/lines", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 201
    client.pull("s", wake_stream="wake/lines")

    client.create("events/a", 1)

    for text in polled(lambda: client.http.get("wake/lines").text):
        if text:
            assert text.endswith("}\n")
            break


def test_acks_past_the_tail_are_refused_and_change_nothing(client: Client) -> None:
    client.pull("s")
    client.create("events/a", 1)
    client.create("events/b", 1)
    claimed = client.claim("s").json()
    beyond = {"events/a": tails(claimed)["events/a"], "events/b": f"{9:016d}_{99:016d}"}

    answer = client.say("ack", "s", claimed, acks=beyond, done=True)

    assert (answer.status_code, code(answer)) == (400, "INVALID_OFFSET")
    assert set(client.cursors("s").values()) == {START}
    assert client.look("s")["holder"] == "worker-1"


def test_streams_are_added_and_removed_by_name_and_the_pattern_stays(client: Client) -> None:
    tail = client.create("events/a", 1)
    other = client.create("other/a", 1, 2)
    client.pull("s", streams=["manual/none"])
    url = "__ds/subscriptions/s/streams"

    for _ in range(2):
        added = client.http.post(url, json={"streams": ["events/a", "other/a"]})
        assert added.status_code == 204
    both = {link["path"]: link["link_type"] for link in client.look("s")["streams"]}
    for path in ("events%2Fa", "other/a", "other/a", "never/there"):
        assert client.http.delete(f"{url}/{path}").status_code == 204

    assert both == {"events/a": "explicit", "manual/none": "explicit", "other/a": "explicit"}
    assert client.look("s")["streams"] == [
        {"path": "events/a", "link_type": "glob", "acked_offset": tail},
        {"path": "manual/none", "link_type": "explicit", "acked_offset": START},
    ]
    assert other != START


def test_links_by_name_survive_a_kill(server: ServerProcess, client: Client) -> None:
    client.pull("s")
    tail = client.create("other/a", 1)
    client.http.post("__ds/subscriptions/s/streams", json={"streams": ["other/a"]})

    server.kill()
    server.restart()

    assert client.cursors("s") == {"other/a": tail}
    client.append("other/a", 2)
    assert tails(client.claim("s").json()).keys() == {"other/a"}


def test_a_long_list_of_streams_is_shown_in_pages(client: Client) -> None:
    for name in "cab":
        client.create(f"events/{name}")
    client.pull("s")

    url = "__ds/subscriptions/s?after=events/a"
    shown = client.http.get(url).json()

    assert [link["path"] for link in shown["streams"]] == ["events/b", "events/c"]
    assert shown["streams_total"] == 3
