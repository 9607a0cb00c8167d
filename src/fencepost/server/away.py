"""What readers are told while the store is away: to come back, not that something is missing.

A store on another machine can be out of reach for a while. A read that has not begun to be answered
gets 503 with Retry-After; an event stream under way just ends, and its reader, who comes back with
the last offset it was told, gets that 503 until the store is there again. Nothing is lost by it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

from fencepost.http.front import close_chunks
from fencepost.http.messages import Answer, Response, StreamingResponse
from fencepost.server.handlers.rendering import refused
from fencepost.store.contract import StoreAwayError

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1


def store_away() -> Response:
    """The answer to a request that had to read from a store that is away."""
    return refused(
        503,
        "store_unavailable",
        "Store unavailable",
        "the database cannot be reached: nothing was changed, retry the same request",
        (b"Retry-After", b"%d" % RETRY_AFTER_S),
    )


def ending_when_away(answer: Answer) -> Answer:
    """The answer, ended where the store goes away instead of broken off as by a defect."""
    if isinstance(answer, StreamingResponse):
        return StreamingResponse(answer.status, answer.headers, _until_away(answer.chunks))
    return answer


async def _until_away(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            yield chunk
    except StoreAwayError:
        log.debug("an event stream ends because the store is away")
    finally:
        await close_chunks(chunks)
