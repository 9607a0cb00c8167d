"""The session with a mesh: a WebSocket for its sends and for what comes to the inbox.

A session is one connection: when that is lost, the session is over, and its `Link` makes another.
What had no outcome then is a failed attempt like any other, because the outbox owns retrying.
"""

from __future__ import annotations

import asyncio

import msgspec

from fencepost.client.aio.meshes import AsyncMesh
from fencepost.client.aio.sessions import AsyncMeshSession
from fencepost.client.errors import (
    ConnectionFailedError,
    FencepostError,
    InvalidArgumentError,
    ProtocolError,
    SessionClosedError,
)
from fencepost.client.meshes import SendReceipt

ANSWER_SECONDS = 30.0
"""How long a send may wait for its outcome; the connection may be alive and a store not."""
FATAL_CODES = (4003, 4004, 4010, 4011, 4012)
"""Ends of a session that are ends of the daemon."""


class SessionSends:
    """Sends through a session; what is too long for a frame goes by HTTP."""

    def __init__(self, session: AsyncMeshSession, names: AsyncMesh) -> None:
        self._session = session
        self._names = names
        self._stalled = asyncio.Event()

    async def stalled(self) -> None:
        """Return once a send had no answer in time: the session is to be ended."""
        await self._stalled.wait()

    async def send_encoded(self, data: bytes) -> SendReceipt:
        """Send once: a failure is raised, not repeated."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await (await self._session.send_encoded(data)).receipt()
        except InvalidArgumentError:
            return await self._names.send_encoded(data)
        except TimeoutError:
            self._stalled.set()
            detail = f"no answer within {ANSWER_SECONDS:g} s"
            raise ConnectionFailedError(detail, sent=True) from None
        except msgspec.ValidationError as error:
            raise ProtocolError(f"the answer to a send is no receipt: {error}") from None


def is_fatal(error: FencepostError) -> bool:
    """Whether a session ended in a way that ends the daemon, with an exit code of its own."""
    return isinstance(error, SessionClosedError) and error.close_code in FATAL_CODES
