"""The async client: the classes that a program holds, over the operations of the core."""

from fencepost.client.aio.client import AsyncClient
from fencepost.client.aio.groups import AsyncGroup
from fencepost.client.aio.readings import AsyncListing, AsyncLogReading, AsyncReading
from fencepost.client.aio.streams import AsyncStream

__all__ = [
    "AsyncClient",
    "AsyncGroup",
    "AsyncListing",
    "AsyncLogReading",
    "AsyncReading",
    "AsyncStream",
]
