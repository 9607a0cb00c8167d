"""More clients of the kill test: commits over several streams, and a subscription's worker."""

import json
from typing import Any

from tests.faults.killing import JSON, Load, read_all
from tests.faults.wire import HttpRequest, Reply, asked, get, put

PAIR = ("pair/left", "pair/right")
WAKES = "wake/pool"
SUBSCRIPTION = "__ds/subscriptions/workers"
LEASE_MS = 1_000


async def create_coordinated(load: Load) -> None:
    for path in (*PAIR, WAKES):
        assert (await asked(load.port, put(path, JSON))).status == 201
    reply = await asked(load.port, HttpRequest("PUT", SUBSCRIPTION, *_json(_config())))
    assert reply.status == 201, reply


def _config() -> dict[str, object]:
    return {
        "type": "pull-wake",
        "pattern": "json/*",
        "wake_stream": WAKES,
        "lease_ttl_ms": LEASE_MS,
    }


def _json(body: object, **headers: str) -> tuple[dict[str, str], bytes]:
    return {"Content-Type": JSON, **headers}, json.dumps(body).encode()


class Committer:
    """Appends the same label to two streams in one commit, as one producer on each."""

    def __init__(self, number: int, load: Load) -> None:
        self.name = f"committer-{number}"
        self._load = load
        self.committed_count = 0

    async def run(self) -> None:
        while not self._load.done.is_set():
            reply, _ = await self._load.ask(self._request(self.committed_count))
            assert reply.status == 200, reply
            self.committed_count += 1

    def _request(self, seq: int) -> HttpRequest:
        appends = [
            {
                "stream": path,
                "content_type": JSON,
                "data": [f"{self.name}/{seq}/0/1"],
                "producer": {"id": self.name, "epoch": 0, "seq": seq},
            }
            for path in PAIR
        ]
        headers, body = _json({"appends": appends})
        return HttpRequest("POST", "commit", headers, body, root="/v1/")


async def check_commits(port: int, committers: list[Committer]) -> None:
    """Both streams have every commit once, in the same order."""
    left, right = [
        [label for chunk in (await read_all(port, path))[0] for label in json.loads(chunk)]
        for path in PAIR
    ]
    assert left == right, "a commit is on one stream and not on the other"
    for committer in committers:
        mine = [label for label in left if label.startswith(committer.name)]
        assert mine == [f"{committer.name}/{n}/0/1" for n in range(committer.committed_count)]
    assert len(left) == sum(committer.committed_count for committer in committers)


class PullWorker:
    """Claims the subscription when it is woken and acks everything that it is shown."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._generation = 0
        self.acked: dict[str, str] = {}
        self.acks_count = 0

    async def run(self) -> None:
        offset = "-1"
        while not self._load.done.is_set():
            await self._work()
            # The next wake, or the end of a lease that went down with its answer.
            woken, _ = await self._load.ask(get(WAKES, f"offset={offset}&live=long-poll"))
            offset = woken.headers["stream-next-offset"]

    async def _work(self) -> None:
        claim = HttpRequest("POST", f"{SUBSCRIPTION}/claim", *_json({"worker": "w"}))
        reply, _ = await self._load.ask(claim)
        if reply.status == 409:
            return
        assert reply.status == 200, reply
        wake: dict[str, Any] = json.loads(reply.body)
        assert wake["generation"] > self._generation, "a generation came twice"
        self._generation = wake["generation"]
        tails = {stream["path"]: stream["tail_offset"] for stream in wake["streams"]}
        for path, tail in tails.items():
            assert tail > self.acked.get(path, ""), "what was acked was handed out again"
        acked, retried = await self._load.ask(self._ack(wake, tails))
        if acked.status == 200:
            self.acked |= tails
            self.acks_count += 1
        else:
            # Fenced: the first attempt was stored and ended the wake, or its lease ran out.
            assert acked.status == 409, (acked, retried)

    @staticmethod
    def _ack(wake: dict[str, Any], tails: dict[str, str]) -> HttpRequest:
        body = {
            "wake_id": wake["wake_id"],
            "generation": wake["generation"],
            "acks": [{"stream": path, "offset": offset} for path, offset in tails.items()],
            "done": True,
        }
        token = {"Authorization": f"Bearer {wake['token']}"}
        return HttpRequest("POST", f"{SUBSCRIPTION}/ack", *_json(body, **token))

    async def check(self) -> None:
        """The subscription is as it was made, and no cursor went back."""
        reply: Reply = await asked(self._load.port, HttpRequest("GET", SUBSCRIPTION))
        found = json.loads(reply.body)
        assert {name: found[name] for name in _config()} == _config()
        assert found["generation"] >= self._generation
        cursors = {link["path"]: link["acked_offset"] for link in found["streams"]}
        assert set(cursors) == {"json/shared", "json/other"}
        for path, offset in self.acked.items():
            assert cursors[path] >= offset, f"the cursor on {path} went back"
        assert self.acks_count, "the worker never got to ack anything"
