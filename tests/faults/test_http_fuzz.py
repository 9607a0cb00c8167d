"""Bytes that no client should send: valid requests, mutated, against a listening front end.

Whatever arrives, the server answers well or closes; it never hangs, never leaks an exception into
the loop, and serves the next client as if nothing had been. A failing case prints its seed and the
command that replays it; FENCEPOST_FUZZ_SEED and FENCEPOST_FUZZ_CASES choose another, longer run.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import Callable
from typing import Any

import uvloop

from fencepost.http.listener import Listening, serve
from fencepost.http.messages import Answer, Cancellable, Request, Response, StreamingResponse
from fencepost.http.settings import HttpSettings
from tests.unit.http.reading import both_ways, is_alike, new_front

SEED = int(os.environ.get("FENCEPOST_FUZZ_SEED", "1"))
CASES = int(os.environ.get("FENCEPOST_FUZZ_CASES", "1500"))

LIMITS = HttpSettings(
    sweep_seconds=0.01,
    target_bytes_max=300,
    header_bytes_max=600,
    header_count_max=20,
    body_bytes_max=2000,
    pipeline_depth_max=4,
    header_timeout_seconds=0.2,
    body_grace_seconds=0.2,
    idle_timeout_seconds=0.2,
    linger_seconds=0.1,
)

GOOD = b"GET /good HTTP/1.1\r\nHost: fuzz\r\n\r\n"
VALID = [
    GOOD,
    b"POST /v1/stream/a?x=%20 HTTP/1.1\r\nHost: fuzz\r\nContent-Type: text/plain\r\n"
    b"Producer-Id: p\r\nProducer-Epoch: 0\r\nProducer-Seq: 1\r\n"
    b"Content-Length: 11\r\n\r\nhello world",
    b"POST /c HTTP/1.1\r\nHost: fuzz\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5;a=b\r\nhello\r\n6\r\n world\r\n0\r\nT: t\r\n\r\n",
    b"POST /e HTTP/1.1\r\nHost: fuzz\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc",
    b"GET /stream HTTP/1.1\r\nHost: fuzz\r\n\r\n",
    b'HEAD / HTTP/1.1\r\nHost: fuzz\r\nIf-None-Match: "x"\r\n\r\n',
    b"GET http://fuzz:1/a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: [::1]:80\r\nConnection: close\r\n\r\n",
    b"POST /v1/stream/a?x=%20 HTTP/1.1\r\nHost: fuzz\r\nContent-Type: text/plain\r\n"
    b"Producer-Id: p\r\nProducer-Epoch: 0\r\nProducer-Seq: 2\r\n"
    b"Content-Length: 3\r\n\r\nabc",
    b"POST /later HTTP/1.1\r\nHost: fuzz\r\nContent-Length: 1\r\n\r\nx",
    b"GET / HTTP/1.1\r\nHost: fuzz\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
]
FRAGMENTS = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\x00",
    b": ",
    b" ",
    b"\t",
    b"Content-Length: 5\r\n",
    b"Content-Length: 99999999999\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Host: x\r\n",
    b"Expect: 100-continue\r\n",
    b"0\r\n\r\n",
    b"ffffffff\r\n",
    b"HTTP/1.1",
    b"%00",
    b"\xff\xfe",
    b"A" * 700,
    b"X: y\r\n" * 25,
]


class FuzzedApp:
    """Answers at once, later, or with a stream, so that every way out is under fire."""

    def handle(self, request: Request, answer: Callable[[Answer], None]) -> Cancellable | None:
        if request.path == b"/stream":
            answer(StreamingResponse(200, [], _three_chunks()))
        elif request.path == b"/later":
            asyncio.get_running_loop().call_soon(answer, Response(204, []))
        else:
            answer(Response(200, [(b"X-Bytes", b"%d" % len(request.body))], b"ok"))
        return None


async def _three_chunks() -> Any:
    for number in range(3):
        yield b"chunk %d" % number


def mutated(dice: random.Random) -> bytes:
    """A few valid requests in a row with a few bytes changed, cut, doubled, moved or put in."""
    data = bytearray(b"".join(dice.choices(VALID, k=dice.randint(1, 3))))
    for _ in range(dice.randint(0, 4)):
        at = dice.randrange(len(data) + 1)
        end = min(len(data), at + dice.randint(1, 12))
        match dice.randrange(6):
            case 0:
                data[at : at + 1] = bytes([dice.randrange(256)])
            case 1:
                del data[at:end]
            case 2:
                data[at:at] = data[at:end] * dice.randint(1, 3)
            case 3:
                data[at:at] = dice.choice(FRAGMENTS)
            case 4:
                piece = data[at:end]
                del data[at:end]
                to = dice.randrange(len(data) + 1)
                data[to:to] = piece
            case _:
                del data[at:]
        if not data:
            data += b"G"
    return bytes(data)


async def exchange(port: int, segments: list[bytes], *, half_close: bool) -> bytes:
    """Send the segments and read to the end; the end must come by itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        async with asyncio.timeout(10):
            for segment in segments:
                writer.write(segment)
                await writer.drain()
            if half_close:
                writer.write_eof()
            while part := await reader.read(65536):
                received += part
    except ConnectionError:
        pass  # the server may cut a client that goes on after a refusal
    finally:
        writer.close()
    return received


