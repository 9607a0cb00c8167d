"""Refusals about work and messages: groups, subscriptions, webhooks, meshes, sessions."""

from __future__ import annotations

from fencepost.client.errors.refusals import (
    ConflictError,
    NotFoundError,
    PreconditionFailedError,
    ResponseError,
    error_object,
)
from fencepost.client.errors.root import FencepostError


class GroupNotFoundError(ResponseError):
    """There is no such group. Make it with `client.group(name).make(...)`."""


class GroupExistsError(ConflictError):
    """A group of this name has other settings. Use it as it is, or delete it first."""


class LeaseLostError(PreconditionFailedError):
    """The lease is no longer current. Stop this work: another worker may have the target."""


class SubscriptionNotFoundError(NotFoundError):
    """There is no such subscription, or it is another principal's. Create it first."""


class SubscriptionExistsError(ConflictError):
    """A subscription of this name has another configuration. Delete it first, or use another id."""


class WakeFencedError(ConflictError):
    """The wake is over, and `generation` is the current one. Stop: another worker has the work."""

    @property
    def generation(self) -> int | None:
        return error_object(self.problem).get("generation")


class AlreadyClaimedError(ConflictError):
    """Another worker, `holder`, has the work of the subscription. Wait for the next wake."""

    @property
    def holder(self) -> str | None:
        return error_object(self.problem).get("current_holder")

    @property
    def generation(self) -> int | None:
        return error_object(self.problem).get("generation")


class NoPendingWorkError(ConflictError):
    """There is nothing to claim. Wait for the next wake."""


class WebhookSignatureError(FencepostError):
    """A webhook request was not signed by this server, or not recently. Answer it with 401."""


class WebhookReplayedError(WebhookSignatureError):
    """The very same webhook request came before. Answer it with 409 and do nothing."""


class MeshNotFoundError(ResponseError):
    """There is no such mesh. Make it with `client.mesh(name).make()`."""


class MeshExistsError(ConflictError):
    """A mesh of this name has other settings, or is being deleted."""


class DestinationNotFoundError(NotFoundError):
    """The mesh has no such topic, member or queue. The id of the send is still free."""


class FeatureRefusedError(ConflictError):
    """The mesh does not offer what is required; `kind`, `feature` and `close_code` say what."""

    @property
    def close_code(self) -> int | None:
        """The code with which a session would be closed."""
        found = self.problem.get("close_code")
        return found if isinstance(found, int) else None


class SessionClosedError(FencepostError):
    """The server ended the session for good; `kind` and `detail` say why.

    `close_code` is that of the WebSocket. What was sent without an outcome may be stored: the same
    send again, with its id, tells.
    """

    def __init__(self, *, close_code: int, kind: str, feature: str, detail: str) -> None:
        super().__init__(f"the session was closed with {close_code} {kind}: {detail}")
        self.close_code = close_code
        self.kind = kind
        self.feature = feature
        self.detail = detail


class SessionReplacedError(SessionClosedError):
    """A newer session has the inbox now (4003). Stop: it handles what comes."""


class MemberConnectedError(SessionClosedError):
    """Another session has the inbox and keeps it (4004). Wait until it ends, then connect."""


class FeatureUnavailableError(SessionClosedError):
    """The mesh does not have the `feature` that is required (4010)."""


class FeatureInvalidError(SessionClosedError):
    """The params of the `feature` are not understood, or of another version (4011)."""


class FeatureBelowFloorError(SessionClosedError):
    """The mesh offers less of the `feature` than is required (4012)."""
