"""A batch of a producer: messages that travel in one request, and what became of them.

A batch encodes its messages as they are added, because its size decides when it is full. It keeps
its bytes until it is settled, so that it can be sent again as it was. When it is sent, and what an
answer means for it, is decided by the machine (`machine.py`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from fencepost.client.errors import UnencodableError
from fencepost.client.operations import (
    BYTES,
    BYTES_REFUSED,
    ENCODING_FAILURES,
    encode_bytes,
)
from fencepost.client.results import Receipt

_ENCODER = msgspec.json.Encoder()


class PendingBatch:
    """Messages that travel together, from the first `append` to their settlement."""

    __slots__ = (
        "_buffer",
        "_ends",
        "_json",
        "_originals",
        "begun",
        "closes",
        "count",
        "epoch",
        "error",
        "key",
        "maybe_stored",
        "receipt",
        "renewals",
        "seq",
        "transmissions",
        "weight",
    )

    def __init__(self, *, json: bool, now: float, known: bool = True) -> None:
        self._json = json
        # Texts and bytes as they were given, as long as the stream may turn out not to be JSON.
        self._originals: list[str | bytes] | None = None if known else []
        self._buffer = bytearray(b"[" if json else b"")
        self._ends: list[int] = []
        self.begun = now
        self.count = 0
        self.closes = False
        """Whether the stream is closed with this batch, which may be empty then."""
        self.weight = 0
        self.epoch: int | None = None
        self.seq: int | None = None
        self.key: str | None = None
        self.transmissions = 0
        self.renewals = 0
        self.receipt: Receipt | None = None
        self.error: Exception | None = None
        self.maybe_stored = False
        """After an error: whether the server may hold it all the same."""

    def add(self, data: Any) -> int:
        """Put a message in, and say by how many bytes the batch grew."""
        buffer = self._buffer
        before = len(buffer)
        if self._json:
            if self._originals is None and isinstance(data, BYTES):
                raise UnencodableError(BYTES_REFUSED)
            try:
                _ENCODER.encode_into(data, buffer, before)
            except BaseException as error:
                del buffer[before:]
                if isinstance(error, ENCODING_FAILURES):
                    raise UnencodableError(f"this cannot be stored as JSON: {error}") from error
                raise
            buffer += b","
            if self._originals is not None:
                self._keep(data)
        else:
            encoded = encode_bytes(data)
            if not encoded:
                raise UnencodableError("an empty message cannot be stored")
            buffer += encoded
            self._ends.append(len(buffer))
        self.count += 1
        grown = len(buffer) - before
        self.weight += grown
        return grown

    def _keep(self, data: Any) -> None:
        assert self._originals is not None
        if isinstance(data, str | bytes):
            self._originals.append(data)
        elif isinstance(data, bytearray | memoryview):
            self._originals.append(bytes(data))
        else:
            self._originals = None  # only a JSON stream can hold it

    @property
    def retypable(self) -> bool:
        """Whether the messages could be those of a stream that is not JSON."""
        return self._originals is not None

    @property
    def holds_bytes(self) -> bool:
        """Whether bytes are among them, which a stream of JSON must not get."""
        return any(isinstance(data, bytes) for data in self._originals or ())

    def retype(self) -> bool:
        """Encode the messages for a stream that is not JSON; false if they cannot be."""
        originals, self._originals = self._originals, None
        if not self._json or originals is None or not all(originals):
            return not self._json
        self._json = False
        self._buffer = bytearray()
        self.count = self.weight = 0
        for data in originals:
            self.add(data)
        return True

    @property
    def size(self) -> int:
        return len(self._buffer)

    @property
    def body(self) -> bytes:
        """The body of the request that carries the batch."""
        if not self._json or not self.count:
            return bytes(self._buffer) if self.count else b""
        return b"".join((memoryview(self._buffer)[:-1], b"]"))

    @property
    def messages(self) -> list[Any]:
        """The data as it was appended: JSON values as they will be read, or bytes."""
        if self._json:
            if not self.count:
                return []
            decoded: list[Any] = msgspec.json.decode(self.body)
            return decoded
        starts = [0, *self._ends]
        return [
            bytes(self._buffer[start:end]) for start, end in zip(starts, self._ends, strict=False)
        ]

    @property
    def settled(self) -> bool:
        """Whether it is known what became of it."""
        return self.receipt is not None or self.error is not None

    def result(self) -> Receipt:
        """The receipt of a settled batch; raises its error."""
        if self.error is not None:
            raise self.error
        assert self.receipt is not None, "the batch is not settled yet"
        return self.receipt
