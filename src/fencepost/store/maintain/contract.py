"""What the background jobs need of a store: both stores have it beside the contract of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from fencepost.store.read.chunks import Readers
from fencepost.store.settings import StoreSettings
from fencepost.store.write.decider import Decider

T = TypeVar("T")


class MaintainedStore(Protocol):
    """What the background jobs need of a store."""

    @property
    def settings(self) -> StoreSettings: ...

    @property
    def readers(self) -> Readers[Any]: ...

    async def decide(self, work: Callable[[Decider], T]) -> T:
        """Let `work` decide something, and wait until that is durable."""
        ...

    async def between_commits(self, work: Callable[[Any], T]) -> T:
        """Do a piece of work on the writing connection, in transactions of its own."""
        ...

    def suspect(self, error: BaseException) -> None:
        """Upkeep met an error: stop if it was the disk's doing."""
        ...
