"""What the package shows: sorted, importable, and the same for sync and async."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from fencepost import coordination

TWINS = [
    (getattr(coordination, name.removeprefix("Async")), getattr(coordination, name))
    for name in coordination.__all__
    if name.startswith("Async")
]


def test_what_is_listed_is_importable_and_sorted() -> None:
    assert coordination.__all__ == sorted(coordination.__all__)
    for name in coordination.__all__:
        shown = getattr(coordination, name)
        assert not inspect.isclass(shown) or shown.__doc__, name


@pytest.mark.parametrize(("sync", "asynchronous"), TWINS)
def test_sync_and_async_have_the_same_names_signatures_and_docs(
    sync: type[Any], asynchronous: type[Any]
) -> None:
    names = {name for name in vars(sync) if not name.startswith("_")}
    assert names == {name for name in vars(asynchronous) if not name.startswith("_")}
    for name in (*names, "__init__"):
        ours, theirs = (inspect.getattr_static(kind, name) for kind in (sync, asynchronous))
        assert type(ours) is type(theirs), name
        if inspect.isfunction(ours):
            seen = str(inspect.signature(theirs)).replace("Async", "").replace("Awaitable", "")
            seen = seen.replace("asyncio.Event", "threading.Event")
            assert str(inspect.signature(ours)) == seen, name
        assert inspect.getdoc(ours) == inspect.getdoc(theirs), name
    assert inspect.getdoc(sync) == inspect.getdoc(asynchronous)
