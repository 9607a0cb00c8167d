"""The cache of newest states: bounded, and never older than it was."""

from __future__ import annotations

from fencepost.events.loading import Cache, Loaded
from tests.unit.events.shop import Order


def at(version: int, path: str = "orders/7") -> Loaded[Order]:
    return Loaded(state=Order(placed_count=version), stream=path, version=version)


def test_a_state_that_comes_late_does_not_replace_a_newer_one() -> None:
    """Two threads load at once, and the one that read first may put last."""
    cache = Cache(10)

    cache.put(at(2))
    cache.put(at(1))

    assert cache.get(Order, "orders/7") == at(2)


def test_what_was_used_last_stays() -> None:
    cache = Cache(2)
    cache.put(at(0, "orders/a"))
    cache.put(at(0, "orders/b"))
    cache.get(Order, "orders/a")

    cache.put(at(0, "orders/c"))

    assert len(cache) == 2
    assert cache.get(Order, "orders/a") is not None
    assert cache.get(Order, "orders/b") is None


def test_a_state_that_was_found_old_is_forgotten() -> None:
    cache = Cache(2)
    cache.put(at(0))

    cache.drop(Order, "orders/7")

    assert cache.get(Order, "orders/7") is None
