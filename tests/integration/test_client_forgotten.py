"""Producers that a program forgets to close, and failures that it does not look at."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import fencepost
from tests.serving import ServerProcess
from tests.twins import Connect
from tests.twins import connect as connect

MESSAGES = 5_000
FORGETFUL = """
import sys, fencepost
client = fencepost.connect(sys.argv[1])
stream = client.stream(sys.argv[2])
producer = stream.producer("p")
for number in range(int(sys.argv[3])):
    producer.append(number)
"""
FORGETFUL_ASYNC = """
import asyncio, sys, fencepost
async def main():
    client = fencepost.connect_async(sys.argv[1])
    stream = client.stream(sys.argv[2])
    producer = stream.producer("p", linger=60.0)
    for number in range(int(sys.argv[3])):
        await producer.append(number)
    return producer
kept = asyncio.run(main())
"""


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "default", "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_program_that_forgets_to_flush_stores_everything_and_is_told(
    server_process: ServerProcess, path: str
) -> None:
    with fencepost.connect(server_process.url) as client:
        stream = client.create(path)

        done = run(FORGETFUL, server_process.url, path, MESSAGES)

        assert stream.read().messages() == list(range(MESSAGES))
    assert "flush or close the producer" in done.stderr


def test_what_cannot_be_stored_any_more_is_reported(server_process: ServerProcess) -> None:
    lingering = FORGETFUL.replace('producer("p")', 'producer("p", linger=60.0)')

    done = run(lingering, server_process.url, "no-such-stream", 3)

    assert "3 of 3 messages of the producer p on no-such-stream may be lost" in done.stderr


def test_an_async_program_that_forgets_to_flush_is_told_what_is_lost(
    server_process: ServerProcess, path: str
) -> None:
    with fencepost.connect(server_process.url) as client:
        client.create(path)

    done = run(FORGETFUL_ASYNC, server_process.url, path, 3)

    assert f"3 of 3 messages of the producer p on {path} may be lost" in done.stderr


def test_a_producer_that_is_dropped_warns_with_the_count(
    server_process: ServerProcess, path: str
) -> None:
    with fencepost.connect(server_process.url) as client:
        producer = client.create(path).producer("p", linger=60.0)
        for number in range(7):
            producer.append(number)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del producer
            gc.collect()

    told = [str(one.message) for one in caught if one.category is ResourceWarning]
    assert told == [f"the producer p on {path} was dropped with 7 messages: flush or close it"]


async def test_a_failure_is_raised_until_it_is_acknowledged(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        stream = await client.create(path, closed=True)
        producer = stream.producer("p")
        await producer.append(1)
        for _ in range(3):
            with pytest.raises(fencepost.ProducerFailedError):
                await producer.flush()
            with pytest.raises(fencepost.ProducerFailedError):
                await producer.append(2)

        if isinstance(producer, fencepost.AsyncIdempotentProducer):
            failure = producer.acknowledge()
        else:
            failure = await producer.acknowledge()

        assert isinstance(failure, fencepost.ProducerFailedError)
        await producer.flush()
        await producer.close()


def test_a_closed_producer_is_not_forgotten(server_process: ServerProcess, path: str) -> None:
    with fencepost.connect(server_process.url) as client:
        client.create(path)

    done = run(FORGETFUL + "producer.close()", server_process.url, path, 10)

    assert (done.returncode, done.stderr) == (0, "")


def test_a_child_process_leaves_the_messages_to_its_parent(
    server_process: ServerProcess, path: str, tmp_path: Path
) -> None:
    program = FORGETFUL + (
        "import os\n"
        "child = os.fork()\n"
        "if child: os.waitpid(child, 0); producer.close()\n"
        "else: sys.exit(0)\n"
    )
    with fencepost.connect(server_process.url) as client:
        stream = client.create(path)

        done = run(program, server_process.url, path, MESSAGES)

        assert stream.read().messages() == list(range(MESSAGES))
    assert done.stderr == ""
