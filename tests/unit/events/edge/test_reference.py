"""docs/reference/idempotency.md lists every code and setting of the middleware, and no other."""

import re
from dataclasses import fields
from pathlib import Path

from fencepost.events import edge
from fencepost.events.edge import IdempotencySettings

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "reference" / "idempotency.md").read_text()
SOURCE = ROOT / "src" / "fencepost" / "events" / "edge"


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def first_cells(text: str) -> list[str]:
    return re.findall(r"^\| `([a-z_]+)` \|", text, re.MULTILINE)


def test_every_code_is_listed() -> None:
    source = "".join(file.read_text() for file in SOURCE.glob("*.py"))

    assert sorted(first_cells(section("Refusals"))) == sorted(re.findall(r'code="(\w+)"', source))


def test_every_setting_is_listed() -> None:
    listed = first_cells(section("Settings"))

    assert listed == [field.name for field in fields(IdempotencySettings)]


def test_every_public_name_is_listed() -> None:
    assert [name for name in edge.__all__ if f"`{name}" not in section("Names")] == []
