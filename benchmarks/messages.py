"""`python -m benchmarks.messages`: what it costs to hand appends to another process.

A front end of several processes before one writer would read requests, hand their fields to the
writer, and get outcomes back. This measures that way alone: two processes, a Unix socket, appends
of 100 bytes encoded as MessagePack, so many in each message. Processor time of either side for each
append is what `docs/internals/cores.md` calculates with.
"""

import argparse
import os
import socket
import struct
import sys
import time
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

PAYLOAD = b"x" * 100
_SIZE = struct.Struct("<I")


class Handed(msgspec.Struct, array_like=True, gc=False):
    """An append, as far as it is decided by its fields."""

    number: int
    path: str
    media_type: str
    producer: str
    epoch: int
    seq: int
    digest: bytes
    data: bytes


class Done(msgspec.Struct, array_like=True, gc=False):
    """The outcome of an append: what its answer says."""

    number: int
    messages: int
    bytes: int
    position: int
    epoch: int
    seq: int


class Cost(NamedTuple):
    """Microseconds of processor for an append, on either side."""

    front: float
    writer: float


def receive(connection: socket.socket, buffer: bytearray) -> bytes:
    """The next message; empty at the end."""
    while len(buffer) < _SIZE.size or len(buffer) < _SIZE.size + _SIZE.unpack_from(buffer)[0]:
        part = connection.recv(1 << 18)
        if not part:
            return b""
        buffer += part
    end = _SIZE.size + _SIZE.unpack_from(buffer)[0]
    message = bytes(buffer[_SIZE.size : end])
    del buffer[:end]
    return message


def send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_SIZE.pack(len(message)) + message)


def write(connection: socket.socket) -> None:
    """The writer's half: it decides nothing, and answers every append."""
    decoder, encoder = msgspec.msgpack.Decoder(list[Handed]), msgspec.msgpack.Encoder()
    buffer = bytearray()
    position = 0
    while message := receive(connection, buffer):
        outcomes = []
        for append in decoder.decode(message):
            position += 1
            size = len(append.data) * position
            outcomes.append(Done(append.number, position, size, position, append.epoch, append.seq))
        send(connection, encoder.encode(outcomes))
    send(connection, _SIZE.pack(int(time.process_time() * 1e6)))


def measure(group: int, appends: int) -> Cost:
    """Hand over so many appends, `group` of them in each message."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        try:
            write(theirs)
        finally:
            os._exit(0)
    theirs.close()
    decoder, encoder = msgspec.msgpack.Decoder(list[Done]), msgspec.msgpack.Encoder()
    buffer = bytearray()
    began = time.process_time()
    for first in range(0, appends, group):
        handed = [
            Handed(
                number,
                f"bench/{number % 64}",
                "application/octet-stream",
                "producer-1",
                0,
                number,
                PAYLOAD[:16],
                PAYLOAD,
            )
            for number in range(first, first + group)
        ]
        send(ours, encoder.encode(handed))
        assert len(decoder.decode(receive(ours, buffer))) == group
    spent = time.process_time() - began
    ours.shutdown(socket.SHUT_WR)
    writer_us = _SIZE.unpack(receive(ours, buffer))[0]
    os.waitpid(child, 0)
    return Cost(spent * 1e6 / appends, writer_us / appends)


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.messages",
        description="Measure what it costs to hand appends to another process.",
    )
    parser.add_argument("--appends", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 4, 16, 64])
    options = parser.parse_args()
    table = Table(title="us of processor for an append, lowest and median", title_justify="left")
    for title in ("in a message", "front end", "writer"):
        table.add_column(title, justify="right")
    for group in options.groups:
        costs = [
            measure(group, max(group, options.appends // 10 if group == 1 else options.appends))
            for _ in range(options.rounds)
        ]
        sides = (sorted(c.front for c in costs), sorted(c.writer for c in costs))
        cells = [f"{side[0]:.1f}, {side[len(side) // 2]:.1f}" for side in sides]
        table.add_row(str(group), *cells)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
