"""`python -m tests.faults.dying`: fencepost that kills itself at a named point of a send.

The send has the id `doomed`, and FENCEPOST_TEST_DIES names the point: `inside`, when its rows are
written in the open transaction, or `after`, when they are committed and no answer has left. Each
point is reached exactly, so no test has to hit it by chance. Nothing else may ever start this.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from fencepost.cli.main import main
from fencepost.protocol.envelopes import Send
from fencepost.server.mesh.sending import Sending
from fencepost.store.postgres.driver.pipeline import WritingConnection
from fencepost.store.sqlite.connection import LedgerWriter

DOOMED = "doomed"
DIES = "FENCEPOST_TEST_DIES"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_inside() -> None:
    """Write what a commit would, and end before it is one."""
    commit, write_and_commit = LedgerWriter.commit, WritingConnection.write_and_commit

    def dying_commit(self: LedgerWriter) -> None:
        query = "SELECT count(*) FROM sends WHERE client_id = ?"
        [(count,)] = self.connection.raw.execute(query, (DOOMED,)).fetchall()
        if count:
            die()
        commit(self)

    async def dying_write(
        self: WritingConnection, statements: Sequence[Any], end: Sequence[object], **more: Any
    ) -> None:
        if any(DOOMED in row for name, rows in statements if name == "save_send" for row in rows):
            await self.write(statements)
            die()
        await write_and_commit(self, statements, end, **more)

    LedgerWriter.commit = dying_commit  # type: ignore[method-assign]
    WritingConnection.write_and_commit = dying_write  # type: ignore[method-assign]


def die_after() -> None:
    """End when the store has said that the send is durable."""
    answer = Sending.answer

    def dying_answer(self: Sending, mesh: str, send: Send, outcome: Any) -> Any:
        if send.client_message_id == DOOMED:
            die()
        return answer(self, mesh, send, outcome)

    Sending.answer = dying_answer  # type: ignore[method-assign]


if __name__ == "__main__":
    {"inside": die_inside, "after": die_after}[os.environ[DIES]]()
    main()
