"""The async client: the classes that a program holds, over the operations of the core."""

from fencepost.client.aio.client import AsyncClient
from fencepost.client.aio.groups import AsyncGroup
from fencepost.client.aio.meshes import AsyncMesh
from fencepost.client.aio.readings import AsyncListing, AsyncLogReading, AsyncReading
from fencepost.client.aio.streams import AsyncStream
from fencepost.client.aio.subscriptions import AsyncSubscription, AsyncWake
from fencepost.client.aio.webhooks import AsyncWebhookVerifier

__all__ = [
    "AsyncClient",
    "AsyncGroup",
    "AsyncMesh",
    "AsyncListing",
    "AsyncLogReading",
    "AsyncReading",
    "AsyncStream",
    "AsyncSubscription",
    "AsyncWake",
    "AsyncWebhookVerifier",
]
