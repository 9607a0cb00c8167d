"""Which databases an app may name for its projections."""

from __future__ import annotations

import sys

import pytest

from fencepost.client.errors import InvalidArgumentError
from fencepost.events.projections.stores import store_at


def test_postgresql_without_its_library_is_refused_where_the_app_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker would try again for ever, because a database that is away may come back."""
    monkeypatch.setitem(sys.modules, "psycopg", None)

    with pytest.raises(InvalidArgumentError, match=r"pip install 'fencepost\[postgres\]'"):
        store_at("postgresql://127.0.0.1/shop")
