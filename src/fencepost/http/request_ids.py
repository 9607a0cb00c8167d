"""Names for requests that were refused or failed: the header `X-Request-Id` of their answers.

A person who reports an error names the request by it, and the server's log has the same name. A
client or a proxy that sends `X-Request-Id` chooses the name; any other request gets one here, of a
beginning that differs with each start of the server and a number. Answers below 400 carry none:
what went well needs no name, and an append is not made longer by it.
"""

from __future__ import annotations

import logging
import re
from itertools import count

from fencepost.clock import Clock
from fencepost.http.messages import Headers, Request, Response

log = logging.getLogger("fencepost.http")

_CHOSEN = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestIds:
    """Gives the names, for all connections of one front end."""

    __slots__ = ("_numbers", "_start")

    def __init__(self, clock: Clock) -> None:
        self._start = clock.token(4).hex().encode()
        self._numbers = count(1)

    def name(self, request: Request | None, answer: Response) -> Headers:
        """The headers of a refusal with the name of its request, which is None if unreadable.

        An answer that another node gave, and this one passes on, has its name already.
        """
        if any(name.lower() == b"x-request-id" for name, _ in answer.headers):
            return answer.headers
        chosen = None if request is None else request.headers.get(b"x-request-id")
        if chosen is None or _CHOSEN.fullmatch(chosen) is None:
            chosen = b"%b-%d" % (self._start, next(self._numbers))
        if answer.status == 500:
            log.error("request %s was answered 500", chosen.decode())
        return [*answer.headers, (b"X-Request-Id", chosen)]
