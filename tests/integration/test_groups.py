"""Groups over HTTP: from a stream to workers, with fenced effects, a poison event and operators."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines import engine as engine
from tests.integration.groups_support import JSON, Team, body_of, fresh, metrics_of
from tests.integration.raw import Connection, code_of
from tests.serving import ServerProcess


@pytest.fixture
def wire(server_process: ServerProcess) -> Iterator[Connection]:
    with Connection(server_process.port) as connection:
        yield connection


@pytest.fixture
def team(wire: Connection) -> Team:
    return Team(wire)


def append(path: str, value: Any = 1, **more: Any) -> dict[str, Any]:
    return {"stream": path, "content_type": JSON, "data": value, "auto_create": True, **more}


def commit(wire: Connection, **body: Any) -> Any:
    return wire.ask("POST", "/v1/commit", body=json.dumps(body).encode())


def test_a_group_is_made_shown_found_again_and_deleted(team: Team, wire: Connection) -> None:
    shown = team.get()

    assert body_of(team.put()) == shown
    assert (shown["group"], shown["correlated"], shown["targets"]) == (team.name, -1, "stream")
    assert code_of(team.put(lost_max=9)) == "group_exists"
    listed = body_of(wire.ask("GET", f"/v1/groups?match={team.name}"))
    assert [group["group"] for group in listed["groups"]] == [team.name]
    assert wire.ask("DELETE", f"/v1/groups/{team.name}").status == 204
    for method in ("GET", "DELETE"):
        gone = wire.ask(method, f"/v1/groups/{team.name}")
        assert (gone.status, code_of(gone)) == (404, "group_not_found")


def test_a_worker_claims_handles_and_acks_streams_in_order(team: Team) -> None:
    positions = team.fill("a", "b", "a")

    leases = {lease["target"]: lease for lease in team.claim()}

    a = leases[f"{team.name}/a"]
    assert [event["position"] for event in a["events"]] == [positions[0], positions[2]]
    assert [event["data"]["data"] for event in a["events"]] == ["a", "a"]
    assert [event["version"] for event in a["events"]] == [0, 1]
    assert (a["at"], a["until"], a["read_to"]) == (-1, positions[2], positions[2])
    assert team.claim("bob") == []
    assert team.ack(a) == {"target": a["target"], "outcome": "acked", "at": positions[2]}
    assert team.ack(a)["outcome"] == "lost"
    assert team.ack(leases[f"{team.name}/b"])["outcome"] == "acked"
    assert team.claim("bob") == []


def test_a_page_of_events_ends_where_the_ack_begins_the_next(team: Team) -> None:
    positions = team.fill(*["a"] * 5)

    [first] = team.claim(events_max=2)
    team.ack(first)
    [second] = team.claim(events_max=10)

    assert [event["position"] for event in first["events"]] == positions[:2]
    assert [event["position"] for event in second["events"]] == positions[2:]


def test_an_ack_brings_the_next_leases(team: Team) -> None:
    team.fill("a", "b")
    [lease] = team.claim(streams_max=1)

    items = [{"token": lease["token"], "at": lease["read_to"]}]
    answer = body_of(team.post("ack", items=items, claim={"worker": "ann"}))

    assert [item["outcome"] for item in answer["items"]] == ["acked"]
    assert len(answer["leases"]) == 1
    assert answer["leases"][0]["target"] != lease["target"]


def test_a_claim_waits_for_an_append(team: Team, server_process: ServerProcess) -> None:
    found: list[Any] = []

    def wait() -> None:
        with Connection(server_process.port) as other:
            asking = Team.__new__(Team)
            asking.wire, asking.name = other, team.name
            found.extend(asking.claim(wait_ms=20_000))

    waiting = threading.Thread(target=wait)
    waiting.start()
    team.fill("a")
    waiting.join(25)

    assert [lease["target"] for lease in found] == [f"{team.name}/a"]


def test_a_claim_waits_for_a_retry_that_comes_due(wire: Connection) -> None:
    team = Team(wire, backoff={"kind": "fixed", "base_ms": 300, "cap_ms": 300, "jitter": 0.0})
    team.fill("a")
    [lease] = team.claim()

    assert team.fail(lease)["outcome"] == "failed"
    assert team.claim() == []
    [again] = team.claim(wait_ms=20_000)

    assert again["retry"] == 1


def test_renew_and_release_answer_lease_by_lease(team: Team) -> None:
    team.fill("a")
    [lease] = team.claim(lease_ms=60_000)
    tokens = [lease["token"]]

    [renewed] = body_of(team.post("renew", tokens=tokens, lease_ms=120_000))["items"]
    [released] = body_of(team.post("release", tokens=tokens))["items"]
    [lost] = body_of(team.post("renew", tokens=tokens))["items"]

    assert renewed["outcome"] == "renewed"
    assert renewed["lease_until_ms"] > lease["lease_until_ms"]
    assert released == {"target": lease["target"], "outcome": "released"}
    assert lost == {"target": lease["target"], "outcome": "lost", "lease_until_ms": None}
    assert len(team.claim("bob")) == 1


# Fencing


def test_an_append_under_a_lease_is_refused_once_the_lease_is_lost(team: Team) -> None:
    team.fill("a")
    [lease] = team.claim()
    token = lease["token"]

    first = team.append("out", 1, Lease_Token=token)
    team.ack(lease)
    late = team.append("out", 2, Lease_Token=token)

    assert first.status == 204
    assert (late.status, code_of(late)) == (412, "lease_lost")


def test_a_repeated_append_is_a_duplicate_although_the_lease_is_gone(team: Team) -> None:
    team.fill("a")
    [lease] = team.claim()
    headers = {"Lease_Token": lease["token"], "Idempotency_Key": "k"}

    first = team.append("out", 1, **headers)
    team.ack(lease)
    again = team.append("out", 1, **headers)

    assert (first.status, again.status) == (204, 200)
    assert again.headers["idempotency-replayed"] == "true"


def test_a_forged_token_is_invalid(team: Team) -> None:
    team.fill("a")
    [lease] = team.claim()
    token = lease["token"]
    forged = token[:-4] + ("AAAA" if token[-4:] != "AAAA" else "BBBB")

    for bad in (forged, "x", "ä".encode("latin-1").decode("latin-1")):
        reply = team.append("out", 1, Lease_Token=bad)
        assert (reply.status, code_of(reply)) == (400, "lease_invalid")
    assert code_of(team.post("ack", items=[{"token": forged, "at": 1}])) == "lease_invalid"


def test_a_token_of_another_group_is_invalid_and_of_an_earlier_incarnation_lost(
    team: Team, wire: Connection
) -> None:
    team.fill("a")
    [lease] = team.claim()
    other = Team(wire)

    assert code_of(other.post("renew", tokens=[lease["token"]])) == "lease_invalid"
    wire.ask("DELETE", f"/v1/groups/{team.name}")
    gone = team.append("out", 1, Lease_Token=lease["token"])
    assert (gone.status, code_of(gone)) == (400, "lease_invalid")
    body_of(team.put(), 201)
    earlier = team.append("out", 1, Lease_Token=lease["token"])
    assert (earlier.status, code_of(earlier)) == (412, "lease_lost")
    assert team.ack(lease)["outcome"] == "lost"


def test_a_commit_acks_in_the_transaction_of_its_effects(team: Team, wire: Connection) -> None:
    team.fill("a")
    [lease] = team.claim()
    out = f"{team.name}-out"
    leases = [{"token": lease["token"], "at": lease["read_to"]}]

    done = commit(wire, appends=[append(out)], leases=leases)
    late = commit(wire, appends=[append(out)], leases=leases)

    assert done.status == 200
    assert (late.status, code_of(late), body_of(late, 412)["lease"]) == (412, "lease_lost", 0)
    assert team.claim() == []
    assert json.loads(wire.ask("GET", f"/v1/stream/{out}").body) == [1]


def test_a_commit_whose_append_is_refused_acks_nothing(team: Team, wire: Connection) -> None:
    team.fill("a")
    [lease] = team.claim()
    leases = [{"token": lease["token"], "at": lease["read_to"]}]

    refused = commit(wire, appends=[append(f"{team.name}-o", if_match="7")], leases=leases)

    assert (refused.status, code_of(refused)) == (412, "tail_moved")
    assert team.ack(lease)["outcome"] == "acked"


def test_one_append_of_a_commit_rests_on_a_lease_that_goes_on(team: Team, wire: Connection) -> None:
    team.fill("a")
    [lease] = team.claim()
    item = append(f"{team.name}-out", lease=lease["token"])

    assert commit(wire, appends=[item]).status == 200
    assert team.ack(lease)["outcome"] == "acked"
    refused = commit(wire, appends=[append(f"{team.name}-x"), item])
    assert (refused.status, body_of(refused, 412)["item"]) == (412, 1)


def test_a_large_commit_acks_with_its_effects(team: Team, wire: Connection) -> None:
    team.fill("a", "b")
    one, two = team.claim()
    appends = [append(f"{team.name}-out/{n}") for n in range(300)]

    done = commit(wire, appends=appends, leases=[{"token": one["token"], "at": one["read_to"]}])
    team.ack(two)
    late = commit(wire, appends=appends, leases=[{"token": two["token"], "at": two["read_to"]}])

    assert done.status == 200
    assert team.ack(one)["outcome"] == "lost"
    assert (late.status, code_of(late)) == (412, "lease_lost")


@pytest.mark.parametrize("appends", [1, 300], ids=["at once", "in slices"])
def test_a_commit_notes_the_failure_behind_what_it_stores(
    wire: Connection, appends: int, server_process: ServerProcess
) -> None:
    team = Team(wire, retries_max=1)
    first, second = team.fill("a", "a")
    outs = [append(f"{team.name}-out/{n}") for n in range(appends)]

    def ending(lease: dict[str, Any], at: int) -> dict[str, Any]:
        failure = {"position": second, "error": "boom", "delay_ms": 0}
        return {"token": lease["token"], "at": at, "failure": failure}

    [lease] = team.claim()
    done = body_of(commit(wire, appends=outs, leases=[ending(lease, first)]))
    [again] = team.claim(wait_ms=10_000)
    blocked = body_of(commit(wire, appends=outs, leases=[ending(again, first)]))

    [row] = team.get("streams")["streams"]
    target = f"{team.name}/a"
    assert done["leases"] == [{"target": target, "outcome": "failed", "at": first}]
    assert (again["at"], again["retry"]) == (first, 1)
    assert [event["position"] for event in again["events"]] == [second]
    assert blocked["leases"] == [{"target": target, "outcome": "blocked", "at": first}]
    assert (row["state"], row["error"]) == ("blocked", "boom")
    metrics = metrics_of(server_process, team.name)
    assert metrics['retries_total lane="default"'] == 1
    assert metrics['blocked_total lane="default"'] == 1


def test_a_failure_that_cannot_be_refuses_the_commit(team: Team, wire: Connection) -> None:
    [first] = team.fill("a")
    [lease] = team.claim()
    out = f"{team.name}-out"

    def tried(**failure: Any) -> Any:
        item = {"token": lease["token"], "at": first, "failure": {"error": "boom", **failure}}
        return commit(wire, appends=[append(out)], leases=[item])

    for reply, code in (
        (tried(position=first), "ack_invalid"),
        (tried(position=first + 10**6), "ack_invalid"),
        (tried(position=first, delay_ms=-1), "ack_invalid"),
        (tried(position=first, error="x" * 5_000), "limit_exceeded"),
        (tried(position=first, error="a\0b"), "group_invalid"),
    ):
        assert (code_of(reply), body_of(reply, reply.status)["lease"]) == (code, 0)
    assert wire.ask("HEAD", f"/v1/stream/{out}").status == 404
    assert team.ack(lease)["outcome"] == "acked"


def test_the_answer_of_a_key_says_again_what_became_of_the_leases(
    team: Team, wire: Connection
) -> None:
    team.fill("a")
    [lease] = team.claim()
    leases = [{"token": lease["token"], "at": lease["read_to"]}]
    body = json.dumps({"appends": [append(f"{team.name}-out")], "leases": leases}).encode()

    first, again = (
        body_of(wire.ask("POST", "/v1/commit", "Idempotency-Key: acked", body=body))
        for _ in range(2)
    )

    assert again == {**first, "duplicate": True}
    assert first["leases"] == [
        {"target": lease["target"], "outcome": "acked", "at": lease["read_to"]}
    ]


def test_a_commit_that_only_acks_is_refused(team: Team, wire: Connection) -> None:
    team.fill("a")
    [lease] = team.claim()

    refused = commit(wire, appends=[], leases=[{"token": lease["token"], "at": 0}])

    assert code_of(refused) == "commit_empty"


# Append by version


def test_an_append_by_version_is_accepted_only_at_that_version(wire: Connection) -> None:
    team = Team(wire)
    path = f"/v1/stream/{team.name}/s"

    first = team.append("s", 0)
    head = wire.ask("HEAD", path)
    second = team.append("s", 1, If_Match='"0"')
    stale = team.append("s", 2, If_Match='"0"')

    assert head.headers["stream-version"] == "0"
    assert (first.status, second.status, stale.status) == (204, 204, 412)
    assert stale.headers["stream-version"] == "1"
    assert wire.ask("GET", path).headers["stream-version"] == "1"
    item = append(f"{team.name}/s", if_match="1")
    assert commit(wire, appends=[item]).status == 200


@pytest.mark.parametrize("value", ['"01"', '"9007199254740992"', '"1.0"', '"-2"', "1"])
def test_other_forms_of_if_match_are_refused(team: Team, value: str) -> None:
    assert code_of(team.append("s", 1, If_Match=value)) == "if_match_invalid"


# Failures, parking, operators


def test_a_poison_event_is_parked_and_replayed(wire: Connection) -> None:
    team = Team(wire, on_exhausted="park", retries_max=1)
    positions = team.fill("a", "a")
    outcomes = []
    for _ in range(2):
        [lease] = team.claim()
        outcomes.append(team.fail(lease)["outcome"])
    [lease] = team.claim()

    assert outcomes == ["failed", "parked"]
    assert [event["position"] for event in lease["events"]] == positions[1:]
    team.ack(lease)
    [parked] = team.get("parked")["parked"]
    assert (parked["position"], parked["error"], parked["attempts"]) == (positions[0], "boom", 2)
    assert body_of(team.post("replay", filter={}, limit=5)) == {"changed": 1, "next": None}
    [again] = team.claim()
    assert [(e["position"], e["replayed"]) for e in again["events"]] == [(positions[0], True)]
    team.ack(again, at=None, replayed=[{"position": positions[0]}])
    assert team.get("parked")["parked"] == []
    assert team.get("stats")["parked"] == 0


def test_an_event_of_another_stream_is_not_parked_for_a_target(team: Team) -> None:
    a, b = team.fill("a", "b")
    team.claim(lease_ms=1_000)
    events = [(f"{team.name}/a", a), (f"{team.name}/a", b)]

    asked = [{"target": target, "position": position} for target, position in events]
    reply = team.post("park", events=asked)

    assert (reply.status, code_of(reply)) == (404, "target_not_found")
    assert f"'{team.name}/a@{b}'" in body_of(reply, 404)["detail"]
    assert team.get("parked")["parked"] == []
    assert body_of(team.post("park", events=asked[:1]))["changed"] == 1


def test_an_event_that_a_computed_target_was_not_told_of_is_not_parked_for_it(
    wire: Connection,
) -> None:
    """What it is not known to have been told of or not, the operator may park."""
    team = Team(wire, targets="computed")
    at = team.fill(*"abcdef")
    source = f"{team.name}/**"
    told = [{"target": "t", "source": source, "position": at[n], "note": "n"} for n in (1, 3)]
    untold = {"target": "t", "source": source, "position": at[5]}
    after = team.get()["correlated"]
    body_of(team.post("correlate", after=after, until=at[5], targets=[*told, untold]))
    team.claim(lease_ms=60_000)

    refused = [team.post("park", events=[{"target": "t", "position": at[n]}]) for n in (0, 2)]
    parked = [team.post("park", events=[{"target": "t", "position": at[n]}]) for n in (1, 3, 4)]

    assert [code_of(reply) for reply in refused] == ["target_not_found"] * 2
    assert [body_of(reply)["changed"] for reply in parked] == [1, 1, 1]


def test_operators_block_nothing_but_can_free_everything(wire: Connection) -> None:
    team = Team(wire, retries_max=0)
    team.fill("a", "b")
    for lease in team.claim():
        assert team.fail(lease)["outcome"] == "blocked"

    [a, b] = team.get("streams", "?state=blocked")["streams"]
    assert (a["error"], a["blocked"], b["state"]) == ("boom", True, "blocked")
    assert team.claim() == []
    one = body_of(team.post("unblock", targets=[f"{team.name}/a"]))
    assert one == {"changed": 1, "next": None}
    assert body_of(team.post("skip", filter={"blocked": True})) == {"changed": 1, "next": None}
    assert [lease["target"] for lease in team.claim()] == [f"{team.name}/a"]
    assert body_of(team.post("reset", filter={}))["changed"] == 2
    assert len(team.claim()) == 2
    assert body_of(team.post("prioritize", filter={}, priority=3))["changed"] == 2
    assert body_of(team.post("defer", filter={}, until_ms=2**52))["changed"] == 2
    stats = team.get("stats")
    assert (stats["targets"], stats["leased"], stats["lanes"][0]["lane"]) == (2, 2, "default")
    assert [w["leases"] for w in team.get("workers")["workers"]] == [2]


def test_a_target_that_is_reset_ahead_of_the_watermark_gets_all_behind_that(team: Team) -> None:
    """What was appended since the last claim is noted by the next one, by its first and last."""
    team.fill("a")
    [lease] = team.claim()
    team.ack(lease)
    positions = team.fill(*["a"] * 5)

    body_of(team.post("reset", targets=[f"{team.name}/a"], at=positions[1]))

    [lease] = team.claim()
    assert [event["position"] for event in lease["events"]] == positions[2:]


def test_messages_are_a_queue_whose_rows_go_with_their_acks(wire: Connection) -> None:
    team = Team(wire, targets="message")
    team.fill("q", "q", "q")

    leases = team.claim(streams_max=2)
    outcomes = [team.ack(lease)["outcome"] for lease in leases]

    assert outcomes == ["acked", "acked"]
    assert [len(lease["events"]) for lease in leases] == [1, 1]
    assert team.get()["targets_count"] == 1


def test_workers_correlate_computed_targets_by_compare_and_swap(wire: Connection) -> None:
    team = Team(wire, targets="computed")
    positions = team.fill("a", "a", "b")
    source = f"{team.name}/a"
    found = [{"target": "customer/7", "source": source, "position": positions[1], "lane": "slow"}]
    after = team.get()["correlated"]
    until = positions[-1]

    done = body_of(team.post("correlate", after=after, until=until, targets=found))
    moved = team.post("correlate", after=after, until=until, targets=found)
    beyond = team.post("correlate", after=until, until=2**40, targets=[])

    assert done == {"correlated": until}
    assert (moved.status, body_of(moved, 409)["watermark"]) == (409, until)
    assert code_of(moved) == "correlation_moved"
    assert code_of(beyond) == "after_beyond_head"
    [lease] = team.claim(lane="slow")
    assert (lease["target"], lease["until"]) == ("customer/7", positions[1])
    assert [event["position"] for event in lease["events"]] == positions[1:2]


def test_a_group_takes_only_events_with_its_names(wire: Connection) -> None:
    team = Team(wire, names=["Other"])
    team.fill("a", "a")

    assert team.claim() == []
    assert team.get()["correlated"] >= 0
    assert team.get()["targets_count"] == 0


def test_breadcrumbs_tell_what_happens(team: Team, server_process: ServerProcess) -> None:
    import http.client

    feed = http.client.HTTPConnection("127.0.0.1", server_process.port, timeout=20)
    feed.request("GET", f"/v1/groups/{team.name}/events")
    reply = feed.getresponse()
    assert reply.headers["content-type"] == "text/event-stream"
    assert reply.readline() == b": listening\n"
    team.fill("a")
    [lease] = team.claim()
    team.ack(lease)

    told: list[bytes] = []
    while len(told) < 2:
        line = reply.readline()
        if line.startswith(b"event: "):
            told.append(line[7:].strip())
    feed.close()
    assert told == [b"claimed", b"acked"]


# Bad input


@pytest.mark.parametrize(
    ("what", "body", "status", "code"),
    [
        ("claim", {"worker": ""}, 400, "group_invalid"),
        ("claim", {"worker": "a\0b"}, 400, "group_invalid"),
        ("claim", {"worker": "a", "streams_max": 0}, 400, "group_invalid"),
        ("claim", {"worker": "a", "streams_max": 1_001}, 413, "limit_exceeded"),
        ("claim", {"worker": "a", "events_max": 10_001}, 413, "limit_exceeded"),
        ("claim", {"worker": "a", "lease_ms": 999}, 400, "group_invalid"),
        ("claim", {"worker": "a", "lease_ms": 600_001}, 400, "group_invalid"),
        ("claim", {"worker": "a", "unknown": 1}, 400, "group_invalid"),
        ("claim", {}, 400, "group_invalid"),
        ("ack", {"items": [{"token": "x", "at": 0}]}, 400, "lease_invalid"),
        ("renew", {"tokens": ["x"]}, 400, "lease_invalid"),
        ("unblock", {}, 400, "filter_invalid"),
        ("unblock", {"filter": {"target": "^webhooks-out-"}}, 400, "filter_invalid"),
        ("unblock", {"targets": ["nowhere"]}, 404, "target_not_found"),
        ("defer", {"filter": {}}, 400, "group_invalid"),
        ("prioritize", {"filter": {}, "priority": 2**31}, 400, "group_invalid"),
        ("reset", {"filter": {}, "at": 2**50}, 400, "after_beyond_head"),
        ("park", {"events": [{"target": "nowhere", "position": 1}]}, 404, "target_not_found"),
        ("replay", {"filter": {"lane": "a//b"}}, 400, "filter_invalid"),
        ("replay", {"filter": {}, "after": "nothing"}, 400, "after_invalid"),
        ("replay", {"filter": {}, "after": "a@" + "9" * 30}, 400, "after_invalid"),
        ("correlate", {"after": -1, "until": -2}, 400, "group_invalid"),
        (
            "correlate",
            {"after": -1, "until": 0, "targets": [{"target": "a\0", "source": "s", "position": 0}]},
            400,
            "path_invalid",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_code(
    team: Team, what: str, body: dict[str, Any], status: int, code: str
) -> None:
    reply = team.post(what, **body)

    assert (reply.status, code_of(reply)) == (status, code)


@pytest.mark.parametrize("after", ["a@" + "9" * 30, "a@%D9%A3", "a@-1", "nothing"])
def test_a_place_that_no_page_has_told_is_refused(team: Team, after: str) -> None:
    reply = team.wire.ask("GET", f"/v1/groups/{team.name}/parked?after={after}")

    assert (reply.status, code_of(reply)) == (400, "after_invalid")


def test_a_regular_expression_is_refused_with_the_glob_to_use(team: Team) -> None:
    reply = team.post("unblock", filter={"target": "^webhooks-out-"})

    assert "'webhooks-out-*'" in body_of(reply, 400)["detail"]


def test_an_oversized_error_is_refused_and_the_lease_goes_on(team: Team) -> None:
    team.fill("a")
    [lease] = team.claim()
    failure = {"position": lease["events"][0]["position"], "error": "x" * 4_097}

    reply = team.post("ack", items=[{"token": lease["token"], "failure": failure}])

    assert (reply.status, code_of(reply)) == (413, "limit_exceeded")
    assert "failure_bytes_max" in body_of(reply, 413)["detail"]
    assert team.ack(lease)["outcome"] == "acked"


def test_an_ack_past_the_head_is_refused_and_the_lease_goes_on(team: Team) -> None:
    team.fill("a")
    [lease] = team.claim()

    reply = team.post("ack", items=[{"token": lease["token"], "at": 2**40}])

    assert (reply.status, code_of(reply)) == (400, "ack_invalid")
    assert team.ack(lease)["outcome"] == "acked"


@pytest.mark.parametrize("name", ["a:b", "mesh:m:queue:q", "a%20b", "x" * 129])
def test_a_name_that_no_group_may_have_is_refused(wire: Connection, name: str) -> None:
    reply = wire.ask("PUT", f"/v1/groups/{name}", body=b'{"sources":["a"]}')

    assert (reply.status, code_of(reply)) == (400, "group_invalid")


def test_requests_about_a_group_that_is_not_there_are_refused(wire: Connection) -> None:
    name = fresh()
    bodies = {"claim": {"worker": "a"}, "renew": {"tokens": []}, "release": {"tokens": []}}
    bodies |= {"ack": {"items": []}, "correlate": {"after": -1, "until": -1}}
    bodies |= {what: {"filter": {}} for what in ("unblock", "reset", "skip", "park", "replay")}
    for what, body in bodies.items():
        reply = wire.ask("POST", f"/v1/groups/{name}/{what}", body=json.dumps(body).encode())
        assert (reply.status, code_of(reply)) == (404, "group_not_found"), what
    for what in ("streams", "parked", "workers", "stats", "events"):
        reply = wire.ask("GET", f"/v1/groups/{name}/{what}")
        assert (reply.status, code_of(reply)) == (404, "group_not_found"), what
