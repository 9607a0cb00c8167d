"""`fencepost groups`: look at groups of workers, and repair what stands still.

Operations take the names of targets, or a filter of globs (`--target`, `--source`, `--lane`,
`--blocked`). `--all` says that every target is meant. `--dry-run` counts what the filter takes and
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Signature, signature
from typing import Annotated, Any

import typer

import fencepost
from fencepost.cli.options import AsJson, Token, Url
from fencepost.cli.render import (
    USAGE,
    CommandError,
    ask,
    show_facts,
    show_lines,
    show_list,
    show_table,
    talking,
)
from fencepost.protocol.groups import FilterInvalid, make_filter

app = typer.Typer(
    help="Groups of workers: look at them, and repair what stands still.",
)

Group = Annotated[str, typer.Argument(help="The group's name.")]
Targets = Annotated[list[str] | None, typer.Argument(help="Targets by name.")]
TargetGlob = Annotated[str | None, typer.Option("--target", help="Glob of target names.")]
SourceGlob = Annotated[str | None, typer.Option("--source", help="Glob of sources.")]
LaneGlob = Annotated[str | None, typer.Option("--lane", help="Glob of lanes.")]
Blocked = Annotated[bool, typer.Option("--blocked", help="Only blocked targets.")]
All = Annotated[bool, typer.Option("--all", help="Every target.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Count, and change nothing.")]


@app.callback(invoke_without_command=True)
def _groups(
    context: typer.Context, url: Url = None, token: Token = None, as_json: AsJson = False
) -> None:
    """Without a command: list the groups."""
    if context.invoked_subcommand is not None:
        return
    with talking(url, token, as_json=as_json) as client:
        show_list(
            client.groups(),
            ("group", "hands out", "sources", "targets", "parked"),
            lambda one: (
                *(one.group, one.targets, ", ".join(one.sources)),
                *(one.targets_count, one.parked_count),
            ),
            empty="there are no groups",
            as_json=as_json,
        )


@app.command("show")
def show(group: Group, url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """Show a group: its settings, counts and lag."""
    with talking(url, token, as_json=as_json) as client:
        info = client.group(group).info()
        stats = client.group(group).stats()
        if as_json:
            show_lines([{"group": info, "stats": stats}])
            return
        lanes = stats.pop("lanes")
        for time in ("counted_ms", "oldest_ms"):
            del stats[time]  # `lag_ms` says it for people.
        show_facts({"group": info.group, "sources": ", ".join(info.sources), **stats})
        columns = ("lane", "ready", "leased", "deferred", "blocked", "idle", "lag ms")
        fields = ("lane", "ready", "leased", "deferred", "blocked", "idle", "lag_ms")
        show_table(columns, ([lane[name] for name in fields] for lane in lanes), empty="no targets")


@app.command("blocked")
def blocked(group: Group, url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """List the targets that are blocked, with their errors."""
    with talking(url, token, as_json=as_json) as client:
        show_list(
            client.group(group).streams(state="blocked"),
            ("target", "at", "failed on", "retries", "lost", "error"),
            lambda one: (one.target, one.at, one.failed, one.retry, one.lost, one.error),
            empty="no target is blocked",
            as_json=as_json,
        )


@app.command("parked")
def parked(
    group: Group,
    match: Annotated[str | None, typer.Option(help="Glob of target names.")] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """List the events that were set aside, with their errors."""
    with talking(url, token, as_json=as_json) as client:
        show_list(
            client.group(group).parked(match=match),
            ("target", "position", "attempts", "error"),
            lambda one: (one.target, one.position, one.attempts, one.error),
            empty="no event is parked",
            as_json=as_json,
        )


class Chosen:
    """The targets that an operation is about."""

    def __init__(
        self,
        targets: list[str] | None,
        target: str | None,
        source: str | None,
        lane: str | None,
        *,
        is_blocked: bool,
        all_of_them: bool,
    ) -> None:
        fields = {"target": target, "source": source, "lane": lane}
        given: dict[str, Any] = {key: value for key, value in fields.items() if value is not None}
        if is_blocked:
            given["blocked"] = True
        if bool(targets) + bool(given) + all_of_them != 1:
            raise CommandError(
                "name targets, or give a filter (--target, --source, --lane, --blocked), or --all",
                USAGE,
            )
        self.targets = targets or None
        self.filter = None if targets else given

    def count(self, group: fencepost.Group) -> int:
        """How many targets there are of these."""
        if self.targets is not None:
            return sum(one.target in self.targets for one in group.streams())
        made = make_filter(**(self.filter or {}))
        if isinstance(made, FilterInvalid):
            raise CommandError(made.detail, USAGE)
        state = "blocked" if made.blocked else None
        return sum(
            made.matches(one.target, one.source, one.lane, blocked=one.blocked)
            for one in group.streams(state=state)
        )


def _changed(count: int, *, dry_run: bool, as_json: bool) -> None:
    _show({"would_change" if dry_run else "changed": count}, as_json=as_json)


def _show(facts: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        show_lines([facts])
    else:
        show_facts(facts)


# The operations. `_operate` has what all of them do and the options all of them have. Each adds
# what it does to the group, and options of its own.

Act = Callable[..., int]
"""Called with the group, the chosen targets and the operation's own options; returns a count."""


