"""The root of all errors, and those that need no answer of a server.

They are about an argument, about the network, or about a producer that has stopped. What a server
answered with is in the modules beside this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self


class FencepostError(Exception):
    """The root: catch it to catch everything this package raises.

    An error about a request says which: `method` and `path`, and from the answer its `status`, its
    `code` and the `request_id` that the server or a proxy gave it, where there is one.
    """

    method: str | None = None
    path: str | None = None
    status: int | None = None
    code: str | None = None
    request_id: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are made again of their text alone, which the classes with facts do not take.
        return _again, (type(self), self.args), self.__dict__.copy()

    def locate(
        self, method: str, path: str, status: int | None, headers: Mapping[str, str]
    ) -> Self:
        """Note the request that this error is about, unless that is known already."""
        if self.method is None:
            self.method, self.path = method, path
            self.status = status if self.status is None else self.status
            self.request_id = headers.get("x-request-id") or headers.get("request-id")
            cause = getattr(self, "cause", None)
            if isinstance(cause, FencepostError):
                self.blame(cause.locate(method, path, status, headers))
        return self

    def blame(self, cause: Exception | None) -> None:
        """Be about the request that `cause` is about."""
        if isinstance(cause, FencepostError):
            self.method, self.path = cause.method, cause.path
            self.status, self.code, self.request_id = cause.status, cause.code, cause.request_id

    def __str__(self) -> str:
        said = super().__str__()
        if self.method is None:
            return said
        facts = [f"{self.method} {self.path}"]
        if self.status is not None and str(self.status) not in said:
            facts.append(f"status {self.status}")
        if self.request_id is not None:
            facts.append(f"request {self.request_id}")
        where = f"({', '.join(facts)})"
        return said if where in said else f"{said} {where}"


def _again(kind: type[FencepostError], args: tuple[object, ...]) -> FencepostError:
    """An error that comes from another process; its facts are set behind this."""
    return kind.__new__(kind, *args)


class InvalidArgumentError(FencepostError, ValueError):
    """An argument has a value that it cannot have; nothing was sent. Change the call."""


def require(holds: bool, rule: str) -> None:
    """Raise `InvalidArgumentError` with the rule that an argument breaks."""
    if not holds:
        raise InvalidArgumentError(rule)


class UnencodableError(FencepostError, TypeError):
    """A message cannot be stored as what the stream holds; nothing was sent. Change the message."""


class ClientClosedError(FencepostError):
    """The client was closed. Connect again."""


class ProtocolError(FencepostError):
    """The other side does not speak HTTP or this protocol. Check the URL."""


class UnreadableError(FencepostError):
    """A message is not what it was read as. Read the stream as bytes, or as another type."""


class ConnectionFailedError(FencepostError):
    """The server could not be reached, or the connection broke. Retry when it is back.

    `sent` is false when no byte of the request has left: then nothing has happened.
    """

    def __init__(self, message: str, *, sent: bool = False, final: bool = False) -> None:
        super().__init__(message)
        self.sent = sent
        self.final = final
        """Whether the program gave the request up (`close`, `on_error`): no retry is wanted."""


class RequestTimeoutError(ConnectionFailedError):
    """The server did not answer in time. Retry, or allow more time."""


class OutcomeUnknownError(FencepostError):
    """A write was sent and its answer lost: it may or may not be stored. Read to find out.

    Raised only when retries were turned off or ran out; `cause` is the last failure.
    """

    def __init__(self, message: str, *, cause: Exception | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        self.blame(cause)


class ProducerError(FencepostError):
    """Something about a producer rather than about one request."""


class ProducerClosedError(ProducerError):
    """The producer was closed. Open another one."""


class ProducerFailedError(ProducerError):
    """The producer has stopped; `cause` says why, and every unstored message was reported.

    It stores nothing behind a message it could not store. Open another producer to go on.
    """

    def __init__(self, message: str, *, cause: Exception) -> None:
        super().__init__(message)
        self.cause = cause
        self.blame(cause)


class DeliveryTimeoutError(ProducerError, TimeoutError):
    """Not everything was acknowledged in time. It is still being sent: flush again, or close."""


class SequenceUsedError(ProducerError):
    """The server has another request under `seq` of `epoch`: nothing of this batch was stored.

    A predecessor or a second producer used the number. Open a producer without `epoch` and `seq`:
    it begins an epoch of its own.
    """

    def __init__(self, *, epoch: int, seq: int, last_seq: int | None) -> None:
        last = "" if last_seq is None else f"; the last one it has is {last_seq}"
        super().__init__(f"the server holds another request as epoch {epoch}, seq {seq}{last}")
        self.epoch = epoch
        self.seq = seq
        self.last_seq = last_seq


class EpochContestedError(ProducerError):
    """Producers with the same id opened one epoch after the other. Give each an id of its own."""