HEAD = re.compile(rb"HTTP/1\.1 [1-5][0-9][0-9] [A-Za-z' -]*\r\n(?:[A-Za-z-]+: [^\r\n]*\r\n)*\r\n")


def check_answers(data: bytes, *, half_closed: bool) -> None:
    """Answers one after the other, each with a head and the body it announced, and nothing else.

    A client that has closed its sending side counts as gone for a stream, which may then be cut.
    """
    while data:
        head = HEAD.match(data)
        assert head is not None, data[:200]
        text, data = head.group().lower(), data[head.end() :]
        length = re.search(rb"\r\ncontent-length: ([0-9]+)\r\n", text)
        if b"\r\ntransfer-encoding: chunked\r\n" in text:
            body, ending, data = data.partition(b"0\r\n\r\n")
            assert ending or half_closed, body
        elif length is not None:
            assert len(data) >= int(length[1]), data
            data = data[int(length[1]) :]
        elif b"\r\nconnection: close\r\n" in text:
            return  # a body up to the close


async def attack(listening: Listening, case: int) -> None:
    dice = random.Random(f"{SEED}:{case}")
    data = mutated(dice)
    cuts = sorted(dice.randrange(len(data) + 1) for _ in range(dice.randint(0, 3)))
    segments = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    half_close = dice.random() < 0.5
    try:
        answers = await exchange(listening.port, segments, half_close=half_close)
        check_answers(answers, half_closed=half_close)
        if case % 25 == 0:
            good = GOOD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            answer = await exchange(listening.port, [good], half_close=False)
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert answer.endswith(b"\r\n\r\nok")
    except (AssertionError, TimeoutError) as error:
        command = (
            f"FENCEPOST_FUZZ_SEED={SEED} FENCEPOST_FUZZ_CASES={case + 1} "
            f"./test tests/faults/test_http_fuzz.py"
        )
        raise AssertionError(f"case {case}: {segments!r}\nreplay: {command}") from error


async def fuzz() -> list[dict[str, Any]]:
    """Run every case, a few at a time, and return what reached the loop's exception handler."""
    leaked: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: leaked.append(context))
    listening = await serve(FuzzedApp(), LIMITS)
    try:
        for first in range(0, CASES, 50):
            async with asyncio.TaskGroup() as group:
                for case in range(first, min(first + 50, CASES)):
                    group.create_task(attack(listening, case))
    finally:
        await listening.drain(timeout_seconds=1)
    assert listening.counters.connections_open == 0
    assert listening.counters.streams_open == 0
    assert "internal_error" not in listening.counters.refusals
    return leaked


def test_what_repeats_a_head_is_read_as_the_parser_reads_it() -> None:
    """The same bytes behind requests that repeat a head, and between them; no socket is needed."""
    front = new_front(LIMITS)
    for case in range(CASES):
        dice = random.Random(f"{SEED}:heads:{case}")
        appends = [VALID[1].replace(b"Seq: 1", b"Seq: %d" % seq) for seq in range(6)]
        data = mutated(dice).join([b"".join(appends[2:4]), b"".join(appends[4:])])
        cuts = sorted(dice.randrange(len(data) + 1) for _ in range(dice.randint(0, 3)))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]

        short, general = both_ways(front, [*appends[:2], *pieces])

        assert is_alike(short, general), f"seed {SEED}, case {case}: {pieces!r}"
    assert front.counters.heads_repeated > CASES


def test_no_bytes_make_the_front_end_hang_leak_or_answer_badly() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        leaked = runner.run(fuzz())

    assert leaked == []
