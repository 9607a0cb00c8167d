"""What `/metrics` says of groups, lane by lane, on both stores."""

from __future__ import annotations

import time

import fencepost
from fencepost import EventFailure, LeaseAck
from tests.engines import engine as engine
from tests.integration.groups_support import metrics_of
from tests.serving import ServerProcess

SECONDS_MAX = 30.0


def wait_for(server: ServerProcess, group: str, name: str, value: float) -> dict[str, float]:
    """The metrics once one of them has a value: they are counted now and then."""
    deadline = time.monotonic() + SECONDS_MAX
    while (metrics := metrics_of(server, group)).get(name) != value:
        assert time.monotonic() < deadline, metrics
        time.sleep(0.05)
    return metrics


def test_a_group_that_no_worker_asks_for_shows_its_lag(server_process: ServerProcess) -> None:
    with fencepost.connect(server_process.url) as client:
        group = client.group("left")
        group.make(["left/*"])
        for n in range(6):
            client.stream(f"left/{n % 2}").append(n, auto_create=True)
        [one, _] = group.claim("w").leases
        group.release([one.token])

    metrics = wait_for(server_process, "left", 'targets lane="default",state="ready"', 1)
    assert metrics['targets lane="default",state="leased"'] == 1
    assert metrics['lag_events lane="default"'] == 6
    assert metrics['lag_seconds lane="default"'] >= 0
    assert metrics['oldest_position lane="default"'] >= 0
    assert metrics["parked_events"] == 0
    assert metrics["uncorrelated_positions"] == 0
    assert metrics['claims_total lane="default"'] == 2


def test_counts_are_kept_lane_by_lane(server_process: ServerProcess) -> None:
    with fencepost.connect(server_process.url) as client:
        group = client.group("lanes")
        group.make(["lanes"], targets="computed")
        client.create("lanes")
        for n in range(2):
            client.stream("lanes").append(n)
        rows = [row.position for row in client.log(streams=["lanes"])]
        targets = [
            {"target": lane, "source": "lanes", "position": at, "lane": lane}
            for lane, at in zip(("fast", "slow"), rows, strict=True)
        ]
        known = group.info().correlated
        group.correlate(after=known, until=rows[-1], targets=targets)
        [fast] = group.claim("w", lane="fast").leases
        [slow] = group.claim("w", lane="slow").leases
        group.ack(LeaseAck(token=fast.token, at=fast.read_to))
        failure = EventFailure(position=rows[1], error="boom", park=True)
        group.ack(LeaseAck(token=slow.token, failure=failure))

    metrics = wait_for(server_process, "lanes", "parked_events", 1)
    assert metrics['acks_total lane="fast"'] == 1
    assert metrics['parked_total lane="slow"'] == 1
    assert metrics['acks_total lane="slow"'] == 0
    assert metrics['lag_events lane="fast"'] == 0


def test_what_targets_were_told_of_is_shown_until_they_get_past_it(
    server_process: ServerProcess,
) -> None:
    with fencepost.connect(server_process.url) as client:
        group = client.group("told")
        group.make(["told"], targets="computed")
        client.create("told")
        for n in range(2):
            client.stream("told").append(n)
        rows = [row.position for row in client.log(streams=["told"])]
        told = {"target": "t", "source": "told", "note": "n"}
        targets = [{**told, "position": at} for at in rows]
        group.correlate(after=group.info().correlated, until=rows[-1], targets=targets)
        wait_for(server_process, "told", "told_events", 2)
        [lease] = group.claim("w", events_max=1).leases
        group.ack(LeaseAck(token=lease.token, at=lease.read_to))

    assert [(event.position, event.note) for event in lease.events] == [(rows[0], "n")]
    wait_for(server_process, "told", "told_events", 1)
