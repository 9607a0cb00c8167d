# Generated from src/fencepost/client/aio/__init__.py by `just twins`: change that file.
"""The sync client: the classes that a program holds, over the operations of the core."""

from fencepost.client.sync.client import Client
from fencepost.client.sync.groups import Group
from fencepost.client.sync.meshes import Mesh
from fencepost.client.sync.readings import Listing, LogReading, Reading
from fencepost.client.sync.streams import Stream
from fencepost.client.sync.subscriptions import Subscription, Wake
from fencepost.client.sync.webhooks import WebhookVerifier

__all__ = [
    "Client",
    "Group",
    "Mesh",
    "Listing",
    "LogReading",
    "Reading",
    "Stream",
    "Subscription",
    "Wake",
    "WebhookVerifier",
]
