"""The commands of `fencepost outbox` for rows in a caller's own database."""

from __future__ import annotations

import typer


def add_commands(app: typer.Typer) -> None:
    """Add them to the group `fencepost outbox`."""
