"""Servers that freeze while others write, and go on as if nothing had happened.

Each of three servers on one PostgreSQL writes alone for a while, so that it decides before it has
the lock. Then it is stopped, a request is sent to it, the others write to the same stream, and it
goes on with what it knew before. FENCEPOST_FAULT_KILLS (`just faults`) makes it the long run.
"""

from __future__ import annotations

import json
import os
import random
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.postgres.nodes import Node, nodes

FREEZES = int(os.environ.get("FENCEPOST_FAULT_KILLS", "9"))
SEED = int(os.environ.get("FENCEPOST_FAULT_SEED", "0"))
TURNS_ALONE_MAX = 2_000

pytestmark = pytest.mark.timeout(120 + 10 * FREEZES)


class Producer:
    """Numbers its messages, whichever server it sends them to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sent: list[str] = []

    def send(self, node: Node, client: httpx.Client) -> int:
        label = f"{self.name}/{len(self.sent)}"
        headers = {
            "Producer-Id": self.name,
            "Producer-Epoch": "0",
            "Producer-Seq": str(len(self.sent)),
        }
        answer = client.post(f"{node.url}/v1/stream/s", json=[label], headers=headers, timeout=60)
        assert answer.status_code in (200, 204), answer.text
        self.sent.append(label)
        return answer.status_code


def counted(node: Node, client: httpx.Client, name: str) -> int:
    text = client.get(f"{node.url}/metrics").text
    found = re.search(rf"^fencepost_store_{name}_turns_total (\d+)", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1])


def test_a_server_that_freezes_is_overtaken_and_doubles_nothing(postgres_dsn: str) -> None:
    dice = random.Random(SEED)
    producers = [Producer(f"p{number}") for number in range(3)]
    hint = f"again: FENCEPOST_FAULT_KILLS={FREEZES} FENCEPOST_FAULT_SEED={SEED}"
    with (
        nodes(postgres_dsn, 3) as servers,
        httpx.Client() as client,
        ThreadPoolExecutor(1) as pool,
    ):
        client.put(f"{servers[0].url}/v1/stream/s", headers={"Content-Type": "application/json"})
        freezes = 0
        # A server may hear of the others before it looks at the request that waits.
        while freezes < FREEZES or not any(counted(s, client, "overtaken") for s in servers):
            freezes += 1
            assert freezes <= 5 * FREEZES, f"no decision came too early; {hint}"
            node = dice.choice(servers)
            others = [server for server in servers if server is not node]
            before, turns = counted(node, client, "quick"), 0
            while counted(node, client, "quick") == before:
                dice.choice(producers).send(node, client)
                turns += 1
                assert turns < TURNS_ALONE_MAX, f"it never wrote alone; {hint}"
            frozen = dice.choice(producers)
            node.freeze()
            answer = pool.submit(frozen.send, node, client)
            for _ in range(dice.choice((1, 2, 5))):
                other = dice.choice([one for one in producers if one is not frozen])
                other.send(dice.choice(others), client)
            node.thaw()
            answer.result(60)

        shown = [client.get(f"{server.url}/v1/stream/s").json() for server in servers]
    assert shown[0] == shown[1] == shown[2], hint
    for producer in producers:
        mine = [label for label in shown[0] if label.startswith(f"{producer.name}/")]
        assert mine == producer.sent, f"{json.dumps(mine)}; {hint}"
