"""What a key costs: plain appends and appends with conditions in turns, on servers side by side.

`python -m benchmarks.keys`. The case `conditions` of `python -m benchmarks` runs each kind once,
one after the other, so that other work on the machine falls on one of them. Here every kind has its
own server on its own folder, all of them are running, and each round sends the same number of
appends to each in turn. What is compared is processor time of the server, user and system, all
threads; within a round, so that whatever slowed the machine down slowed both sides of the ratio.
All rounds are printed. The client's work is not in it; the bytes of the header, and parsing them,
are.
"""

import argparse
import contextlib
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.cases import BYTES
from benchmarks.conditions import SIZE, pipeline, post
from benchmarks.errors import BenchmarkError
from benchmarks.generator import WORK
from benchmarks.subjects import OURS, Running, running

Requests = Callable[[int, int], Iterator[bytes]]


def _plain(first: int, count: int) -> Iterator[bytes]:
    return (post(b"") for _ in range(first, first + count))


def _ignored(first: int, count: int) -> Iterator[bytes]:
    """A header that the server does not read, as long as a key: what the bytes alone cost."""
    return (post(b"Idempotency-Nay: key-%08d\r\n" % n) for n in range(first, first + count))


def _if_match(first: int, count: int) -> Iterator[bytes]:
    numbers = range(first, first + count)
    return (post(b'If-Match: "%016d_%016d"\r\n' % (n, n * SIZE)) for n in numbers)


def _keyed(first: int, count: int) -> Iterator[bytes]:
    return (post(b"Idempotency-Key: key-%08d\r\n" % n) for n in range(first, first + count))


def _random_keys(_first: int, count: int) -> Iterator[bytes]:
    draw = random.SystemRandom().getrandbits
    return (post(b"Idempotency-Key: %032x\r\n" % draw(128)) for _ in range(count))


KINDS: dict[str, Requests] = {
    "plain": _plain,
    "ignored header": _ignored,
    "If-Match": _if_match,
    "keys in order": _keyed,
    "random keys": _random_keys,
}


def cpu_seconds(pid: int) -> float:
    """Processor time of the process, of all its threads, to the nanosecond: rounds are short."""
    spent = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        spent += int((task / "schedstat").read_text().split()[0])
    return spent / 1e9


def main() -> int:
    """Run the rounds and print them."""
    options = _parse()
    WORK.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keys-", dir=WORK)))
        servers = {
            kind: stack.enter_context(running(OURS, folder / kind.replace(" ", "-")))
            for kind in options.kinds
        }
        for server in servers.values():
            _create(server)
        print(f"load {os.getloadavg()[0]:.2f}; us of processor time for each append", flush=True)
        print("round  " + "".join(f"{kind:>18}" for kind in servers), flush=True)
        # The first round is not counted: it fills caches, and finds out how fast the disk is.
        rounds = [_round(servers, n, options.appends) for n in range(options.rounds + 1)]
    for number, spent in enumerate(rounds):
        _print(str(number) if number else "warm", spent, rounds[number]["plain"])
    medians = {kind: statistics.median(r[kind] for r in rounds[1:]) for kind in servers}
    _print("median", medians, medians["plain"])
    for kind in servers:
        more = [100 * (r[kind] / r["plain"] - 1) for r in rounds[1:]]
        low, high = min(more), max(more)
        print(f"{kind}: {statistics.median(more):+.0f} % ({low:+.0f} to {high:+.0f})")
    print(f"load {os.getloadavg()[0]:.2f}")
    return 0


def _round(servers: dict[str, Running], number: int, appends: int) -> dict[str, float]:
    spent = {}
    for kind, server in servers.items():
        began = cpu_seconds(server.pid)
        answers = pipeline(server.port, KINDS[kind](number * appends, appends))
        spent[kind] = 1e6 * (cpu_seconds(server.pid) - began) / appends
        if answers != {204: appends}:
            raise BenchmarkError(f"{kind}: answers by status {answers}")
    return spent


def _create(server: Running) -> None:
    head = f"PUT /v1/stream/bench HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {BYTES}\r\n"
    answers = pipeline(server.port, iter([f"{head}Content-Length: 0\r\n\r\n".encode()]))
    if answers != {201: 1}:
        raise BenchmarkError(f"creating the stream was answered {answers}")


def _print(name: str, spent: dict[str, float], plain: float) -> None:
    cells = [f"{us:.1f} ({100 * (us / plain - 1):+.0f} %)" for us in spent.values()]
    print(f"{name:7}" + "".join(f"{cell:>18}" for cell in cells))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.keys", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--appends", type=int, default=10_000, help="of each kind in each round")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
