"""What can go wrong with events: each error is a decision that its reader can make."""

from __future__ import annotations

from collections.abc import Sequence

from fencepost.client.errors import FencepostError, InvalidArgumentError


class EventsError(FencepostError):
    """The root of the errors of `fencepost.events`."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # it is about an event or a rule, and no request's fault


class ConcurrencyError(EventsError):
    """Another writer came first, and nothing was stored. Load the state again, then decide again.

    `expected_version` is what the caller asked for (a version, or the name of a mode),
    `last_version` the newest version of the stream (-1: it is empty; None: the server did not say),
    `events` what was not stored.
    """

    def __init__(
        self,
        stream: str,
        expected_version: int | str,
        last_version: int | None,
        events: Sequence[object],
    ) -> None:
        super().__init__(
            f"{stream!r} is at version {last_version}, expected {expected_version}: "
            "nothing was stored"
        )
        self.stream = stream
        self.expected_version = expected_version
        self.last_version = last_version
        self.events = tuple(events)


class InvariantError(EventsError):
    """The state does not allow this action, and nothing was stored. `reason` says what is wrong."""

    def __init__(self, stream: str, action: str, reason: str) -> None:
        super().__init__(f"{action} on {stream!r} is not possible: {reason}")
        self.stream = stream
        self.action = action
        self.reason = reason


class ActionInvalidError(EventsError, InvalidArgumentError):
    """The arguments of an action are not what it takes; nothing was stored. Change the call."""


class DefinitionError(EventsError, TypeError):
    """An event, entity, action or reaction is not declared as it must be. Change the class."""


class UnknownEventError(EventsError):
    """A stream holds an event whose name this app does not know. Add its class to the app.

    `position` is its place in the log, or None where only `version`, its number in the stream, is
    known.
    """

    def __init__(
        self, name: str, stream: str, *, version: int | None, position: int | None = None
    ) -> None:
        super().__init__(
            f"unknown event {name!r} at {_place(stream, version, position)}: give its class to the "
            "app; if it has another name now, declare it with name="
        )
        self.name = name
        self.stream = stream
        self.version = version
        self.position = position


class EventInvalidError(EventsError):
    """An event does not fit its class. Repair its class or add an upcaster; it stays where it is.

    It names where the event lies: the stream, its `version` in the stream and, where that is
    known, its `position` in the log.
    """

    def __init__(
        self, reason: str, stream: str, *, version: int | None, position: int | None = None
    ) -> None:
        super().__init__(f"invalid event at {_place(stream, version, position)}: {reason}")
        self.reason = reason
        self.stream = stream
        self.version = version
        self.position = position


class EventTooNewError(EventInvalidError):
    """An event has a newer schema than this program knows. Deploy the code that wrote it.

    A reaction waits for that: it is tried again without spending its retries, as with an event of a
    name that this program does not know.
    """


class NonRetryableError(EventsError):
    """Raise it in a reaction: another attempt would fail as well. The target is blocked or parks.

    What happens then is `on_exhausted` of the reaction, without waiting for its attempts.
    """


class ArchiveError(EventsError):
    """The archive callback failed, which is the cause of this error; nothing has gone.

    The stream stays guarded: repair the callback and close the books again, or reopen them.
    """

    def __init__(self, stream: str, error: Exception) -> None:
        super().__init__(f"{stream!r} was not archived: {type(error).__name__}: {error}")
        self.stream = stream


class SettleTimeoutError(EventsError):
    """`settle` waited as long as it may, and work was left. Look at the group of the app."""


def _place(stream: str, version: int | None, position: int | None) -> str:
    at = "" if version is None else f" version {version}"
    return f"{stream!r}{at}" + ("" if position is None else f" position {position}")
