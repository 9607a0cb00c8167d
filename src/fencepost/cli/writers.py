"""`fencepost writers`, `writer-history` and `forget-writer`: who publishes batches, and which ones.

A writer is kept until `forget-writer` removes it: then its name is free, and so are its numbers.
"""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice
from typing import Annotated

import typer

from fencepost.cli.options import AsJson, Token, Url
from fencepost.cli.render import ask, show_facts, show_lines, show_list, talking
from fencepost.client.results import PositionRange


def writers(
    pattern: Annotated[
        str | None, typer.Argument(help="Which names: * is one segment, ** any.")
    ] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """List writers: of which query each is, in which run, and the last batch it published.

    Examples:

      fencepost writers
      fencepost writers 'by-day/*' --json | jq .batch
    """
    with talking(url, token, as_json=as_json) as client:
        show_list(
            client.writers(match=pattern),
            ("writer", "query", "epoch", "last batch", "last seen"),
            lambda one: (
                *(one.name, one.query, one.epoch, "none" if one.batch is None else one.batch),
                datetime.fromtimestamp(one.updated_ms / 1000, UTC),
            ),
            empty="no writers match",
            as_json=as_json,
        )


def writer_history(
    name: Annotated[str, typer.Argument(help="The writer's name.")],
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, help="Show the newest batches, so many.")
    ] = 100,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """List what a writer published, the newest batch first, with the positions it was read from.

    Examples:

      fencepost writer-history by-day
      fencepost writer-history by-day -n 1 --json | jq .range.until
    """
    with talking(url, token, as_json=as_json) as client:
        show_list(
            islice(client.writer_history(name), count),
            ("batch", "read after", "up to", "digest", "published"),
            lambda one: (
                *(one.batch, *_read(one.range), one.digest or "none"),
                datetime.fromtimestamp(one.published_ms / 1000, UTC),
            ),
            empty="this writer has published nothing",
            as_json=as_json,
        )


def _read(found: PositionRange | None) -> tuple[object, object]:
    if found is None:
        return "unknown", "unknown"
    return "its start" if found.after is None else found.after, found.until


def forget_writer(
    name: Annotated[str, typer.Argument(help="The writer's name.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Forget a writer. What it published stays, and every batch of it that comes again is new.

    Examples:

      fencepost forget-writer by-day
      fencepost forget-writer by-day --yes
    """
    with talking(url, token, as_json=as_json) as client:
        if not yes:
            known = client.writer(name)
            ask(f"Forget {name}, whose query {known.query} came to batch {known.batch}?")
        client.forget_writer(name)
        if as_json:
            show_lines([{"name": name, "forgotten": True}])
        else:
            show_facts({"name": name, "forgotten": True})
