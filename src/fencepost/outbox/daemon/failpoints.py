"""Where a test ends the daemon: at a named point, by SIGKILL, as a power cut would.

This module is loaded only when FENCEPOST_OUTBOX_FAILPOINT is set; a normal start does not have it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

POINTS = ("accepted", "answered", "stored")
"""accepted: a send is on disk, its caller does not know. answered: the server has a message, and
the row does not say so yet. stored: messages are in the inbox here, the server does not know."""


def killing_at(point: str) -> Callable[[str], None]:
    """A failpoint that kills the process when it gets to `point`."""
    if point not in POINTS:
        raise ValueError(f"FENCEPOST_OUTBOX_FAILPOINT is one of {', '.join(POINTS)}, not {point!r}")

    def reached(name: str) -> None:
        if name == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return reached
