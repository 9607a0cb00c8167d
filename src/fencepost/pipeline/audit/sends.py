"""Sends of meshes: the orphan check of the server, for every mesh, as part of an audit.

The rules are the server's own (`store/read/meshes.py`): rows and messages are held against each
other page by page, both ways, while sends go on. Doing it again here would be a second set of rules
for the same rows, which only the server has. What scales is that each page is one bounded read.
"""

from __future__ import annotations

from contextlib import suppress

from fencepost.client.errors import ForbiddenError, MeshNotFoundError
from fencepost.client.sync import Client
from fencepost.pipeline.audit.reports import Defect

KINDS = {
    "send_without_message": "a dedupe row has no message, although history is available",
    "send_missing": "a message with a client id has no dedupe row",
    "send_repeated": "two dedupe rows stand for one message, or two messages have one id",
}
"""What each kind of defect means."""


def check(client: Client) -> list[Defect]:
    """What is wrong with the sends of all meshes that the principal administers."""
    found: list[Defect] = []
    for mesh in client.meshes():
        # A mesh may be deleted meanwhile, or be one that the principal may not look into.
        with suppress(MeshNotFoundError, ForbiddenError):
            findings = client.mesh(mesh.mesh).check().findings
            found += [Defect(one.code, f"__mesh/{mesh.mesh}", None, one.detail) for one in findings]
    return found
