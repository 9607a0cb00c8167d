"""Sweeps over a real server: stale claims are given back, policies drop what they do not keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import fencepost
from fencepost.coordination import ClaimLostError, TaskClaims
from fencepost.pipeline.errors import OptionError
from fencepost.pipeline.sweeps import now_ms, policy, reclaim, retention
from tests.serving import ServerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def _let_a_second_pass(client: fencepost.Client) -> None:
    """Return once the server says a later second than that of now: ages are counted in whole ones.
    What it says may be behind, so now is what it stores."""
    begun = _stored_ms(client)
    while now_ms(client) <= begun:
        pass


def _let_time_pass(client: fencepost.Client) -> None:
    """Return once the server's clock has moved on: what is stored at one time goes together."""
    begun = _stored_ms(client)
    while _stored_ms(client) == begun:
        pass


def _stored_ms(client: fencepost.Client) -> int:
    """When a message is stored that is sent now."""
    at = client.stream("clock").append("tick", auto_create=True).position
    assert at is not None
    (entry,) = client.log(after=at - 1, until=at)
    return entry.timestamp_ms


def test_stale_claims_of_many_streams_are_given_back_once(
    spark: SparkSession, server: ServerProcess
) -> None:
    options = {"url": server.url}
    with fencepost.connect(server.url) as client:
        streams = [client.create(f"reclaimed/{number}") for number in range(3)]
        held = [TaskClaims(one, "worker").claim("open") for one in streams]
        for one in streams:
            claims = TaskClaims(one, "worker")
            done = claims.claim("done")
            assert done
            claims.complete(done)

        fresh = reclaim(spark, match="reclaimed/*", timeout=3600, options=options)
        seen = reclaim(spark, match="reclaimed/*", timeout=0, dry_run=True, options=options)
        taken = reclaim(spark, match="reclaimed/*", timeout=0, options=options)
        again = reclaim(spark, match="reclaimed/*", timeout=0, options=options)

        assert fresh == []
        assert [(one.stream, one.task, one.outcome) for one in seen] == [
            (f"reclaimed/{number}", "open", "stale") for number in range(3)
        ]
        assert {(one.outcome, one.owner, one.epoch) for one in taken} == {
            ("reclaimed", "worker", 0)
        }
        assert again == []
        state = TaskClaims(streams[0], "other").get("open")
        assert state is not None
        assert (state.status, state.epoch, state.previous_owner) == ("available", 1, "worker")
        assert held[0]
        with pytest.raises(ClaimLostError):
            TaskClaims(streams[0], "worker").heartbeat(held[0])


def test_a_policy_says_what_it_would_drop_then_drops_it_and_then_has_nothing_to_do(
    spark: SparkSession, server: ServerProcess
) -> None:
    options = {"url": server.url}
    with fencepost.connect(server.url) as client:
        for name in ("many", "few"):
            stream = client.create(f"kept/{name}")
            for number in range(6 if name == "many" else 2):
                stream.append({"n": number})
                _let_time_pass(client)
        client.create("kept/empty")
        client.create("other/many", messages=[1, 2, 3, 4])
        policies = [policy("kept/*", max_messages=3), policy("other/*", max_bytes=1_000_000)]

        wanted = retention(spark, policies, dry_run=True, options=options)
        before = client.stream("kept/many").head()
        done = retention(spark, policies, options=options)
        left = list(client.stream("kept/many").read())
        again = retention(spark, policies, options=options)

    (one,) = wanted
    assert (one.stream, one.messages, one.outcome) == ("kept/many", 3, "would drop")
    assert before.first_offset in (None, "0000000000000000_0000000000000000")
    assert [(each.stream, each.before, each.outcome) for each in done] == [
        ("kept/many", one.before, "dropped")
    ]
    assert left == [{"n": 3}, {"n": 4}, {"n": 5}]
    assert again == []


def test_age_empties_a_stream_and_bounds_keep_its_newest_append_whole(
    spark: SparkSession, server: ServerProcess
) -> None:
    options = {"url": server.url}
    with fencepost.connect(server.url) as client:
        client.create("aged/old", messages=[1, 2])
        batch = client.create("aged/batch", messages=[1])
        _let_time_pass(client)
        batch.append_many([2, 3, 4])
        _let_a_second_pass(client)

        bounded = retention(spark, [policy("aged/batch", max_messages=1)], options=options)
        kept = list(batch.read())
        aged = retention(spark, [policy("aged/old", max_age_s=0)], options=options)

        assert [(one.stream, one.messages) for one in bounded] == [("aged/batch", 1)]
        assert kept == [2, 3, 4]
        assert [(one.stream, one.messages) for one in aged] == [("aged/old", 2)]
        assert list(client.stream("aged/old").read()) == []


def test_a_policy_without_bounds_or_pattern_is_refused() -> None:
    with pytest.raises(OptionError, match="bounds nothing"):
        policy("logs/**")
    with pytest.raises(OptionError, match="is no pattern"):
        policy("//", max_bytes=1)
