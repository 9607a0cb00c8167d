"""Which targets an event concerns, and which reactions of a target it is for."""

from __future__ import annotations

from typing import Any, Union

import pytest

from fencepost.client.errors import InvalidArgumentError
from fencepost.events import App, AppSettings, Breadcrumb, DefinitionError, Recorded
from tests.unit.events.shop import Order, Placed, Reserved, Stock


def recorded(data: Any, stream: str, position: int = 5) -> Recorded[Any]:
    name = type(data).__name__
    return Recorded(data=data, name=name, stream=stream, version=0, position=position)


PLACED = recorded(Placed(sku="tea", quantity=1), "orders/7")


def handler(event: Recorded[Any], context: Any) -> None:
    """Does nothing."""


def app_of(*targets: Any) -> App:
    app = App("shop", entities=[Order, Stock])
    for number, to in enumerate(targets):
        app.reaction(Placed, to=to, name=f"r{number}")(handler)
    return app


def test_the_target_is_the_stream_of_the_event_by_default() -> None:
    [found] = app_of(None).registry.targets(PLACED)

    assert (found.target, found.source, found.position) == ("orders/7", "orders/7", 5)


def test_a_target_may_be_fixed_or_computed() -> None:
    registry = app_of("all", lambda event: f"stock/{event.data.sku}").registry

    assert [found.target for found in registry.targets(PLACED)] == ["all", "stock/tea"]
    assert [found.source for found in registry.targets(PLACED)] == ["orders/*", "orders/*"]


def test_events_of_several_entities_share_a_source_that_holds_all_streams() -> None:
    app = app_of("all")
    app.reaction(Reserved, to="all", name="other")(handler)

    assert [found.source for found in app.registry.targets(PLACED)] == ["**"]


def test_a_resolver_may_leave_an_event_out() -> None:
    assert app_of(lambda event: event.correlation).registry.targets(PLACED) == []


def test_reactions_with_one_target_are_one_piece_of_work() -> None:
    registry = app_of("all", "all", None).registry

    assert [found.target for found in registry.targets(PLACED)] == ["all", "orders/7"]
    assert [found.name for found in registry.matching(PLACED, "all", None)] == ["r0", "r1"]
    assert [found.name for found in registry.matching(PLACED, "orders/7", None)] == ["r2"]


def test_a_resolver_that_raises_sends_its_event_to_the_events_own_stream() -> None:
    registry = app_of(lambda event: event.data.nothing).registry

    assert [found.target for found in registry.targets(PLACED)] == ["orders/7"]
    assert [found.name for found in registry.matching(PLACED, "orders/7", None)] == ["r0"]


def test_only_streams_of_the_app_concern_it() -> None:
    registry = app_of(None).registry

    assert registry.concerns("orders/7", "Placed")
    assert not registry.concerns("elsewhere/7", "Placed")
    assert not registry.concerns("orders/7", "Reserved")


def test_the_log_is_asked_for_the_names_of_reactions() -> None:
    assert app_of(None).registry.selection() == {
        "name": ["Placed"],
        "match": ["orders/*", "stock/*"],
    }


def test_two_reactions_of_one_name_are_refused() -> None:
    app = App("shop", entities=[Order])
    app.reaction(Placed)(handler)

    with pytest.raises(DefinitionError, match="handler"):
        app.reaction(Placed)(handler)


@pytest.mark.parametrize("event", ["Placed", handler, Order])
def test_a_reaction_is_to_a_class_of_events(event: Any) -> None:
    with pytest.raises(DefinitionError, match=r"@app\.reaction\(Placed\)"):
        App("shop").reaction(event)


def test_a_handler_takes_two_arguments() -> None:
    app = App("shop")

    def alone(event: Recorded[Placed]) -> None: ...

    handle: Any = alone
    with pytest.raises(DefinitionError, match="alone is called with two arguments"):
        app.reaction(Placed)(handle)
    with pytest.raises(DefinitionError, match="alone is called with two arguments"):
        app.projection("placed")(handle)


def _either(event: Recorded[Placed | Reserved], db: Any) -> None: ...


def _old_way(event: Recorded[Union[Placed, Reserved]], db: Any) -> None: ...  # noqa: UP007


def _of_each(event: Recorded[Placed] | Recorded[Reserved], db: Any) -> None: ...


@pytest.mark.parametrize("handler", [_either, _old_way, _of_each])
def test_a_projection_is_for_every_event_of_its_annotation(handler: Any) -> None:
    app = App("shop")

    app.projection("listed")(handler)

    assert app.projections["listed"].handlers[0].events == (Placed, Reserved)


def test_a_handler_of_a_projection_is_a_plain_function() -> None:
    async def listed(event: Recorded[Placed], db: Any) -> None: ...

    found: Any = listed
    with pytest.raises(DefinitionError, match="is async"):
        App("shop").projection("placed")(found)


def test_a_hook_that_raises_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    app = App("shop")
    seen: list[str] = []

    @app.hook("acked")
    def fail(crumb: Breadcrumb) -> None:
        raise RuntimeError("boom")

    app.hook("acked")(lambda crumb: seen.append(crumb.kind))
    app.tell(Breadcrumb(kind="acked", app="shop"))

    assert seen == ["acked"]
    assert "a hook for acked failed" in caplog.text


def test_an_unknown_hook_and_a_bad_name_are_refused() -> None:
    with pytest.raises(DefinitionError, match="claimed"):
        App("shop").hook("no-such-hook")
    with pytest.raises(ValueError, match="not of"):
        App("a b")


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"entities": Order}, "entities is a list"),
        ({"entities": [Order()]}, "no class of entities"),
        ({"entities": [Placed]}, "no class of entities"),
        ({"events": Placed}, "events is a list"),
        ({"sources": "imports/*"}, "sources is a list"),
        ({"settings": {"lease_ms": 5_000}}, "settings is AppSettings"),
    ],
)
def test_what_an_app_is_not_made_of_is_named(named: Any, said: str) -> None:
    with pytest.raises((DefinitionError, InvalidArgumentError), match=said):
        App("any", **named)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"lease_ms": "10s"}, "lease_ms is a whole number"),
        ({"snapshot_every": 0}, "snapshot_every is a number of events"),
        ({"start": "last"}, "start is 'first', 'now' or a position"),
    ],
)
def test_a_bound_that_cannot_be_is_named(named: Any, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        AppSettings(**named)


def test_a_retry_that_is_none_is_refused_where_it_is_declared() -> None:
    app = App("any", entities=[Order])

    with pytest.raises(DefinitionError, match=r"retry is Retry\(3\), not 3"):
        app.reaction(Placed, retry=3)  # type: ignore[call-overload]


def test_the_schema_of_a_projection_is_given_once() -> None:
    app = App("any", entities=[Order])
    app.projection("orders", schema="create table {orders} (sku text)")(_either)

    with pytest.raises(DefinitionError, match="its schema and its retry go with its first"):
        app.projection("orders", schema="create table {more} (sku text)")(_either)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"final": "Placed"}, "final is a class of events"),
        ({"age": 30}, r"age is a timedelta\(days=\.\.\.\), not 30"),
        ({"then": "restrat"}, "then is restart, retire or window"),
    ],
)
def test_a_policy_that_cannot_be_is_named(named: Any, said: str) -> None:
    with pytest.raises((DefinitionError, InvalidArgumentError), match=said):
        App("any", entities=[Order]).books(Order, **named)


def test_an_app_is_opened_with_a_client() -> None:
    with pytest.raises(InvalidArgumentError, match="open takes a client"):
        App("any").open("http://localhost:4437")  # type: ignore[call-overload]
