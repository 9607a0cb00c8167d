"""`fencepost outbox`: the daemon on this machine that accepts sends and delivers them.

The commands for rows in a caller's own database are in `outbox_table`, and join the same group.
"""

from __future__ import annotations

import typer

from fencepost.cli import outbox_rows, outbox_run, outbox_table

app = typer.Typer(
    help="The outbox: sends that are accepted here and delivered when the server can be reached.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _outbox() -> None:
    """The outbox: sends that are accepted here and delivered when the server can be reached."""


app.command("run")(outbox_run.run)
outbox_table.add_commands(app)
app.command("list")(outbox_rows.list_)
app.command("inspect")(outbox_rows.inspect)
app.command("requeue")(outbox_rows.requeue)
app.command("drop")(outbox_rows.drop)
