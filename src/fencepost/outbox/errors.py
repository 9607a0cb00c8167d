"""What can go wrong with an outbox, as errors that say what to do next."""

from __future__ import annotations

from fencepost.client.errors import FencepostError


class OutboxError(FencepostError):
    """The outbox cannot do this; nothing was changed."""


class IdUsedError(OutboxError):
    """The id stands for another send, or for one that has failed. Use another id, or requeue it.

    `conflict` is `outbox_<status>_fingerprint_<match|mismatch>`; `reason` is why a dead row died.
    """

    def __init__(
        self, client_message_id: str, conflict: str, fingerprint_prefix: str, reason: str | None
    ) -> None:
        why = f": {reason}" if reason else ""
        super().__init__(f"the id {client_message_id!r} is used ({conflict}){why}")
        self.client_message_id = client_message_id
        self.conflict = conflict
        self.fingerprint_prefix = fingerprint_prefix
        self.reason = reason


class NoTransactionError(OutboxError):
    """The connection commits by itself, so the send would not be part of your change.

    Begin a transaction first.
    """


class UnknownConnectionError(OutboxError):
    """The outbox does not know connections of this kind. Pass one that its reference names."""


class OutboxDatabaseError(OutboxError):
    """The database has no outbox of this version. `fencepost outbox schema` prints its table."""
