"""`python -m tests.faults.unfenced_sends`: fencepost with dedupe rows in their own transactions.

The row of a send is written with the next commit and not with its message. As long as the server
lives, it knows the row and all is as it should be. The test of sends runs against this once, to
show that it would notice. Nothing else may ever start it.
"""

from __future__ import annotations

from typing import Any

from fencepost.cli.main import main
from fencepost.protocol.meshes import Mesh
from fencepost.protocol.sends import DedupeRow
from fencepost.store.write.sends import Sends

keeping, finding = Sends.keep, Sends.find
late: dict[tuple[str, str, str], tuple[Mesh, DedupeRow]] = {}


def keep_later(self: Sends, group: Any, mesh: Mesh, row: DedupeRow) -> None:
    for known, kept in list(late.values()):
        keeping(self, group, known, kept)
    late.clear()
    late[mesh.name, row.sender, row.client_message_id] = (mesh, row)


def find_late_ones_too(
    self: Sends, mesh: Mesh, sender: str, client_message_id: str
) -> DedupeRow | None:
    kept = late.get((mesh.name, sender, client_message_id))
    return finding(self, mesh, sender, client_message_id) if kept is None else kept[1]


def take_the_fence_out() -> None:
    Sends.keep = keep_later  # type: ignore[method-assign]
    Sends.find = find_late_ones_too  # type: ignore[method-assign]


if __name__ == "__main__":
    take_the_fence_out()
    main()