def _operate(
    act: Act,
    own_options: dict[str, Any],
    group: Group,
    targets: Targets = None,
    target: TargetGlob = None,
    source: SourceGlob = None,
    lane: LaneGlob = None,
    is_blocked: Blocked = False,
    all_of_them: All = False,
    dry_run: DryRun = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    with talking(url, token, as_json=as_json) as client:
        chosen = Chosen(
            targets, target, source, lane, is_blocked=is_blocked, all_of_them=all_of_them
        )
        found = client.group(group)
        count = chosen.count(found) if dry_run else act(found, chosen, **own_options)
        _changed(count, dry_run=dry_run, as_json=as_json)


def _operation(act: Act, *, blocked_only: bool = False) -> Act:
    """Make a command of `act`: its arguments come before the targets, its options behind them.

    With `blocked_only` a filter takes only blocked targets, and `--blocked` need not be given.
    """
    group, targets, *options = list(signature(_operate, eval_str=True).parameters.values())[2:]
    own = list(signature(act, eval_str=True).parameters.values())[2:]
    own_arguments = [one for one in own if one.default is one.empty]
    own_options = [one for one in own if one.default is not one.empty]
    if blocked_only:
        options = [one for one in options if one.name != "is_blocked"]

    def command(**given: Any) -> None:
        if blocked_only:
            given["is_blocked"] = not given["targets"] and not given["all_of_them"]
        _operate(act, {one.name: given.pop(one.name) for one in own}, **given)

    parameters = [group, *own_arguments, targets, *own_options, *options]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    app.command(act.__name__, help=act.__doc__)(command)
    return act


def unblock(group: fencepost.Group, chosen: Chosen) -> int:
    """Let blocked targets go on where they stopped.

    Examples:

      fencepost groups unblock billing orders/7
      fencepost groups unblock billing --target 'webhooks-out-*' --dry-run
    """
    return group.unblock(chosen.targets, filter=chosen.filter)


_operation(unblock, blocked_only=True)


@_operation
def reset(
    group: fencepost.Group,
    chosen: Chosen,
    at: Annotated[
        int | None, typer.Option(help="The position to go back to; without it, the start.")
    ] = None,
) -> int:
    """Send targets back: their events are handled again."""
    return group.reset(chosen.targets, filter=chosen.filter, at=at)


@_operation
def skip(
    group: fencepost.Group,
    chosen: Chosen,
    at: Annotated[
        int | None,
        typer.Option(help="The position to skip to; without it, past the event that failed."),
    ] = None,
) -> int:
    """Move targets past the event that failed, without handling it."""
    return group.skip(chosen.targets, filter=chosen.filter, at=at)


@_operation
def defer(
    group: fencepost.Group,
    chosen: Chosen,
    until_ms: Annotated[int, typer.Argument(help="Milliseconds since 1970; 0 ends the wait.")],
) -> int:
    """Keep targets from claims until a time."""
    return group.defer(until_ms, chosen.targets, filter=chosen.filter)


@_operation
def prioritize(
    group: fencepost.Group,
    chosen: Chosen,
    priority: Annotated[int, typer.Argument(help="Greater is more urgent; 0 is the default.")],
) -> int:
    """Give targets a priority."""
    return group.prioritize(priority, chosen.targets, filter=chosen.filter)


@app.command("park")
def park(
    group: Group,
    target: Annotated[str, typer.Argument(help="The target.")],
    position: Annotated[int, typer.Argument(help="The position of the event.")],
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Set one event aside; its target goes on behind it."""
    with talking(url, token, as_json=as_json) as client:
        count = client.group(group).park([(target, position)])
        _changed(count, dry_run=False, as_json=as_json)


@app.command("replay")
def replay(
    group: Group,
    target: TargetGlob = None,
    limit: Annotated[int, typer.Option(help="How many events at most.", min=1)] = 100,
    dry_run: DryRun = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Give parked events out again.

    Examples:

      fencepost groups replay billing --limit 10
      fencepost groups replay billing --target 'orders/*' --dry-run
    """
    with talking(url, token, as_json=as_json) as client:
        found = client.group(group)
        if dry_run:
            count = sum(1 for event in found.parked(match=target) if not event.replaying)
            count = min(count, limit)
        else:
            chosen = {} if target is None else {"target": target}
            count = found.replay(filter=chosen, limit=limit)
        _changed(count, dry_run=dry_run, as_json=as_json)


@app.command("delete")
def delete(
    group: Group,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Delete a group. Its leases are lost, and how far it came is forgotten."""
    with talking(url, token, as_json=as_json) as client:
        if not yes:
            known = client.group(group).info()
            ask(f"Delete {group} with its {known.targets_count} targets?")
        client.group(group).delete()
        _show({"group": group, "deleted": True}, as_json=as_json)
