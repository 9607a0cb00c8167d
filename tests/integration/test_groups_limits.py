"""Every limit of groups is a setting, and going past it is an error that names it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.groups_support import Team, body_of, fresh
from tests.integration.raw import Connection, request
from tests.serving import ServerProcess

SMALL = {
    "GROUPS_MAX": 3,
    "GROUP_TARGETS_MAX": 3,
    "LANES_MAX": 2,
    "CLAIM_STREAMS_MAX": 5,
    "CLAIM_EVENTS_MAX": 6,
    "CLAIM_BYTES_MAX": 400,
    "LEASE_MS_MIN": 2_000,
    "LEASE_MS_MAX": 20_000,
    "FAILURE_BYTES_MAX": 10,
    "PARKED_MAX": 1,
    "TOLD_MAX": 3,
}


@pytest.fixture
def wire(tmp_path: Any) -> Iterator[Connection]:
    environment = {f"FENCEPOST_GROUPS_{name}": str(value) for name, value in SMALL.items()}
    with (
        ServerProcess(tmp_path, environment=environment) as server,
        Connection(server.port) as connection,
    ):
        yield connection


def named(reply: Any) -> str:
    """The limit that a refusal names."""
    return str(body_of(reply, 413)["limit"])


def test_the_number_of_groups_is_bounded(wire: Connection) -> None:
    for _ in range(3):
        Team(wire)

    reply = wire.ask("PUT", f"/v1/groups/{fresh()}", body=b'{"sources":["a"]}')

    assert named(reply) == "groups_max"


def test_targets_and_lanes_of_a_group_are_bounded(wire: Connection) -> None:
    team = Team(wire, targets="computed")
    [position] = team.fill("a")

    def correlate(**fields: Any) -> Any:
        targets = [
            {
                "target": f"t{n}",
                "source": "s",
                "position": position,
                **{k: f(n) for k, f in fields.items()},
            }
            for n in range(4 if not fields else 3)
        ]
        return team.post("correlate", after=-1, until=position, targets=targets)

    assert named(correlate()) == "group_targets_max"
    assert named(correlate(lane=lambda n: f"l{n}")) == "lanes_max"


def test_what_targets_are_told_of_is_bounded_until_they_get_past_it(wire: Connection) -> None:
    team = Team(wire, targets="computed")
    positions = team.fill("a", "a", "a", "a", "a")

    def tell(*events: int) -> Any:
        after = body_of(wire.ask("GET", f"/v1/groups/{team.name}"))["correlated"]
        told = {"target": "t", "source": f"{team.name}/a", "note": "n"}
        targets = [{**told, "position": position} for position in events]
        return team.post("correlate", after=after, until=events[-1], targets=targets)

    assert named(tell(*positions[:4])) == "told_max"
    assert body_of(tell(*positions[:3]))["correlated"] == positions[2]
    assert named(tell(positions[3])) == "told_max"
    [lease] = team.claim(streams_max=1, events_max=2)
    assert [event["note"] for event in lease["events"]] == ["n", "n"]
    item = {"token": lease["token"], "at": lease["read_to"]}
    assert body_of(team.post("ack", items=[item]))["items"][0]["outcome"] == "acked"
    assert team.get("stats")["told"] == 1
    assert body_of(tell(*positions[3:]))["correlated"] == positions[4]


def test_a_note_is_bounded(wire: Connection) -> None:
    team = Team(wire, targets="computed")
    [position] = team.fill("a")
    told = {"target": "t", "source": f"{team.name}/a", "position": position}
    for note in ("x" * 4_097, "a\nb"):
        reply = team.post("correlate", after=-1, until=position, targets=[{**told, "note": note}])
        assert body_of(reply, 400)["code"] == "group_invalid"


def test_claims_are_bounded_in_targets_events_and_lease(wire: Connection) -> None:
    team = Team(wire)

    assert named(team.post("claim", worker="a", streams_max=6)) == "claim_streams_max"
    assert named(team.post("claim", worker="a", streams_max=5, events_max=7)) == "claim_events_max"
    assert named(team.post("renew", tokens=["x"] * 6)) == "claim_streams_max"
    for lease_ms in (1_999, 20_001):
        reply = team.post("claim", worker="a", streams_max=5, events_max=1, lease_ms=lease_ms)
        assert body_of(reply, 400)["code"] == "group_invalid"


def test_an_answer_is_bounded_in_bytes_and_the_rest_comes_with_the_next_claim(
    wire: Connection,
) -> None:
    team = Team(wire)
    positions = team.fill(*["a"] * 6)

    [first] = team.claim(streams_max=5, events_max=6)
    team.ack(first)
    [second] = team.claim(streams_max=5, events_max=6)

    taken = [event["position"] for event in first["events"]]
    assert 0 < len(taken) < 6
    assert second["events"][0]["position"] == positions[len(taken)]


def test_errors_and_parked_events_are_bounded(wire: Connection) -> None:
    team = Team(wire, on_exhausted="park", retries_max=0)
    team.fill("a", "b")
    one, two = team.claim(streams_max=5, events_max=1)
    failure = {"position": one["events"][0]["position"], "error": "x" * 11}
    reply = team.post("ack", items=[{"token": one["token"], "failure": failure}])

    assert named(reply) == "failure_bytes_max"
    assert team.fail(one)["outcome"] == "parked"
    assert team.fail(two)["outcome"] == "blocked"
    [blocked] = team.get("streams", "?state=blocked")["streams"]
    assert "parked_max" in blocked["error"]
    event = {"target": two["target"], "position": two["events"][0]["position"]}
    for body in ({"events": [event]}, {"filter": {"blocked": True}}):
        assert named(team.post("park", limit=5, **body)) == "parked_max"
    assert len(team.get("parked")["parked"]) == 1


def test_a_commit_parks_no_more_than_fits(wire: Connection) -> None:
    team = Team(wire, on_exhausted="park", retries_max=0)
    team.fill("a", "b")
    leases = [
        {
            "token": lease["token"],
            "at": lease["at"],
            "failure": {"position": lease["events"][0]["position"], "error": "boom"},
        }
        for lease in team.claim(streams_max=5, events_max=1)
    ]
    effect = {"stream": f"{team.name}-out", "data": 1, "auto_create": True}
    effect["content_type"] = "application/json"

    body = json.dumps({"appends": [effect], "leases": leases}).encode()
    answer = body_of(wire.ask("POST", "/v1/commit", body=body))

    assert [lease["outcome"] for lease in answer["leases"]] == ["parked", "blocked"]


def test_waiting_claims_count_as_waiters(tmp_path: Any) -> None:
    environment = {"FENCEPOST_LIMITS_WAITERS_MAX": "1"}
    with (
        ServerProcess(tmp_path, environment=environment) as server,
        Connection(server.port) as first,
        Connection(server.port) as second,
    ):
        team = Team(second)
        body = json.dumps({"worker": "a", "wait_ms": 20_000}).encode()
        first.send(request("POST", f"/v1/groups/{team.name}/claim", body=body))
        replies = (team.post("claim", worker="b", wait_ms=1) for _ in range(100))
        # By then the first one waits.
        reply = next(reply for reply in replies if reply.status != 200)

    assert body_of(reply, 503)["code"] == "too_many_waiters"


def test_claims_and_readers_of_streams_and_of_the_log_share_one_bound(tmp_path: Any) -> None:
    environment = {"FENCEPOST_LIMITS_WAITERS_MAX": "1"}
    with (
        ServerProcess(tmp_path, environment=environment) as server,
        Connection(server.port) as reader,
        Connection(server.port) as other,
    ):
        team = Team(other)
        team.fill("a")
        [lease] = team.claim()
        follow = f"/v1/stream/{team.name}/a?live=sse&offset=now"
        reader.send(request("GET", follow))
        assert reader.head().status == 200

        claims = (team.post("claim", worker="b", wait_ms=1) for _ in range(1_000))
        # By then the reader waits.
        claim = next(reply for reply in claims if reply.status != 200)
        log = other.ask("GET", "/v1/log?live=long-poll&after=0")
        acked = team.ack(lease)

    assert body_of(claim, 503)["code"] == "too_many_waiters"
    assert body_of(log, 503)["code"] == "too_many_waiters"
    assert acked["outcome"] == "acked", "what does not wait goes on"
