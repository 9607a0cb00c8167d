"""The rules of a session with a mesh, without I/O: how it begins, ends, and goes on.

A session is resumed after every loss of its connection but those that its codes call final. What
was sent and not answered is then sent again: the server knows a send by its id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from fencepost.client.errors import (
    ConnectionFailedError,
    FeatureBelowFloorError,
    FeatureInvalidError,
    FeatureUnavailableError,
    FencepostError,
    InvalidArgumentError,
    MemberConnectedError,
    ProtocolError,
    ResponseError,
    SessionClosedError,
    SessionReplacedError,
)
from fencepost.client.errors.answers import error_of
from fencepost.client.groups import GroupEvent
from fencepost.client.http import Response
from fencepost.client.meshes import SendOutcome
from fencepost.client.retry import REPEATED
from fencepost.client.settings import JSON
from fencepost.protocol import features
from fencepost.protocol.features import BadWishes, FeatureRefused, Wishes
from fencepost.protocol.sessions import (
    DEFAULT_LIMITS,
    Close,
    Hello,
    Refused,
    ServerFrame,
    SessionLimits,
    Welcome,
    parse_server_frame,
    send_frame,
)

_SERVER_FRAMES = SessionLimits(frame_bytes_max=64 << 20)
_PASSING_KINDS = frozenset(("pong_missing", "hello_missing", "unauthorized", "too_many_sessions"))
"""Reasons of the code 1008 behind which connecting again may help."""
_FINAL_CODES = frozenset((1002, 1003, 1007, 1008, 1009, *range(4000, 5000)))
_BY_CODE: dict[int, type[SessionClosedError]] = {
    4003: SessionReplacedError,
    4004: MemberConnectedError,
    4010: FeatureUnavailableError,
    4011: FeatureInvalidError,
    4012: FeatureBelowFloorError,
}


class Ended(NamedTuple):
    """How the server ended a session: its code, and what it said."""

    code: int
    kind: str
    feature: str = ""
    detail: str = ""

    def error(self) -> SessionClosedError:
        """The error that stands for it."""
        kind = _BY_CODE.get(self.code, SessionClosedError)
        return kind(close_code=self.code, kind=self.kind, feature=self.feature, detail=self.detail)

    @property
    def is_final(self) -> bool:
        """Whether connecting again would end the same way."""
        return self.code in _FINAL_CODES and self.kind not in _PASSING_KINDS


def ended(code: int, reason: str, said: Refused | None) -> Ended:
    """Why a session ended: from the close of its connection, or the frame before it if one came."""
    if said is None:
        return Ended(code, reason)
    return Ended(code, said.kind, said.feature, said.detail)


def read_frame(message: bytes) -> ServerFrame:
    """What the server says."""
    frame = parse_server_frame(message, _SERVER_FRAMES)
    if isinstance(frame, Close):
        raise Ended(frame.code, frame.kind, "", frame.detail).error()
    return frame


def check_welcome(welcome: Welcome, wishes: Wishes) -> dict[str, Any]:
    """What the server supports; a server that says yes and does not mean it is refused here."""
    supported = features.read_supported(welcome.body)
    if isinstance(supported, BadWishes):
        raise Ended(4011, "feature_param_invalid", "", supported.detail).error()
    refused = features.negotiate(wishes, supported)
    if isinstance(refused, FeatureRefused):
        raise Ended(refused.close_code, refused.kind, refused.feature, refused.detail).error()
    return {name: dict(params) for name, params in supported.items()}


def hello_of(
    member: str | None,
    worker: str,
    require: Mapping[str, Any] | None,
    optional: Mapping[str, Any] | None,
    after: int | None,
) -> Hello:
    """The first frame of a session."""
    return Hello(Wishes(dict(require or {}), dict(optional or {})), member, worker, after)


def rendered(number: int, send: bytes) -> bytes:
    """The frame of a send; one that the server would not take is refused here."""
    frame = send_frame(number, send)
    if len(frame) > DEFAULT_LIMITS.frame_bytes_max:
        raise InvalidArgumentError(
            f"a frame of a session has at most {DEFAULT_LIMITS.frame_bytes_max} bytes, and this"
            f" send has {len(frame)}: send it with `mesh.send`"
        )
    return frame


def entries_of(entries: Any) -> list[GroupEvent]:
    """The entries of a delivery."""
    return [msgspec.json.decode(entry, type=GroupEvent) for entry in entries]


def refusal(outcome: SendOutcome) -> ResponseError:
    """The error that an outcome stands for."""
    return error_of(outcome.status, {"content-type": JSON}, msgspec.json.encode(outcome.body))


def answer_error(answer: Response) -> ResponseError:
    """The error that an answer to the request for a WebSocket stands for."""
    if answer.status < 300:
        raise ProtocolError("the server does not know WebSockets at this address")
    return error_of(answer.status, answer.headers, answer.body)


def is_passing(error: FencepostError) -> bool:
    """Whether what kept a session from beginning may be over soon."""
    if isinstance(error, ConnectionFailedError):
        return not error.final
    if isinstance(error, ResponseError):
        return error.status in REPEATED
    if isinstance(error, SessionClosedError):
        return not Ended(error.close_code, error.kind, error.feature, error.detail).is_final
    return False
