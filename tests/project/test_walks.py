"""The walks in ARCHITECTURE.md lead through functions that exist."""

import importlib
import re
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import pytest

from tools.changed import all_files

ROOT = Path(__file__).parents[2]

_STEP = re.compile(r"^\d+\. `([\w/]+)\.py` `([\w.]+)`: .+$", re.MULTILINE)


class Walk(NamedTuple):
    """A heading, and the steps below it: a module and a function in it."""

    title: str
    steps: list[tuple[str, str]]


def walks() -> list[Walk]:
    _, _, section = (ROOT / "ARCHITECTURE.md").read_text().partition("\n## Five walks\n")
    section = section.partition("\n## ")[0]
    _, *parts = re.split(r"^### ", section, flags=re.MULTILINE)
    return [Walk(part.partition("\n")[0], _STEP.findall(part)) for part in parts]


def test_there_are_five_walks_and_every_numbered_line_is_a_step() -> None:
    _, _, section = (ROOT / "ARCHITECTURE.md").read_text().partition("\n## Five walks\n")
    numbered = re.findall(r"^\d+\. ", section.partition("\n## ")[0], re.MULTILINE)

    assert len(walks()) == 5
    assert sum(len(walk.steps) for walk in walks()) == len(numbered)


@pytest.mark.parametrize("walk", walks(), ids=lambda walk: walk.title)
def test_every_function_of_a_walk_exists(walk: Walk) -> None:
    missing = [
        f"{module}.py {function}"
        for module, function in walk.steps
        if not is_there(module, function)
    ]

    assert missing == [], "ARCHITECTURE.md names these; `just walk` shows the way as it is now"


def test_every_module_in_the_table_of_the_layers_exists() -> None:
    """A name without a folder is in the folder of the name before it."""
    missing = []
    for cell in re.findall(r"^\| (`[\w/.`, ]+`) \|", (ROOT / "ARCHITECTURE.md").read_text(), re.M):
        folder = ROOT / "src/fencepost"
        for name in re.findall(r"`([^`]+)`", cell):
            place = ROOT / "src/fencepost" / name if "/" in name.rstrip("/") else folder / name
            folder = place.parent
            if not place.exists():
                missing.append(name)

    assert missing == []


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs/internals").glob("*.md")), ids=lambda p: p.name
)
def test_every_module_that_a_page_on_internals_names_exists(page: Path) -> None:
    scripts = (ROOT / ".ci").glob("*.py")
    known = {str(file.relative_to(ROOT)) for file in (*all_files().values(), *scripts)}
    named = re.findall(r"`([\w/.]+\.py)`", page.read_text())

    assert [
        name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in known)
    ] == []


def is_there(module: str, function: str) -> bool:
    """Whether a function, or a method of a class, is where the page says."""
    try:
        loaded = importlib.import_module(
            "fencepost." + module.replace("/", ".").removesuffix(".__init__")
        )
        return callable(reduce(getattr, function.split("."), loaded))
    except (ImportError, AttributeError):
        return False
