"""docs/reference/cli.md says what `--help` says: every command, argument and option, with its help.

To bring the page up to date after a change, replace its part below the line `<!-- commands -->` by
what `python -m tests.unit.cli.test_streams_reference` prints.
"""

import re
from pathlib import Path

import typer.main
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from fencepost.cli.main import PANELS, build

PAGE = Path(__file__).parents[3] / "docs/reference/cli.md"
MARK = "<!-- commands -->\n"
ELSEWHERE = ("demo", "serve", "data", "migrate")
OF_STREAMS = [
    name
    for commands in PANELS.values()
    for name, place in commands.items()
    if ":" not in place and place not in ELSEWHERE
]
ESCAPED = re.compile(r"[|*<]")
SHARED = ("--url", "--token", "--json")
"""Options that every command has; the page explains them once."""


Parameter = TyperArgument | TyperOption


def commands() -> dict[str, TyperCommand]:
    root = typer.main.get_command(build())
    assert isinstance(root, TyperGroup)
    found = {name: root.commands[name] for name in OF_STREAMS}
    return {name: one for name, one in found.items() if isinstance(one, TyperCommand)}


def parameters(command: TyperCommand) -> list[Parameter]:
    return [one for one in command.params if isinstance(one, TyperArgument | TyperOption)]


def section(name: str, command: TyperCommand) -> str:
    """A command as the page shows it."""
    text, _, examples = (command.help or "").partition("\n\nExamples:\n\n")
    lines = [f"## {name}", "", " ".join(text.split()), ""]
    shown = [parameter for parameter in parameters(command) if parameter.opts[0] not in SHARED]
    if shown:
        lines += ["| | |", "|---|---|"]
        for parameter in shown:
            about = ESCAPED.sub(r"\\\g<0>", parameter.help or "")
            lines.append(f"| {names_of(parameter)} | {about} |")
        lines.append("")
    lines += ["```text", *(line.strip() for line in examples.splitlines()), "```", ""]
    return "\n".join(lines)


def names_of(parameter: Parameter) -> str:
    if isinstance(parameter, TyperArgument):
        name = parameter.opts[0].upper() + ("..." if parameter.nargs == -1 else "")
        return f"`{name}`" if parameter.required else f"`[{name}]`"
    default = parameter.default
    plain = default is None or default is False or callable(default)
    return ", ".join(f"`{name}`" for name in parameter.opts) + ("" if plain else f" ({default})")


def test_the_page_has_every_command_as_its_help_has_it() -> None:
    written = PAGE.read_text().partition(MARK)[2]

    assert written.strip() == "\n".join(section(*one) for one in commands().items()).strip()


def test_every_command_explains_itself_with_an_example_and_takes_the_shared_options() -> None:
    for name, command in commands().items():
        assert f"fencepost {name}" in (command.help or "")
        options = {option for parameter in parameters(command) for option in parameter.opts}
        assert options >= set(SHARED)
        assert all(parameter.help for parameter in parameters(command))


if __name__ == "__main__":
    print("\n".join(section(*one) for one in commands().items()))  # noqa: T201
