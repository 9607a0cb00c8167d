"""docs/reference/events.md names everything that there is, with its defaults."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import msgspec
import pytest

import fencepost.events
from fencepost.events import App, AppSettings, OpenApp
from fencepost.events.registry import HOOKS
from fencepost.events.sync.books import Books
from fencepost.events.sync.projections import Projections

PAGE = (Path(__file__).parents[3] / "docs/reference/events.md").read_text()
WORDS = frozenset(re.findall(r"\w+", PAGE))


def test_every_public_name_is_on_the_page() -> None:
    names = [name for name in fencepost.events.__all__ if not name.startswith("Async")]

    assert [name for name in names if name not in WORDS] == []


@pytest.mark.parametrize("kind", [App, OpenApp, Books, Projections])
def test_every_method_and_its_options_are_on_the_page(kind: type) -> None:
    missing = []
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_") or name in ("works", "settle", "close", "tell"):
            continue
        options = [
            parameter.name
            for parameter in inspect.signature(method).parameters.values()
            if parameter.kind is parameter.KEYWORD_ONLY
        ]
        missing += [word for word in (name, *options) if word not in WORDS]

    assert missing == []


def test_every_setting_is_on_the_page_with_its_default() -> None:
    for field in msgspec.structs.fields(AppSettings):
        default = f"{field.default:,}" if isinstance(field.default, int) else f"`{field.default}`"
        assert f"| `{field.name}` | {default} |" in PAGE


def test_every_hook_is_on_the_page() -> None:
    assert [kind for kind in HOOKS if kind not in WORDS] == []
