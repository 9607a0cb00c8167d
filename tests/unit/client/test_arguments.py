"""Arguments that cannot be meant are refused where they are given, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import fencepost
from fencepost import AsyncClient, Client, Producing, Retries, Timeouts

NOWHERE = "http://127.0.0.1:9"

WRONG: dict[str, Callable[[Client | AsyncClient], Any]] = {
    "attempts_max": lambda _: Retries(attempts_max=0),
    "seconds_max": lambda _: Retries(seconds_max=-1),
    "delay_seconds_min": lambda _: Retries(delay_seconds_min=-1),
    "delay_seconds_max": lambda _: Retries(delay_seconds_min=2, delay_seconds_max=1),
    "timeouts": lambda _: Timeouts(connect=0),
    "id of a producer": lambda _: Producing("", 0, 0),
    "epoch of a producer": lambda _: Producing("p", -1, 0),
    "seq of a producer": lambda _: Producing("p", 0, 2**53),
    "id of a producer is a text": lambda _: Producing(7, 0, 0),  # type: ignore[arg-type]
    "path": lambda client: client.stream(""),
    "path of a stream is a text": lambda client: client.stream(7),  # type: ignore[arg-type]
    "producer_id is a text": lambda client: client.stream("s").producer(7),  # type: ignore[arg-type]
    "retries is a": lambda _: fencepost.connect(NOWHERE, retries=3),  # type: ignore[arg-type]
    "timeouts is a": lambda _: fencepost.connect(NOWHERE, timeouts=3),  # type: ignore[arg-type]
    "the client adds itself": lambda _: fencepost.connect(NOWHERE + "/v1/stream/"),
    "producer is not empty": lambda client: client.stream("s").producer(""),
    "epoch is": lambda client: client.stream("s").producer("p", epoch=-1),
    "seq is": lambda client: client.stream("s").producer("p", epoch=0, seq=-2),
    "seq goes": lambda client: client.stream("s").producer("p", seq=1),
    "linger": lambda client: client.stream("s").producer("p", linger=-1),
    "max_in_flight": lambda client: client.stream("s").producer("p", max_in_flight=0),
    "patience": lambda client: client.stream("s").follow(patience=-1),
    "timeout": lambda client: client.stream("s").follow(timeout=-1),
    "live": lambda client: client.stream("s").follow(live="often"),  # type: ignore[call-overload]
    "offset": lambda client: client.stream("s").read(offset=""),
    "after": lambda client: client.log(after=-2),
    "until": lambda client: client.log(after=5, until=4),
}


@pytest.mark.parametrize("rule", WRONG)
@pytest.mark.parametrize("connect", [fencepost.connect, fencepost.connect_async])
def test_it_is_refused_with_the_rule(
    rule: str, connect: Callable[[str], Client | AsyncClient]
) -> None:
    with pytest.raises(fencepost.InvalidArgumentError, match=rule) as refused:
        WRONG[rule](connect(NOWHERE))

    assert isinstance(refused.value, ValueError)


def test_a_small_greatest_delay_makes_the_first_delay_smaller_too() -> None:
    assert Retries(delay_seconds_max=0.01).delay_seconds_min == 0.01


APPENDS: dict[str, dict[str, Any]] = {
    "Idempotency-Key": {"key": ""},
    "if_match": {"if_match": ""},
    "stream_seq": {"stream_seq": ""},
    "producer_if": {"producer_if": (-1, 0)},
}


@pytest.mark.parametrize("rule", APPENDS)
async def test_an_append_is_refused_with_the_rule(rule: str) -> None:
    with (
        fencepost.connect(NOWHERE) as client,
        pytest.raises(fencepost.InvalidArgumentError, match=rule),
    ):
        client.stream("s").append(1, **APPENDS[rule])
    async with fencepost.connect_async(NOWHERE) as client_too:
        with pytest.raises(fencepost.InvalidArgumentError, match=rule):
            await client_too.stream("s").append(1, **APPENDS[rule])
        with pytest.raises(fencepost.InvalidArgumentError, match="ttl_seconds"):
            await client_too.create("s", ttl_seconds=-1)
