# Generated from src/fencepost/events/aio/books.py by `just twins`: change that file.
"""The books of an open app: close them, by hand or by the policies that the app declares."""

from __future__ import annotations

import inspect
from datetime import datetime

from fencepost.client.errors import ConflictError
from fencepost.client.sync.client import Client
from fencepost.events import closing
from fencepost.events.closing import Archive, ClosedBooks, Closing, Period, Policy, Then
from fencepost.events.correlating import Correlating
from fencepost.events.deciding import Deciding
from fencepost.events.declarations import Declarations
from fencepost.events.errors import ArchiveError, ConcurrencyError
from fencepost.events.projections.projecting import registry_of
from fencepost.events.projections.working import in_thread
from fencepost.events.registry import Breadcrumb
from fencepost.events.types import Entity


def _called(archive: Archive, period: Period) -> Exception | None:
    if not inspect.iscoroutinefunction(archive):
        raised: Exception | None = in_thread(lambda: _raised(archive, period))
        return raised
    try:
        archive(period)
    except Exception as error:
        return error
    return None


def _raised(archive: Archive, period: Period) -> Exception | None:
    """What a plain callback raised: a future cannot raise `StopIteration`."""
    try:
        archive(period)
    except Exception as error:
        return error
    return None


class Books:
    """The books of an app's entities. `shop.books` of an open app is this.

    Nothing goes that a group has work left on: then the outcome is `pending`, and names the group.
    A close that ended early, by a kill or a failing archive callback, goes on when it is called
    again.
    """

    def __init__(self, app: Declarations, client: Client, deciding: Deciding) -> None:
        self._app = app
        self._client = client
        self._driver = client._driver
        self._deciding = deciding

    def close(
        self,
        kind: type[Entity],
        entity_id: str,
        *,
        then: Then = "restart",
        archive: Archive | None = None,
    ) -> ClosedBooks:
        """End the period of an entity: its events go, and its state remains.

        Args:
            kind: The class of the entity.
            entity_id: Its id.
            then: `restart` goes on from `$opened`, which holds the state; `retire` drops all, and
                the stream takes no events any more.
            archive: Called with the `Period` before its events go; by default what the app's
                `books` declares. What it raises leaves the stream guarded.
        """
        path = kind.__entity__.path_of(entity_id)
        chosen = archive or self._archive_of(kind)
        return self._close(kind, path, then, chosen)

    def reopen(self, kind: type[Entity], entity_id: str) -> ClosedBooks:
        """Give up a close that has begun: the entity takes events again, and nothing has gone."""
        path = kind.__entity__.path_of(entity_id)
        return self._told(self._driver.run(closing.reopen_books(self._run(), kind, path)))

    def drop(
        self,
        kind: type[Entity],
        entity_id: str,
        *,
        before: datetime,
        archive: Archive | None = None,
    ) -> ClosedBooks:
        """Drop the events before a time, while the entity stays live; its state stays whole."""
        path = kind.__entity__.path_of(entity_id)
        chosen = archive or self._archive_of(kind)
        return self._told(
            self._driver.run(closing.drop_before(self._run(), kind, path, before, chosen))
        )

    def close_due(self) -> list[ClosedBooks]:
        """Do what the app's policies say is due; what was closed, and what could not be yet.

        A stream that other writers keep changing meanwhile is left for the next time.
        """
        found = []
        for policy in self._app.policies:
            now = closing.now_of(self._run())
            glob = policy.entity.__entity__.glob
            for info in self._client.streams(match=glob):
                if not policy.may_be_due(info, now):
                    continue
                newest = self._driver.run(closing.newest_event(self._deciding, info.path))
                if not policy.is_due(newest, now):
                    continue
                try:
                    done = self._apply(policy, info.path, now)
                except (ConcurrencyError, ConflictError):
                    continue
                except ArchiveError as error:
                    guarded = policy.then != "window"
                    done = ClosedBooks(
                        stream=info.path, outcome="pending", guarded=guarded, error=str(error)
                    )
                if done.outcome != "unchanged":
                    found.append(done)
        return found

    def _apply(self, policy: Policy, path: str, now: datetime) -> ClosedBooks:
        if policy.then != "window":
            return self._close(policy.entity, path, policy.then, policy.archive)
        assert policy.age is not None
        before = now - policy.age
        return self._told(
            self._driver.run(
                closing.drop_before(self._run(), policy.entity, path, before, policy.archive)
            )
        )

    def _close(
        self, kind: type[Entity], path: str, then: Then, archive: Archive | None
    ) -> ClosedBooks:
        return self._told(
            self._driver.run(closing.close_books(self._run(), kind, path, then, archive))
        )

    def _archive_of(self, kind: type[Entity]) -> Archive | None:
        declared = (policy.archive for policy in self._app.policies if policy.entity is kind)
        return next((archive for archive in declared if archive is not None), None)

    def _run(self) -> Closing:
        settings, app = self._driver.settings, self._app
        correlating = []
        if app.registry.reactions:
            correlating.append(Correlating(settings, app.name, app.registry))
        for projection in app.projections.values():
            registry = registry_of(app, projection)
            correlating.append(Correlating(settings, projection.group, registry, notes=False))
        return Closing(
            deciding=self._deciding,
            correlating=correlating,
            call=_called,
            wait_ms=app.settings.books_wait_ms,
        )

    def _told(self, done: ClosedBooks) -> ClosedBooks:
        if done.outcome in ("restarted", "retired", "dropped"):
            crumb = Breadcrumb(kind="closed", app=self._app.name, stream=done.stream)
            self._app.tell(crumb)
        return done
